"""Shared memory of one host: large sparse anonymous files that all nodes of a launcher inherit by fork.

The files have no names, so they cannot leak: the kernel frees them with the last process that holds them.
Each node allocates in the arenas that it owns, and reads and writes in all. Unused pages take no memory.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import threading

from polyrhythm.core.errors import PolyrhythmError

ALIGNMENT = 64
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


class Arenas:
    """`count` arenas of `size` bytes each. The launcher creates them before it forks the nodes."""

    def __init__(self, count: int, size: int = 1 << 36) -> None:
        self.count = count
        self.size = size
        self._files = [_create_file(size) for _ in range(count)]
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._gaps = [[(0, size)] for _ in range(count)]
        self._allocated: list[dict[int, int]] = [{} for _ in range(count)]
        self._discarded: list[tuple[int, int]] = []  # to be freed by the next allocation
        self._lock = threading.Lock()

    def view(self, index: int) -> memoryview:
        """Returns the writable bytes of an arena, mapping it on first use."""
        mapped = self._maps.get(index)
        if mapped is None:
            with self._lock:
                mapped = self._maps.get(index)
                if mapped is None:
                    memory = mmap.mmap(self._files[index], self.size, flags=mmap.MAP_SHARED | _NORESERVE)
                    mapped = self._maps[index] = (memory, memoryview(memory))
        return mapped[1]

    def file(self, index: int) -> int:
        """Returns the file descriptor of an arena."""
        return self._files[index]

    def allocate(self, index: int, nbytes: int) -> int:
        """Allocates `nbytes` in the first gap that fits and returns the offset. Only for the owner."""
        with contextlib.suppress(IndexError):  # none is left; other threads may take them too
            while True:
                self.free(*self._discarded.pop())
        align = mmap.PAGESIZE if nbytes >= mmap.PAGESIZE else ALIGNMENT
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            gaps = self._gaps[index]
            for at, (start, room) in enumerate(gaps):
                offset = -(-start // align) * align
                left = start + room - offset - size
                if left >= 0:
                    around = ((start, offset - start), (offset + size, left))
                    gaps[at : at + 1] = [gap for gap in around if gap[1]]
                    self._allocated[index][offset] = size
                    return offset
        raise PolyrhythmError(f"arena {index} of {self.size} bytes has no room for {nbytes} more bytes")

    def free(self, index: int, offset: int) -> None:
        """Frees the allocation at `offset`."""
        with self._lock:
            size = self._allocated[index].pop(offset)
            gaps = self._gaps[index]
            at = bisect.bisect(gaps, (offset, 0))
            if at < len(gaps) and gaps[at][0] == offset + size:
                size += gaps.pop(at)[1]
            if at and sum(gaps[at - 1]) == offset:
                at -= 1
                start, room = gaps.pop(at)
                offset, size = start, room + size
            gaps.insert(at, (offset, size))

    def discard(self, index: int, offset: int) -> None:
        """Frees an allocation and returns its pages to the system, where it supports that.

        Takes no lock, because the garbage collector may call it anywhere: the next allocation does the rest.
        """
        if not self._files:  # closed before the last tensor was gone
            return
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE  # the pages that lie wholly in it
        stop = (offset + self._allocated[index][offset]) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._punch(index, start, stop - start)
        self._discarded.append((index, offset))

    def clear(self, index: int) -> None:
        """Returns the pages of an unused arena to the system, where it supports that."""
        self._punch(index, 0, self.size)

    def _punch(self, index: int, offset: int, size: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            fallocate = ctypes.CDLL(None, use_errno=True).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
            fallocate(self._files[index], _PUNCH_HOLE, offset, size)

    def close(self) -> None:
        """Closes the files and maps. A map that tensors still use is freed with the last of them."""
        with self._lock:
            for memory, view in self._maps.values():
                with contextlib.suppress(BufferError):
                    view.release()
                    memory.close()
            self._maps.clear()
            while self._files:
                os.close(self._files.pop())


def _create_file(size: int) -> int:
    """Creates a sparse file without a name, sealed against resizing where the system supports it."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), size)
            return os.dup(file.fileno())
    import fcntl

    fd = os.memfd_create("polyrhythm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # Reading a map beyond the end of a shrunk file would kill the process.
    seals = [getattr(fcntl, name, 0) for name in ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")]
    if all(seals):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals[0] | seals[1] | seals[2])
    return fd
