"""Where the tensors of a message go as they come: to the place kept for them, or into memory of its own.

Bytes that come are asked for by generators: each yields the memory that must be full before it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

from polyrhythm.core.peer import Peer
from polyrhythm.wire.arena import ALIGNMENT, Arenas
from polyrhythm.wire.buffers import Buffer, Pool, fresh, parts_of, shape
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header

_DRAIN = 1 << 20


class ReceiveTarget:
    """Where the tensors of an ask that has not come yet may go."""

    def __init__(self, sender: Peer, kind: str, buffers: Sequence[Buffer]) -> None:
        self.request = sender, kind
        self.buffers = list(buffers)
        self.channel: Channel | None = None  # that fills it
        self.over = False


class ReceiveTargets:
    """The places that one node keeps, and the arenas that others name to it."""

    def __init__(self, arenas: Arenas | None) -> None:
        self._arenas = arenas
        self._lock = threading.Lock()
        self._kept: dict[tuple[Peer, str], ReceiveTarget] = {}

    def keep(self, place: ReceiveTarget) -> None:
        with self._lock:
            self._kept[place.request] = place

    def withdraw(self, place: ReceiveTarget) -> None:
        """Nobody takes it from now on; whoever has taken it may still be filling it."""
        with self._lock:
            if self._kept.get(place.request) is place:
                del self._kept[place.request]

    def receive(
        self, channel: Channel, header: Header, pool: Pool
    ) -> Generator[memoryview, None, tuple[list[Buffer], memoryview | None]]:
        """The tensors of a message, and the one piece of memory in which the inline ones lie, aligned."""
        place = self._claim(channel, header)
        if place is not None:
            try:
                for buffer in place.buffers:
                    yield buffer.view
            finally:
                place.over = True
            return place.buffers, None
        buffers = []
        size = sum(_aligned(part.nbytes) for part in header.parts if part.arena < 0)
        memory = (pool.take(size) if header.asked else fresh(size)) if size else None
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

    def _claim(self, channel: Channel, header: Header) -> ReceiveTarget | None:
        """The place that is kept for the tensors of this ask, if all of them come inline and fit."""
        if not self._kept or not header.asked or any(part.arena >= 0 for part in header.parts):
            return None
        with self._lock:
            place = self._kept.pop((channel.peer, header.kind), None)
            if place is None or shape(header.parts) != shape(parts_of(place.buffers)):
                return None
            place.channel = channel
        return place


def drain(header: Header) -> Iterator[memoryview]:
    """Reads tensors that nobody wants, in little memory."""
    left = header.inline
    scratch = fresh(min(left, _DRAIN))
    while left:
        piece = scratch[:left]
        yield piece
        left -= len(piece)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
