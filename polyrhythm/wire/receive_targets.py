"""Where the tensors of an incoming message are written: into buffers registered for it, or into new memory.

Messages are read by generators: each yields the memory to fill next, and continues when it is full.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

from polyrhythm.core.peer import Peer
from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.buffers import Buffer, Pool, parts_of, shapes, uninitialized
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header
from polyrhythm.wire.lending import aligned, borrow, is_lent

_DISCARD = 1 << 20


class Repeated(Exception):
    """A message in shared memory has arrived before."""


class ReceiveTarget:
    """Buffers for the tensors of a request that has not arrived yet."""

    def __init__(self, sender: Peer, kind: str, buffers: Sequence[Buffer]) -> None:
        self.key = sender, kind
        self.buffers = list(buffers)
        self.channel: Channel | None = None  # that fills it
        self.done = False  # nothing more is written to it


class ReceiveTargets:
    """The registered receive targets of a node, and the arenas that peers refer to."""

    def __init__(self, arenas: Arenas | None) -> None:
        self._arenas = arenas
        self._lock = threading.Lock()
        self._targets: dict[tuple[Peer, str], ReceiveTarget] = {}

    def add(self, target: ReceiveTarget) -> None:
        """Registers a target for the next request of its sender and kind."""
        with self._lock:
            self._targets[target.key] = target

    def remove(self, target: ReceiveTarget) -> None:
        """Unregisters a target. A message that has claimed it may still be filling it."""
        with self._lock:
            if self._targets.get(target.key) is target:
                del self._targets[target.key]

    def receive(
        self, channel: Channel, header: Header, pool: Pool
    ) -> Generator[memoryview, None, tuple[list[Buffer], memoryview | None]]:
        """Receives the tensors of a message. Returns them with the memory that holds the inline ones.

        Raises `Repeated` if they are gone, because the message was received before.
        """
        if not header.wants_reply and self._arenas is not None and is_lent(header.parts):
            taken = borrow(self._arenas, header.sequence, header.parts)
            if taken is None:
                raise Repeated
            return taken, None
        target = self._claim(channel, header)
        if target is not None:
            try:
                for buffer in target.buffers:
                    yield buffer.view
            finally:
                target.done = True
            return target.buffers, None
        buffers = []
        size = sum(aligned(part.nbytes) for part in header.parts if part.arena < 0)
        memory = (pool.acquire(size) if header.wants_reply else uninitialized(size)) if size else None
        start = 0
        for part in header.parts:
            if part.arena >= 0:
                assert self._arenas is not None
                view = self._arenas.view(part.arena)[part.offset : part.offset + part.nbytes]
            else:
                view = memory[start : start + part.nbytes] if memory else memoryview(bytearray())
                yield view
                start += aligned(part.nbytes)
            buffers.append(Buffer(part.dtype, view, part.arena, part.offset))
        return buffers, memory

    def _claim(self, channel: Channel, header: Header) -> ReceiveTarget | None:
        """The target registered for this request, if all its tensors are inline and fit."""
        if not self._targets or not header.wants_reply or any(part.arena >= 0 for part in header.parts):
            return None
        with self._lock:
            target = self._targets.pop((channel.peer, header.kind), None)
            if target is None or shapes(header.parts) != shapes(parts_of(target.buffers)):
                return None
            target.channel = channel
        return target


def discard(header: Header) -> Iterator[memoryview]:
    """Reads the tensors of a message into a small scratch buffer."""
    left = header.inline
    scratch = uninitialized(min(left, _DISCARD))
    while left:
        piece = scratch[:left]
        yield piece
        left -= len(piece)
