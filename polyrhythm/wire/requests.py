"""Requests without a reply: who waits for whom, and what ends the wait.

A request belongs to the connection that it was sent over until its reply arrives or that connection ends.
While a thread is sending it, for the first time or again, it belongs to no connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from polyrhythm.core.errors import PolyrhythmError, WaitError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header, Part
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.poller import Poller


class Pending:
    """A request that has been sent, and its reply."""

    def __init__(
        self, requests: Requests, to: Peer, header: Header, buffers: Sequence[Buffer], into: Sequence[Buffer]
    ) -> None:
        self._requests = requests
        self.to = to
        self.header = header
        self.buffers = buffers
        self.into = into
        self.offered: list[Part] = []  # `into` as the header describes it, if in shared memory
        self.channel: Channel | None = None  # that the reply will take; None while a thread is sending
        self.reply: Incoming | None = None
        self.failure: Callable[[float], PolyrhythmError] | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.failure is not None

    def wait(self, timeout: float | None = None) -> Incoming:
        """Returns the reply, after filling `into`. Raises the error if the request failed."""
        requests, began = self._requests, time.monotonic()
        requests.poller.wait(lambda: self.done, requests.wait if timeout is None else timeout)
        if self.reply is not None:
            return self.reply
        seconds = time.monotonic() - began
        if self.failure is not None:
            raise self.failure(seconds)
        if timeout is None:
            requests.forget(self)
        raise WaitError(self.report(seconds))

    def report(self, seconds: float, why: str = "") -> str:
        """The message of an error that ends the wait."""
        return wait_report(self._requests.me, seconds, self.to, f"to reply to {self.header.kind!r}", why)


class Requests:
    """The requests of a node that have no reply yet. Waiting for a reply times out after `wait` seconds."""

    def __init__(self, me: Peer, poller: Poller, wait: float) -> None:
        self.me, self.poller, self.wait = me, poller, wait
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}

    def add(self, to: Peer, header: Header, buffers: Sequence[Buffer], into: Sequence[Buffer]) -> Pending:
        """Registers a request before it is sent."""
        pending = Pending(self, to, header, buffers, into)
        with self._lock:
            self._pending[header.sequence] = pending
        return pending

    def first_unanswered(self, to: Peer) -> int:
        """The lowest sequence number of the requests to a peer that have no reply yet; 0 if all have one."""
        with self._lock:
            return min((number for number, each in self._pending.items() if each.to == to), default=0)

    def sent(self, pending: Pending, channel: Channel) -> None:
        """Notes the connection that a request was sent over."""
        with self._lock:
            if pending.channel is None and not pending.done:
                if channel.drained:
                    raise ConnectionError("the connection broke before the reply arrived")
                pending.channel = channel

    def match(self, channel: Channel, sequence: int) -> Pending | None:
        """Finds the request that a reply belongs to. None if it was not sent to this peer or has ended."""
        with self._lock:
            pending = self._pending.get(sequence)
            if pending is None or pending.to != channel.peer:
                return None
            pending.channel = channel
            return pending

    def detach(self, channel: Channel) -> list[Pending]:
        """Returns the requests that were to be answered over a connection that has ended."""
        with self._lock:
            channel.drained = True
            unanswered = [pending for pending in self._pending.values() if pending.channel is channel]
            for pending in unanswered:
                pending.channel = None
        return unanswered

    def complete(
        self,
        pending: Pending,
        reply: Incoming | None = None,
        failure: Callable[[float], PolyrhythmError] | None = None,
    ) -> None:
        """Ends a request by its reply, or by an error made from the seconds waited. The first call counts."""
        with self._lock:
            self._pending.pop(pending.header.sequence, None)
            if not pending.done:
                pending.reply, pending.failure = reply, failure
        self.poller.notify()

    def fail(self, error: type[PolyrhythmError], why: str, peer: Peer | None = None) -> None:
        """Fails all requests to a peer, or to all peers."""
        with self._lock:
            failed = [pending for pending in self._pending.values() if peer in (None, pending.to)]
        for pending in failed:

            def failure(seconds: float, pending: Pending = pending) -> PolyrhythmError:
                return error(pending.report(seconds, why))

            self.complete(pending, failure=failure)

    def peers(self) -> set[Peer]:
        """The peers that owe a reply."""
        with self._lock:
            return {pending.to for pending in self._pending.values()}

    def forget(self, pending: Pending) -> None:
        """Drops a request. Its reply is ignored."""
        with self._lock:
            self._pending.pop(pending.header.sequence, None)


def wait_report(me: Peer, seconds: float, whom: Peer | str, what: str, why: str = "") -> str:
    """The message of an error: who waited for whom, how long, and why in vain."""
    return f"{me} waited {seconds:.2f} s for {whom} {what}" + (f": {why}" if why else "")
