"""What has arrived and waits to be received: in order, bounded per connection, each message once.

A sender whose connection broke sends its request again under the same sequence number. The inbox knows the
sequence numbers of each peer: a repeated one-way message is dropped; a repeated ask that is still unanswered
only says where the answer must go now; and one whose answer went down with the connection is handed up again,
marked `duplicate`, so that it can be answered again without being applied again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyrhythm.errors import UsageError
from polyrhythm.node import Peer
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Part

REMEMBERED = 1 << 14
_KEPT = 4


@dataclass
class Buffer:
    """A flat tensor as the wire sees it: its dtype, its bytes, and where it lies if in shared memory."""

    dtype: str
    view: memoryview
    arena: int = -1
    offset: int = 0


@dataclass(eq=False)
class Incoming:
    """A message that arrived. Its buffers are its own; those of an ask only until it is answered."""

    sender: Peer
    kind: str
    sequence: int
    asked: bool
    fields: dict[str, Any]
    buffers: list[Buffer]
    duplicate: bool = False
    _into: list[Part] = field(default_factory=list, repr=False)
    _line: Line | None = field(default=None, repr=False)
    _memory: memoryview | None = field(default=None, repr=False)


class Pool:
    """Memory for inline tensors, used again because first touching fresh pages costs more than the copy."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        with self._lock:
            for at, memory in enumerate(self._free):
                if nbytes <= memory.nbytes <= 4 * nbytes:
                    return self._free.pop(at)
        return fresh(nbytes)

    def give(self, memory: memoryview | None) -> None:
        if memory is not None:
            with self._lock:
                self._free.append(memory)
                self._free.sort(key=len)
                del self._free[:-_KEPT]


def fresh(nbytes: int) -> memoryview:
    """Memory that is not filled with zeros first."""
    return np.empty(nbytes, np.uint8).data


@dataclass
class Flow:
    """What one instance of a peer has sent so far, over all its connections."""

    instance: bytes
    seen: dict[int, None] = field(default_factory=dict)
    unanswered: dict[int, Incoming] = field(default_factory=dict)


@dataclass(eq=False)
class Line:
    """A connection as the inbox sees it."""

    channel: Channel
    flow: Flow
    pool: Pool = field(default_factory=Pool)
    unreceived: int = 0


class Inbox:
    """The messages of a node, from all its connections, until it receives them."""

    def __init__(self, queue: int) -> None:
        self._queue = queue
        self._messages: deque[Incoming] = deque()
        self._flows: dict[Peer, Flow] = {}
        self._wakes = 0
        self._lock = threading.Lock()
        self._waiting: list[tuple[Collection[str], threading.Condition]] = []
        self._room = threading.Condition(self._lock)
        self.closed = False

    def join(self, channel: Channel) -> Line:
        """A new connection. A peer that was restarted counts from 1 again, so it begins a new flow."""
        with self._lock:
            flow = self._flows.get(channel.peer)
            if flow is None or flow.instance != channel.instance:
                flow = self._flows[channel.peer] = Flow(channel.instance)
            return Line(channel, flow)

    def put(self, line: Line, message: Incoming) -> None:
        """Takes a message in; blocks while too many messages of this connection have not been received."""
        flow, sequence = line.flow, message.sequence
        with self._lock:
            original = flow.unanswered.get(sequence)
            if original is not None:
                assert original._line is not None
                if line.channel.number > original._line.channel.number:
                    # Received messages no longer count, so only where the answer goes changes hands.
                    original._line, line_before = line, original._line
                    if original in self._messages:
                        line_before.unreceived -= 1
                        line.unreceived += 1
                        self._room.notify_all()
                return line.pool.give(message._memory)
            if sequence in flow.seen:
                if not message.asked:
                    return
                message.duplicate = True
            flow.seen[sequence] = None
            if len(flow.seen) > REMEMBERED:
                del flow.seen[next(iter(flow.seen))]
            message._line = line
            if message.asked:
                flow.unanswered[sequence] = message
            self._messages.append(message)
            line.unreceived += 1
            self._wake_one(message.kind)
            while line.unreceived >= self._queue and not (self.closed or line.channel.broken):
                self._room.wait()

    def take(self, kinds: Collection[str], timeout: float) -> Incoming | None:
        """The next message of these kinds; None when time is over, after `wake` and when closed."""
        deadline = time.monotonic() + timeout
        with self._lock:
            wakes = self._wakes
            while True:
                message = self._pop(kinds)
                left = deadline - time.monotonic()
                if message is not None or left <= 0 or wakes != self._wakes or self.closed:
                    return message
                waiter = (kinds, threading.Condition(self._lock))
                self._waiting.append(waiter)
                try:
                    waiter[1].wait(left)
                finally:
                    if waiter in self._waiting:
                        self._waiting.remove(waiter)

    def _wake_one(self, kind: str) -> None:
        """Wakes only a thread that wants such a message."""
        for at, (kinds, arrived) in enumerate(self._waiting):
            if not kinds or kind in kinds:
                del self._waiting[at]
                return arrived.notify()

    def _wake_all(self) -> None:
        for _, arrived in self._waiting:
            arrived.notify()
        self._waiting.clear()

    def _pop(self, kinds: Collection[str]) -> Incoming | None:
        for at, message in enumerate(self._messages):
            if not kinds or message.kind in kinds:
                del self._messages[at]
                line = message._line
                assert line is not None
                line.unreceived -= 1
                if line.unreceived == self._queue - 1:
                    self._room.notify_all()
                return message
        return None

    def settle(self, message: Incoming) -> Line:
        """Marks an ask as answered; the connection that the answer must take."""
        with self._lock:
            line = message._line
            if line is None or line.flow.unanswered.pop(message.sequence, None) is None:
                raise UsageError(
                    f"{message.kind!r} from {message.sender} was not asked, or is answered already"
                )
            return line

    def wake(self) -> None:
        with self._lock:
            self._wakes += 1
            self._wake_all()

    def wake_readers(self) -> None:
        """Makes the readers that wait for room look whether their connection still lives."""
        with self._lock:
            self._room.notify_all()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._wake_all()
            self._room.notify_all()
