"""Asks without an answer: who waits for whom, and what ends the wait.

An ask belongs to the connection that it went out by, until its answer comes or that connection ends. While a
thread is sending it, for the first time or again, it belongs to none.
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
from polyrhythm.wire.inbox import Incoming
from polyrhythm.wire.poller import Poller


class Pending:
    """An answer that is on its way."""

    def __init__(
        self, requests: Requests, to: Peer, header: Header, buffers: Sequence[Buffer], into: Sequence[Buffer]
    ) -> None:
        self._requests = requests
        self.to = to
        self.header = header
        self.buffers = buffers
        self.into = into
        self.offered: list[Part] = []
        self.channel: Channel | None = None  # that the answer will come by; None while a thread is sending
        self.answer: Incoming | None = None
        self.failure: Callable[[float], PolyrhythmError] | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.failure is not None

    def wait(self, timeout: float | None = None) -> Incoming:
        """The answer, with `into` filled. Raises what came instead of it."""
        requests, began = self._requests, time.monotonic()
        requests.engine.wait(lambda: self.done, requests.wait if timeout is None else timeout)
        if self.answer is not None:
            return self.answer
        seconds = time.monotonic() - began
        if self.failure is not None:
            raise self.failure(seconds)
        if timeout is None:
            requests.forget(self)
        raise WaitError(self.waited(seconds))

    def waited(self, seconds: float, why: str = "") -> str:
        """How long it was waited for, in words."""
        return waited(self._requests.me, seconds, self.to, f"to answer {self.header.kind!r}", why)


class Requests:
    """The asks of one node that have no answer yet. Waiting for one lasts `wait` seconds at most."""

    def __init__(self, me: Peer, engine: Poller, wait: float) -> None:
        self.me, self.engine, self.wait = me, engine, wait
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}

    def add(self, to: Peer, header: Header, buffers: Sequence[Buffer], into: Sequence[Buffer]) -> Pending:
        pending = Pending(self, to, header, buffers, into)
        with self._lock:
            self._pending[header.sequence] = pending
        return pending

    def sent(self, pending: Pending, channel: Channel) -> None:
        """An ask is out: its answer will come by this connection."""
        with self._lock:
            if pending.channel is None and not pending.done:
                if channel.drained:
                    raise ConnectionError("the connection broke before the answer came")
                pending.channel = channel

    def answered(self, channel: Channel, number: int) -> Pending | None:
        """The ask of this number, which an answer has come to; None if nobody waits for it."""
        with self._lock:
            pending = self._pending.get(number)
            if pending is None or pending.to != channel.peer:
                return None
            pending.channel = channel
            return pending

    def strand(self, channel: Channel) -> list[Pending]:
        """A connection has ended: the asks that were to be answered by it have none now."""
        with self._lock:
            channel.drained = True
            stranded = [pending for pending in self._pending.values() if pending.channel is channel]
            for pending in stranded:
                pending.channel = None
        return stranded

    def end(
        self,
        pending: Pending,
        answer: Incoming | None = None,
        failure: Callable[[float], PolyrhythmError] | None = None,
    ) -> None:
        """Ends the wait by an answer, or by an error that is told how long it took. Only the first counts."""
        with self._lock:
            self._pending.pop(pending.header.sequence, None)
            if not pending.done:
                pending.answer, pending.failure = answer, failure
        self.engine.notify()

    def fail(self, kind: type[PolyrhythmError], why: str, peer: Peer | None = None) -> None:
        """Ends all waits for a peer, or for everyone."""
        with self._lock:
            hopeless = [pending for pending in self._pending.values() if peer in (None, pending.to)]
        for pending in hopeless:

            def failure(seconds: float, pending: Pending = pending) -> PolyrhythmError:
                return kind(pending.waited(seconds, why))

            self.end(pending, failure=failure)

    def forget(self, pending: Pending) -> None:
        with self._lock:
            self._pending.pop(pending.header.sequence, None)


def waited(me: Peer, seconds: float, whom: Peer | str, what: str, why: str = "") -> str:
    """What to say of a wait that was in vain."""
    return f"{me} waited {seconds:.2f} s for {whom} {what}" + (f": {why}" if why else "")
