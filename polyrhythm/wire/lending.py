"""One-way messages within a host: their tensors pass through shared memory instead of the socket.

The sender copies the tensors of a message into a block of its own arena, writes the number of the message
into the word at the start of the block, and sends a header that refers to the block. The receiver copies the
tensors out as soon as it has read the header, and sets the word to 0: the sender may use the block again.
So both ends copy once, as for a socket, without the kernel's buffers in between, which are slower and small.

A header that arrives twice, because its connection broke, finds another number in the word, and is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from polyrhythm.wire.arena import ALIGNMENT, Arenas
from polyrhythm.wire.buffers import Buffer, copy, uninitialized
from polyrhythm.wire.frame import DTYPES, Part

_LEAST = 1 << 15  # bytes of tensors from which it pays
_MOST = 1 << 28  # bytes of blocks; more are sent through the socket, which blocks a sender that is too fast


class Lender:
    """The blocks in the arena of one node."""

    def __init__(self, arenas: Arenas, arena: int) -> None:
        self._arenas, self._arena = arenas, arena
        self._lent: list[tuple[int, int]] = []  # offset and size of blocks that receivers have not copied yet
        self._free: dict[int, list[int]] = {}  # offsets of the others, by size
        self._allocated = 0
        self._lock = threading.Lock()

    def lend(self, sequence: int, buffers: Sequence[Buffer]) -> list[Part] | None:
        """Copies the tensors of a message into a block; returns where they are. None: send them inline."""
        nbytes = sum(aligned(buffer.view.nbytes) for buffer in buffers)
        if nbytes < _LEAST:
            return None
        size = 1 << (nbytes + ALIGNMENT - 1).bit_length()  # a power of two, so that blocks are reused
        with self._lock:
            offset = self._take(size)
        if offset is None:
            return None
        memory, parts, start = self._arenas.view(self._arena), [], offset + ALIGNMENT
        for buffer in buffers:
            stop = start + buffer.view.nbytes
            copy(memory[start:stop], buffer.view)
            parts.append(Part(buffer.dtype, buffer.view.nbytes // DTYPES[buffer.dtype], self._arena, start))
            start += aligned(buffer.view.nbytes)
        word(self._arenas, self._arena, offset)[0] = sequence
        with self._lock:
            self._lent.append((offset, size))
        return parts

    def _take(self, size: int) -> int | None:
        still = []
        for offset, other in self._lent:
            if word(self._arenas, self._arena, offset)[0]:
                still.append((offset, other))
            else:
                self._free.setdefault(other, []).append(offset)
        self._lent = still
        if free := self._free.get(size):
            return free.pop()
        for other in list(self._free) if self._allocated + size > _MOST else ():
            for offset in self._free.pop(other):
                self._arenas.discard(self._arena, offset)
                self._allocated -= other
        if self._allocated + size > _MOST:
            return None
        self._allocated += size
        return self._arenas.allocate(self._arena, size)


def borrow(arenas: Arenas, sequence: int, parts: Sequence[Part]) -> list[Buffer] | None:
    """Copies the tensors of a message out of the block that it refers to. None if it is no longer lent."""
    first = parts[0]
    lent = word(arenas, first.arena, first.offset - ALIGNMENT)
    if lent[0] != sequence:
        return None
    memory, start, buffers = uninitialized(sum(aligned(part.nbytes) for part in parts)), 0, []
    for part in parts:
        view = memory[start : start + part.nbytes]
        copy(view, arenas.view(part.arena)[part.offset : part.offset + part.nbytes])
        buffers.append(Buffer(part.dtype, view))
        start += aligned(part.nbytes)
    _fence()
    lent[0] = 0
    return buffers


def is_lent(parts: Sequence[Part]) -> bool:
    """True if the tensors of a one-way message are in a block."""
    arenas = {part.arena for part in parts}
    return len(arenas) == 1 and -1 not in arenas and parts[0].offset >= ALIGNMENT


def word(arenas: Arenas, arena: int, offset: int) -> memoryview:
    return arenas.view(arena)[offset : offset + 8].cast("q")


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _fence() -> None:
    """A full memory barrier: the block has been read when its word changes."""
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
