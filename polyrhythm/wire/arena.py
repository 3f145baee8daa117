"""Shared memory of one host: large sparse anonymous files that all nodes of a launcher inherit by fork.

The files have no name, so nothing can leak: the kernel frees them with the last process that has them.
Each node allocates in the arenas that it owns and reads and writes in all; only pages that are used exist.
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
    """`count` arenas of `size` bytes each, made by the launcher before it forks the nodes."""

    def __init__(self, count: int, size: int = 1 << 36) -> None:
        self.count = count
        self.size = size
        self._files = [_anonymous(size) for _ in range(count)]
        self._maps: dict[int, tuple[mmap.mmap, memoryview]] = {}
        self._holes = [[(0, size)] for _ in range(count)]
        self._used: list[dict[int, int]] = [{} for _ in range(count)]
        self._discarded: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def view(self, index: int) -> memoryview:
        """The writable bytes of an arena, mapped when first asked for."""
        mapped = self._maps.get(index)
        if mapped is None:
            with self._lock:
                mapped = self._maps.get(index)
                if mapped is None:
                    memory = mmap.mmap(self._files[index], self.size, flags=mmap.MAP_SHARED | _NORESERVE)
                    mapped = self._maps[index] = (memory, memoryview(memory))
        return mapped[1]

    def file(self, index: int) -> int:
        """The descriptor of an arena's file."""
        return self._files[index]

    def allocate(self, index: int, nbytes: int) -> int:
        """The offset of `nbytes` unused bytes, in the first hole that fits. Only the owner allocates."""
        while self._discarded:
            self.free(*self._discarded.pop())
        align = mmap.PAGESIZE if nbytes >= mmap.PAGESIZE else ALIGNMENT
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            holes = self._holes[index]
            for at, (start, room) in enumerate(holes):
                offset = -(-start // align) * align
                left = start + room - offset - size
                if left >= 0:
                    around = ((start, offset - start), (offset + size, left))
                    holes[at : at + 1] = [hole for hole in around if hole[1]]
                    self._used[index][offset] = size
                    return offset
        raise PolyrhythmError(f"arena {index} of {self.size} bytes has no room for {nbytes} more")

    def free(self, index: int, offset: int) -> None:
        """Gives back what `allocate` returned, for reuse."""
        with self._lock:
            size = self._used[index].pop(offset)
            holes = self._holes[index]
            at = bisect.bisect(holes, (offset, 0))
            if at < len(holes) and holes[at][0] == offset + size:
                size += holes.pop(at)[1]
            if at and sum(holes[at - 1]) == offset:
                at -= 1
                start, room = holes.pop(at)
                offset, size = start, room + size
            holes.insert(at, (offset, size))

    def discard(self, index: int, offset: int) -> None:
        """Like `free`, and gives the pages back to the system, where it can do that.

        Takes no lock, because the garbage collector may call it anywhere: `allocate` does the rest.
        """
        if not self._files:  # closed before the last tensor was gone
            return
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE  # the pages that lie wholly in it
        stop = (offset + self._used[index][offset]) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._punch(index, start, stop - start)
        self._discarded.append((index, offset))

    def clear(self, index: int) -> None:
        """Gives the pages of an arena back to the system, where it can do that; nobody may be using them."""
        self._punch(index, 0, self.size)

    def _punch(self, index: int, offset: int, size: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            fallocate = ctypes.CDLL(None, use_errno=True).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
            fallocate(self._files[index], _PUNCH_HOLE, offset, size)

    def close(self) -> None:
        """Lets go of the files and the maps; a map still seen by a tensor goes when the tensor goes."""
        with self._lock:
            for memory, view in self._maps.values():
                with contextlib.suppress(BufferError):
                    view.release()
                    memory.close()
            self._maps.clear()
            while self._files:
                os.close(self._files.pop())


def _anonymous(size: int) -> int:
    """A sparse file without a name, sealed against changing its size where the system can."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), size)
            return os.dup(file.fileno())
    import fcntl

    file_number = os.memfd_create("polyrhythm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file_number, size)
    # A file that shrinks under a map kills whoever reads there.
    seals = [getattr(fcntl, name, 0) for name in ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")]
    if all(seals):
        fcntl.fcntl(file_number, fcntl.F_ADD_SEALS, seals[0] | seals[1] | seals[2])
    return file_number
