"""The transport of one node: messages to and from its peers, whatever happens to the connections.

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

import numpy as np

from polyrhythm.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError
from polyrhythm.node import LIFE, Peer
from polyrhythm.wire.arena import ALIGNMENT, Arenas
from polyrhythm.wire.channel import STALL, Channel
from polyrhythm.wire.engine import Engine
from polyrhythm.wire.frame import DTYPES, Bounds, Header, Part
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.inbox import Buffer, Inbox, Incoming, Line, Reading, fresh
from polyrhythm.wire.links import Links

__all__ = ["ENDED", "Buffer", "Incoming", "Pending", "Transport"]

_REFUSED, _BAD = "!refused", "!bad"  # the wire's own kinds of answer; those of a node do not begin with "!"
ENDED = "!ended"  # what arrives when a connection has ended that nobody makes anew
_DRAIN = 1 << 20
_BULK = 1 << 22  # bytes of tensors from which on a message is read by a thread of its own


class _Place:
    """Where the tensors of an ask that has not come yet may go."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = list(buffers)
        self.channel: Channel | None = None  # that fills it
        self.over = False


class Pending:
    """An answer that is on its way."""

    def __init__(
        self, me: Transport, to: Peer, header: Header, buffers: Sequence[Buffer], into: Sequence[Buffer]
    ) -> None:
        self._transport = me
        self._to = to
        self._header = header
        self._buffers = buffers
        self._into = into
        self._offered: list[Part] = []
        self._channel: Channel | None = None  # that the answer will come by; None while a thread is sending
        self._answer: Incoming | None = None
        self._failure: Callable[[float], PolyrhythmError] | None = None

    @property
    def done(self) -> bool:
        return self._answer is not None or self._failure is not None

    def wait(self, timeout: float | None = None) -> Incoming:
        """The answer, with `into` filled. Raises what came instead of it."""
        began = time.monotonic()
        self._transport._engine.wait(lambda: self.done, self._transport.wait if timeout is None else timeout)
        if self._answer is not None:
            return self._answer
        waited = time.monotonic() - began
        if self._failure is not None:
            raise self._failure(waited)
        if timeout is None:
            self._transport._forget(self)
        raise WaitError(self._waited(waited))

    def _waited(self, seconds: float, why: str = "") -> str:
        return _waited(self._transport.me, seconds, self._to, f"to answer {self._header.kind!r}", why)


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
        life: int = 0,
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
        self._engine = Engine(self._take, self._overdue, str(me))
        self._sequence = itertools.count((life << LIFE) + 1)
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._places: dict[tuple[Peer, str], _Place] = {}
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
        parts = _parts(buffers)
        header = Header(_checked(kind), next(self._sequence), 0, False, self.layout, fields or {}, parts)
        views = [buffer.view for buffer in buffers]
        self._deliver(to, kind, lambda channel: channel.send(header, views), retry)
        self._count(to, buffers)

    def ask(
        self,
        to: Peer,
        kind: str,
        buffers: Sequence[Buffer] = (),
        into: Sequence[Buffer] = (),
        fields: dict[str, Any] | None = None,
    ) -> Pending:
        """Sends a request. `buffers` and `into` are lent until the answer is there."""
        header = Header(_checked(kind), next(self._sequence), 0, True, self.layout, fields or {})
        pending = Pending(self, to, header, buffers, into)
        with self._lock:
            self._pending[header.sequence] = pending
        try:
            self._request(pending)
        except BaseException:
            self._forget(pending)
            raise
        self._count(to, buffers)
        return pending

    def answer(
        self, to: Incoming, buffers: Sequence[Buffer] = (), fields: dict[str, Any] | None = None
    ) -> None:
        """Answers an ask, whose own buffers must not be used afterwards."""
        parts, views = _parts(buffers), [buffer.view for buffer in buffers]
        if to._into and self._arenas and _shape(parts) == _shape(to._into):
            for place, view, buffer in zip(to._into, views, buffers, strict=True):
                if (place.arena, place.offset) == (buffer.arena, buffer.offset):
                    continue  # answered in place
                _copy(self._arenas.view(place.arena)[place.offset : place.offset + place.nbytes], view)
            parts, views = to._into, []
        self._reply(to, to.kind, fields or {}, parts, views)
        self._count(to.sender, buffers)

    def expect(self, sender: Peer, kind: str, buffers: Sequence[Buffer]) -> Callable[[], None]:
        """Lets the bytes of the next ask of this kind be received straight into `buffers`, if they fit.

        What it returns takes that back: afterwards nothing is written there.
        """
        place = _Place(buffers)
        with self._lock:
            self._places[sender, kind] = place

        def withdraw() -> None:
            with self._lock:
                if self._places.get((sender, kind)) is place:
                    del self._places[sender, kind]
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
                raise WaitError(_waited(self.me, time.monotonic() - began, "anyone", what, why))
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
            self._fail_all(PeerLost, f"{peer} is gone: {reason}", peer)
        else:
            self._links.end_soon(link.channel)  # whoever reads comes to its end and fails what is left
        self._engine.notify()

    def close(self) -> None:
        """Ends all threads and connections. May be called again."""
        if self._links.closing.is_set():
            return
        self._links.closing.set()
        self._fail_all(WaitError, f"{self.me} is closed")
        self._engine.notify()
        self._links.close()
        self._engine.close()

    # Sending.

    def _request(self, pending: Pending) -> None:
        """Sends an ask, for the first time or again. Until it is out, this thread alone answers for it."""

        def send(channel: Channel) -> None:
            shared = channel.bounds.arenas > 0
            header = pending._header
            header.parts = _parts(pending._buffers, shared)
            offered = _parts(pending._into, shared)
            # The answer goes directly to all of its places or to none.
            header.into = pending._offered = offered if all(part.arena >= 0 for part in offered) else []
            inline = zip(pending._buffers, header.parts, strict=True)
            channel.send(header, [buffer.view for buffer, part in inline if part.arena < 0])
            with self._lock:
                if pending._channel is None and not pending.done:
                    if channel.drained:
                        raise ConnectionError("the connection broke before the answer came")
                    pending._channel = channel

        self._deliver(pending._to, pending._header.kind, send)

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
            waited, what = time.monotonic() - began, f"to take in {kind!r}"
            if link.gone is not None or not retry:
                why = f"{to} is gone: {link.gone or 'its connection broke'}"
                raise PeerLost(_waited(self.me, waited, to, what, why))
            if self._links.closing.is_set():
                why = f"{self.me} is closed"
            if why:
                raise WaitError(_waited(self.me, waited, to, what, why))
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
            raise WaitError(_waited(self.me, self.wait, to.sender, what)) from None
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
        with self._lock:
            channel.drained = True
            stranded = [pending for pending in self._pending.values() if pending._channel is channel]
            for pending in stranded:
                pending._channel = None
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
        gone = self._links[pending._to].gone
        if gone is not None and not bad:
            why = f"{pending._to} is gone: {gone}"
            return self._end(pending, failure=lambda waited: PeerLost(pending._waited(waited, why)))
        error: PolyrhythmError = WireError(bad)
        if not bad:
            try:
                return self._request(pending)
            except PolyrhythmError as failure:
                error = failure
        self._end(pending, failure=lambda _: error)

    def _take_in(self, line: Line, header: Header) -> Generator[memoryview, None, bool]:
        channel, kind = line.channel, header.kind
        if header.layout and self.layout and header.layout != self.layout:
            yield from self._drain(header)
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
        buffers, memory = yield from self._receive(line, header)
        message = Incoming(channel.peer, kind, header.sequence, header.asked, header.fields, buffers)
        message._into, message._memory = header.into, memory
        if kind in self.handlers and not header.asked:
            self.handlers[kind](message)
            return True
        return self._inbox.put(line, message)

    def _take_answer(self, line: Line, header: Header) -> Iterator[memoryview]:
        channel = line.channel
        with self._lock:
            pending = self._pending.get(header.reply_to)
            if pending is not None and pending._to == channel.peer:
                pending._channel = channel
            else:
                pending = None
        if pending is None:
            yield from self._drain(header)
            return
        got, wanted = _shape(header.parts), _shape(_parts(pending._into))
        buffers = list(pending._into)
        error: PolyrhythmError | None = None
        if header.kind in (_REFUSED, _BAD):
            error = (WireError if header.kind == _BAD else PolyrhythmError)(str(header.fields.get("error")))
        elif header.parts and header.parts == pending._offered:
            pass  # the answer is in its place already
        elif any(part.arena >= 0 for part in header.parts) or (got and wanted and got != wanted):
            error = WireError(f"{channel.peer} answered {header.kind!r} with {got}, not with {wanted}")
        elif got and wanted:
            for buffer in buffers:
                yield buffer.view
        else:
            buffers, _ = yield from self._receive(line, header)
        if error is not None:
            yield from self._drain(header)
            return self._end(pending, failure=lambda _: error)
        answer = Incoming(channel.peer, header.kind, header.sequence, False, header.fields, buffers)
        self._end(pending, answer)

    def _receive(
        self, line: Line, header: Header
    ) -> Generator[memoryview, None, tuple[list[Buffer], memoryview | None]]:
        """The tensors of a message, and the one piece of memory in which the inline ones lie, aligned."""
        place = self._claim(line.channel, header)
        if place is not None:
            try:
                for buffer in place.buffers:
                    yield buffer.view
            finally:
                place.over = True
            return place.buffers, None
        buffers = []
        size = sum(_aligned(part.nbytes) for part in header.parts if part.arena < 0)
        memory = (line.pool.take(size) if header.asked else fresh(size)) if size else None
        start = 0
        for part in header.parts:
            if part.arena >= 0:
                assert self._arenas is not None
                view = self._arenas.view(part.arena)[part.offset : part.offset + part.nbytes]
            else:
                view = memory[start : start + part.nbytes] if memory else memoryview(bytearray())
                yield view
                start += _aligned(part.nbytes)
            buffers.append(Buffer(part.dtype, view, part.arena, part.offset))
        return buffers, memory

    def _claim(self, channel: Channel, header: Header) -> _Place | None:
        """The place that is kept for the tensors of this ask, if all of them come inline and fit."""
        if not self._places or not header.asked or any(part.arena >= 0 for part in header.parts):
            return None
        with self._lock:
            place = self._places.pop((channel.peer, header.kind), None)
            if place is None or _shape(header.parts) != _shape(_parts(place.buffers)):
                return None
            place.channel = channel
        return place

    def _drain(self, header: Header) -> Iterator[memoryview]:
        """Reads tensors that nobody wants, in little memory."""
        left = header.inline
        scratch = fresh(min(left, _DRAIN))
        while left:
            piece = scratch[:left]
            yield piece
            left -= len(piece)

    # What is waited for.

    def _end(
        self,
        pending: Pending,
        answer: Incoming | None = None,
        failure: Callable[[float], PolyrhythmError] | None = None,
    ) -> None:
        with self._lock:
            self._pending.pop(pending._header.sequence, None)
            if not pending.done:
                pending._answer, pending._failure = answer, failure
        self._engine.notify()

    def _fail_all(self, kind: type[PolyrhythmError], why: str, peer: Peer | None = None) -> None:
        with self._lock:
            hopeless = [pending for pending in self._pending.values() if peer in (None, pending._to)]
        for pending in hopeless:

            def failure(waited: float, pending: Pending = pending) -> PolyrhythmError:
                return kind(pending._waited(waited, why))

            self._end(pending, failure=failure)

    def _forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending._header.sequence, None)

    def count(self, nbytes: int, between: int = 0) -> None:
        """Adds to `bytes_sent` what goes by other ways, so much of it `between` sites."""
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_between += between

    def _count(self, to: Peer, buffers: Sequence[Buffer]) -> None:
        if buffers:
            nbytes = sum(buffer.view.nbytes for buffer in buffers)
            self.count(nbytes, nbytes if self.far and to in self.far else 0)


def _waited(me: Peer, seconds: float, whom: Peer | str, what: str, why: str = "") -> str:
    return f"{me} waited {seconds:.2f} s for {whom} {what}" + (f": {why}" if why else "")


def _checked(kind: str) -> str:
    if not 0 < len(kind) <= 64 or kind.startswith("!"):
        raise UsageError(f"{kind!r} is no kind of message: 1 to 64 characters, the first not '!'")
    return kind


def _parts(buffers: Sequence[Buffer], shared: bool = False) -> list[Part]:
    """Buffers as a header names them: by reference if they lie in memory that is `shared`."""
    parts = []
    for buffer in buffers:
        size = DTYPES.get(buffer.dtype)
        if size is None or buffer.view.nbytes % size:
            raise UsageError(f"{buffer.view.nbytes} bytes are no tensor of dtype {buffer.dtype}")
        place = (buffer.arena, buffer.offset) if shared and buffer.arena >= 0 else (-1, 0)
        parts.append(Part(buffer.dtype, buffer.view.nbytes // size, *place))
    return parts


def _shape(parts: Sequence[Part]) -> list[tuple[str, int]]:
    return [(part.dtype, part.count) for part in parts]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copy(target: memoryview, source: memoryview) -> None:
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL
