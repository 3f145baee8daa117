"""The transport of one node. Long, until sending and receiving are split: both use every connection's state.

Messages to and from its peers, whatever happens to the connections.

Three ways to talk:

- `send` is one way, inline, and over when the bytes are with the operating system.
- `ask` lends: on one host tensors in shared memory go by reference, and `answer` writes straight into the
  place that the asker offered in `into`. Otherwise bytes travel inline, and are received straight into it.
- `refuse` answers an ask with an error, which the asker's `wait` raises.

A connection that breaks is made anew, and every ask without an answer is sent again under its old sequence
number (see `inbox`), until the peer is declared `lost` or `wait` seconds are over. While `queue` messages of
a connection are unreceived its reader rests, so that its sender feels it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.buffers import Buffer, copy, parts_of, shape
from polyrhythm.wire.channel import STALL, Channel
from polyrhythm.wire.frame import Bounds, Header, Part, same_layout
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.inbox import Inbox, Incoming, Line, Reading
from polyrhythm.wire.links import Links
from polyrhythm.wire.poller import Poller
from polyrhythm.wire.receive_targets import ReceiveTarget, ReceiveTargets, drain
from polyrhythm.wire.requests import Pending, Requests, waited

_REFUSED, _BAD = "!refused", "!bad"  # the wire's own kinds of answer; those of a node do not begin with "!"
ENDED = "!ended"  # what arrives when a connection has ended that nobody makes anew
_BULK = 1 << 22  # bytes of tensors from which on a message is read by a thread of its own


class Transport:
    """All the messages of one node. Every method may be called from any thread."""

    def __init__(
        self,
        me: Peer,
        key: bytes,
        *,
        listen: str = "unix:",
        arenas: Arenas | None = None,
        host: str = "",
        limit: int = 1 << 36,
        queue: int = 64,
        wait: float = 300.0,
        encrypt: bool = True,
        incarnation: int = 0,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        if len(key) != 32:
            raise UsageError(f"the key of a run has 32 bytes, this one {len(key)}")
        self.me = me
        self.wait = wait
        self.layout = ""
        self.bytes_sent = self.bytes_between = 0  # in all, and to those that are
        self.far: frozenset[Peer] = frozenset()  # at other sites
        # One-way kinds that are taken in as they come, by whoever reads, instead of waiting to be received.
        self.handlers: dict[str, Callable[[Incoming], None]] = {}
        self.mourned = ""  # peers of this role do not connect again: the end of one is received, as `ENDED`
        self._arenas = arenas
        self._on_error = on_error or logging.getLogger("polyrhythm.wire").warning
        self._inbox = Inbox(queue, self._send_apart)
        self._lines: dict[Channel, Line] = {}
        self._ended: Counter[Peer] = Counter()  # bytes sent over connections that have ended
        self.wakes = 0
        self._halves: set[Line] = set()  # with a message of which the rest has not come yet
        self._engine = Poller(self._take, self._overdue, str(me))
        self._requests = Requests(me, self._engine, wait)
        self._places = ReceiveTargets(arenas)
        self._sequence = itertools.count((incarnation << INCARNATION_SHIFT) + 1)
        self._lock = threading.Lock()
        # Only nodes with the same arenas may name them to each other, so a node without any has no host id.
        self.host = host if arenas else ""
        identity = Identity(me, self.host, os.urandom(16))
        identity.check()
        bounds = Bounds(limit, arenas.count, arenas.size) if arenas else Bounds(limit)
        try:
            self._links = Links(
                identity, key, listen, self._adopt, self._on_error, encrypt=encrypt, bounds=bounds, wait=wait
            )
        except BaseException:
            self._engine.close()
            raise
        self.address = self._links.address

    # What a node does.

    def introduce(self, peer: Peer, address: str) -> None:
        """Tells where a peer is. One that was lost counts as found again."""
        link = self._links[peer]
        link.address, link.gone = address, None

    def send(
        self,
        to: Peer,
        kind: str,
        buffers: Sequence[Buffer] = (),
        fields: dict[str, Any] | None = None,
        retry: bool = True,
    ) -> None:
        """Sends one way. The buffers may be overwritten as soon as this returns.

        Without `retry` a peer that cannot be reached at once counts as lost.
        """
        parts = parts_of(buffers)
        header = Header(_checked(kind), next(self._sequence), 0, False, self.layout, fields or {}, parts)
        views = [buffer.view for buffer in buffers]
        with self._counting(to, buffers):
            self._deliver(to, kind, lambda channel: channel.send(header, views), retry)

    def request(
        self,
        to: Peer,
        kind: str,
        buffers: Sequence[Buffer] = (),
        into: Sequence[Buffer] = (),
        fields: dict[str, Any] | None = None,
    ) -> Pending:
        """Sends a request. `buffers` and `into` are lent until the answer is there."""
        header = Header(_checked(kind), next(self._sequence), 0, True, self.layout, fields or {})
        pending = self._requests.add(to, header, buffers, into)
        try:
            with self._counting(to, buffers):
                self._request(pending)
        except BaseException:
            self._requests.forget(pending)
            raise
        return pending

    def reply(
        self, to: Incoming, buffers: Sequence[Buffer] = (), fields: dict[str, Any] | None = None
    ) -> bool:
        """Answers an ask, whose own buffers must not be used afterwards.

        True if the buffers lie in the asker's memory now: what is left to send is repeated if it gets lost.
        """
        parts, views = parts_of(buffers), [buffer.view for buffer in buffers]
        if to._into and self._arenas and shape(parts) == shape(to._into):
            for place, view, buffer in zip(to._into, views, buffers, strict=True):
                if (place.arena, place.offset) == (buffer.arena, buffer.offset):
                    continue  # answered in place
                copy(self._arenas.view(place.arena)[place.offset : place.offset + place.nbytes], view)
            parts, views = to._into, []
        with self._counting(to.sender, buffers):
            self._reply(to, to.kind, fields or {}, parts, views)
        return not views

    def expect(self, sender: Peer, kind: str, buffers: Sequence[Buffer]) -> Callable[[], None]:
        """Lets the bytes of the next ask of this kind be received straight into `buffers`, if they fit.

        What it returns takes that back: afterwards nothing is written there.
        """
        place = ReceiveTarget(sender, kind, buffers)
        self._places.keep(place)

        def withdraw() -> None:
            self._places.withdraw(place)
            if place.channel is not None and not place.over:  # the ask came twice, or too late
                place.channel.close()
                self._engine.wait(lambda: place.over, self.wait)

        return withdraw

    def refuse(self, to: Incoming, error: str) -> None:
        """Answers an ask with an error for a person to read."""
        self._reply(to, _REFUSED, {"error": error})

    @property
    def closed(self) -> bool:
        """Whether this node has said goodbye."""
        return self._links.closing.is_set()

    def traffic(self) -> dict[Peer, int]:
        """The bytes that went to each peer, as its sockets took them: headers and encryption included, what
        the network adds to them is not."""
        with self._lock:
            total = Counter(self._ended)
            for channel in tuple(self._lines):
                total[channel.peer] += channel.sent
        return dict(total)

    @property
    def arrived(self) -> int:
        """How many messages have arrived so far."""
        return self._inbox.arrived

    def receive(
        self,
        kinds: Collection[str] = (),
        timeout: float | None = None,
        since: int | None = None,
        before: int | None = None,
    ) -> Incoming | None:
        """The next message of these kinds (any, if empty) in order of arrival; None on timeout or `wake`.

        `since` is the number of `wakes` that the caller knows of, if not all there were until now. With
        `before` only the first so many that `arrived` are looked at.
        """
        began, wakes = time.monotonic(), self.wakes if since is None else since
        deadline = began + (self.wait if timeout is None else timeout)
        closing = self._links.closing.is_set
        while (taken := self._inbox.take(kinds, before)) is None:
            left = deadline - time.monotonic()
            if closing() or (left <= 0 and timeout is None):
                what = "to send " + (" or ".join(map(repr, sorted(kinds))) or "anything")
                why = f"{self.me} is closed" if closing() else ""
                raise WaitError(waited(self.me, time.monotonic() - began, "anyone", what, why))
            if wakes != self.wakes or left <= 0:
                return None
            self._engine.wait(lambda: self._inbox.has(kinds) or wakes != self.wakes or closing(), left)
        message, rested = taken
        if rested is not None:
            self._engine.resume(rested.channel)
        return message

    def wake(self) -> None:
        """Makes every `receive` that is waiting now return None."""
        self.wakes += 1
        self._engine.notify()

    def lost(self, peer: Peer, reason: str) -> None:
        """Ends all waits for a peer that is gone. What it sent before, answers included, still arrives."""
        link = self._links[peer]
        link.gone = reason
        if link.channel is None or link.channel.broken:
            self._requests.fail(PeerLost, f"{peer} is gone: {reason}", peer)
        else:
            self._links.end_soon(link.channel)  # whoever reads comes to its end and fails what is left
        self._engine.notify()

    def close(self) -> None:
        """Ends all threads and connections. May be called again."""
        if self._links.closing.is_set():
            return
        self._links.closing.set()
        self._requests.fail(WaitError, f"{self.me} is closed")
        self._engine.notify()
        self._links.close()
        self._engine.close()

    # Sending.

    def _request(self, pending: Pending) -> None:
        """Sends an ask, for the first time or again. Until it is out, this thread alone answers for it."""

        def send(channel: Channel) -> None:
            shared = channel.bounds.arenas > 0
            header = pending.header
            header.parts = parts_of(pending.buffers, shared)
            offered = parts_of(pending.into, shared)
            # The answer goes directly to all of its places or to none.
            header.into = pending.offered = offered if all(part.arena >= 0 for part in offered) else []
            inline = zip(pending.buffers, header.parts, strict=True)
            channel.send(header, [buffer.view for buffer, part in inline if part.arena < 0])
            self._requests.sent(pending, channel)

        self._deliver(pending.to, pending.header.kind, send)

    def _deliver(self, to: Peer, kind: str, send: Callable[[Channel], None], retry: bool = True) -> None:
        """Calls `send` with a connection to a peer, and again with a new one as long as it breaks."""
        link = self._links[to]
        began, pause = time.monotonic(), 0.002
        while True:
            why = ""
            try:
                channel = self._links.channel(link)
                try:
                    return send(channel)
                except BlockingIOError:
                    why = f"{to} does not receive"
            except OSError as error:
                if time.monotonic() - began > self.wait:
                    why = str(error)
            seconds, what = time.monotonic() - began, f"to take in {kind!r}"
            if link.gone is not None or not retry:
                why = f"{to} is gone: {link.gone or 'its connection broke'}"
                raise PeerLost(waited(self.me, seconds, to, what, why))
            if self._links.closing.is_set():
                why = f"{self.me} is closed"
            if why:
                raise WaitError(waited(self.me, seconds, to, what, why))
            self._links.closing.wait(pause)
            pause = min(pause * 2, 0.2)

    def _reply(
        self,
        to: Incoming,
        kind: str,
        fields: dict[str, Any],
        parts: Sequence[Part] = (),
        views: Sequence[memoryview] = (),
    ) -> None:
        header = Header(kind, next(self._sequence), to.sequence, False, self.layout, fields, list(parts))
        line = self._inbox.settle(to)
        if not views:
            self._inbox.remember(line, header)
        try:
            line.channel.send(header, views)
        except BlockingIOError:
            what = f"to take in the answer to {to.kind!r}"
            raise WaitError(waited(self.me, self.wait, to.sender, what)) from None
        except OSError:
            pass  # the asker notices too, and asks again: that arrives as a duplicate
        line.pool.give(to._memory)
        to._memory = None

    # Receiving.

    def _adopt(self, channel: Channel) -> None:
        channel.until_writable = self._engine.until_writable
        self._lines[channel] = self._inbox.join(channel)
        self._engine.add(channel)

    def _take(self, channel: Channel) -> bool:
        """Reads what a connection has. False when it has come to its end."""
        line = self._lines[channel]
        try:
            while True:
                if line.reading is None:
                    header = channel.receive_header()
                    reading = Reading(self._take_one(line, header), header.inline)
                    if header.inline > _BULK and 2 * channel.available() < header.inline:
                        # Worth a thread: large ones are read, and decrypted, side by side.
                        self._engine.pause(channel)
                        self._links.spawn(self._take_bulk, line, reading)
                        return True
                    line.reading = reading
                # A slow sender must not hold up the others: the rest is read when it comes.
                if not line.reading.go_on(channel):
                    self._halves.add(line)
                    return True
                line.reading = None
                self._halves.discard(line)
                if line.resting or not channel.ahead:
                    return True
        except Exception as error:
            self._end_channel(channel, error)
            return False

    def _take_one(self, line: Line, header: Header) -> Generator[memoryview, None, None]:
        """Takes a message in; yields the memory that its bytes must be in before it goes on."""
        if header.reply_to:
            yield from self._take_answer(line, header)
        elif not (yield from self._take_in(line, header)):
            self._engine.pause(line.channel)
            if not line.resting:  # somebody received meanwhile
                self._engine.resume(line.channel)

    def _take_bulk(self, line: Line, reading: Reading) -> None:
        try:
            reading.finish(line.channel)
        except Exception as error:
            reading.close()
            self._end_channel(line.channel, error)
            self._engine.drop(line.channel)
        else:
            if not line.resting:
                self._engine.resume(line.channel)
        self._engine.notify()

    def _overdue(self) -> float:
        """Ends the connections on which a message stopped half-way; seconds until the next may be due."""
        if not self._halves:
            return float("inf")
        now, next_due = time.monotonic(), STALL
        for line in list(self._halves):
            if line.reading is not None and line.channel.available():
                line.reading.moved = now  # more has come; it is we who did not read
            left = STALL - (now - line.reading.moved if line.reading else 0)
            if left <= 0:
                self._end_channel(line.channel, TimeoutError("a message stopped half-way"))
                self._engine.drop(line.channel)
            else:
                next_due = min(next_due, left)
        return next_due

    def _send_apart(self, channel: Channel, header: Header) -> None:
        """Sends something that came up while reading: whoever reads may be in the middle of sending."""

        def send() -> None:
            with contextlib.suppress(OSError):
                channel.send(header)

        self._links.spawn(send)

    def _end_channel(self, channel: Channel, error: Exception) -> None:
        """A connection has ended: asks without an answer go out again over another."""
        bad = ""
        if isinstance(error, WireError):
            bad = str(error)
        elif not isinstance(error, OSError):  # no memory, say: the node lives on without this connection
            bad = f"{self.me} cannot read what {channel.peer} sent: {error!r}"
        channel.close()
        if bad:
            self._on_error(bad)
        stranded = self._requests.strand(channel)
        with self._lock:
            line = self._lines.pop(channel)
            self._ended[channel.peer] += channel.sent
        self._halves.discard(line)
        if line.reading is not None:
            line.reading.close()
        if channel.peer.role == self.mourned:
            self._inbox.put(line, Incoming(channel.peer, ENDED, -1, False, {}, []))
            self._engine.notify()
        if stranded:
            self._links.spawn(self._repeat, stranded, bad)  # connecting takes its time, and others wait

    def _repeat(self, stranded: list[Pending], bad: str) -> None:
        for pending in stranded:
            self._again(pending, bad)

    def _again(self, pending: Pending, bad: str) -> None:
        """Repeats an ask whose connection broke, unless bad bytes broke it: they would come again."""
        gone = self._links[pending.to].gone
        if gone is not None and not bad:
            why = f"{pending.to} is gone: {gone}"
            return self._requests.end(pending, failure=lambda seconds: PeerLost(pending.waited(seconds, why)))
        error: PolyrhythmError = WireError(bad)
        if not bad:
            try:
                return self._request(pending)
            except PolyrhythmError as failure:
                error = failure
        self._requests.end(pending, failure=lambda _: error)

    def _take_in(self, line: Line, header: Header) -> Generator[memoryview, None, bool]:
        channel, kind = line.channel, header.kind
        if not same_layout(header.layout, self.layout):
            yield from drain(header)
            theirs, ours = (
                f"{channel.peer} sent {kind!r} for layout {header.layout}",
                f"{self.me} has {self.layout}",
            )
            error = f"{theirs}, {ours}: all nodes must build the same model"
            if header.asked:
                told = Header(_BAD, next(self._sequence), header.sequence, fields={"error": error})
                self._send_apart(channel, told)
            self._on_error(error)
            return True
        buffers, memory = yield from self._places.receive(channel, header, line.pool)
        message = Incoming(channel.peer, kind, header.sequence, header.asked, header.fields, buffers)
        message._into, message._memory = header.into, memory
        if kind in self.handlers and not header.asked:
            if self._inbox.first(line, header.sequence):
                self.handlers[kind](message)
            return True
        return self._inbox.put(line, message)

    def _take_answer(self, line: Line, header: Header) -> Iterator[memoryview]:
        channel = line.channel
        pending = self._requests.answered(channel, header.reply_to)
        if pending is None:
            yield from drain(header)
            return
        got, wanted = shape(header.parts), shape(parts_of(pending.into))
        buffers = list(pending.into)
        error: PolyrhythmError | None = None
        if header.kind in (_REFUSED, _BAD):
            error = (WireError if header.kind == _BAD else PolyrhythmError)(str(header.fields.get("error")))
        elif header.parts and header.parts == pending.offered:
            pass  # the answer is in its place already
        elif any(part.arena >= 0 for part in header.parts) or (got and wanted and got != wanted):
            error = WireError(f"{channel.peer} answered {header.kind!r} with {got}, not with {wanted}")
        elif got and wanted:
            for buffer in buffers:
                yield buffer.view
        else:
            buffers, _ = yield from self._places.receive(channel, header, line.pool)
        if error is not None:
            yield from drain(header)
            return self._requests.end(pending, failure=lambda _: error)
        answer = Incoming(channel.peer, header.kind, header.sequence, False, header.fields, buffers)
        self._requests.end(pending, answer)

    def count(self, nbytes: int, between: int = 0) -> None:
        """Adds to `bytes_sent` what goes by other ways, so much of it `between` sites."""
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_between += between

    @contextlib.contextmanager
    def _counting(self, to: Peer, buffers: Sequence[Buffer]) -> Iterator[None]:
        """Counts a message, and takes that back if it cannot be sent.

        It is counted before it is sent: the receiver may be the last that the run waits for, and another
        thread may then read the total before this one continues.
        """
        if not buffers:
            yield
            return
        nbytes = sum(buffer.view.nbytes for buffer in buffers)
        between = nbytes if self.far and to in self.far else 0
        self.count(nbytes, between)
        try:
            yield
        except BaseException:
            self.count(-nbytes, -between)
            raise


def _checked(kind: str) -> str:
    if not 0 < len(kind) <= 64 or kind.startswith("!"):
        raise UsageError(f"{kind!r} is no kind of message: 1 to 64 characters, the first not '!'")
    return kind
