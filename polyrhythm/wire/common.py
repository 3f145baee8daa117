"""Common: memory and locks that the processes of a host find by name, in the last of their arenas.

The arena belongs to no process, so what is there outlives each of them; it goes with the last, as all arenas
do. It begins with a list of names and places, to which any process may add. Locks are the kernel's, on bytes
of the file: it takes them from a process that dies, however it dies.
"""

from __future__ import annotations

import fcntl
import struct
from typing import TYPE_CHECKING

from polyrhythm.errors import PolyrhythmError
from polyrhythm.node import Lock

if TYPE_CHECKING:
    from polyrhythm.wire.arena import Arenas

_ENTRY = struct.Struct("<112sQQ")  # name, offset, bytes
_ENTRIES = 512
_PAGE = 1 << 16  # what lies there begins at its own page, whatever a page is here
_LIST = (0, -(-_ENTRIES * _ENTRY.size // _PAGE) * _PAGE)


class Common:
    """This process's view of what all have in common."""

    def __init__(self, arenas: Arenas) -> None:
        self._file = arenas.file(arenas.count - 1)
        self._view = arenas.view(arenas.count - 1)
        self._size = arenas.size

    def memory(self, name: str, nbytes: int) -> memoryview:
        """The bytes of this name, zero when they were first asked for."""
        offset = self._place(name, nbytes)
        return self._view[offset : offset + nbytes]

    def lock(self, name: str) -> FileLock:
        return FileLock(self._file, self._place(f"lock {name}", 2))

    def _place(self, name: str, nbytes: int) -> int:
        word = name.encode()
        if not 0 < len(word) <= 112 or b"\0" in word:
            raise PolyrhythmError(f"{name!r} cannot be the name of shared memory")
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            free = _LIST[1]
            for number in range(_ENTRIES):
                known, offset, size = _ENTRY.unpack_from(self._view, number * _ENTRY.size)
                if not size:
                    break
                if known.rstrip(b"\0") == word:
                    if size != nbytes:
                        raise PolyrhythmError(
                            f"shared memory {name!r} has {size} bytes, and {nbytes} were asked for"
                        )
                    return int(offset)
                free = offset + -(-size // _PAGE) * _PAGE
            else:
                raise PolyrhythmError(f"there are {_ENTRIES} names of shared memory; no more can be had")
            if free + nbytes > self._size:
                raise PolyrhythmError(f"shared memory has no room for {nbytes} bytes more")
            _ENTRY.pack_into(self._view, number * _ENTRY.size, word, free, nbytes)
            return free
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)


class FileLock(Lock):
    """Two bytes of the file: the door, at which one waits and the others behind it, and the room.

    Whoever leaves the room and wants to come back has to pass the door, and there somebody who waits is
    first. Such locks are a process's own: its threads do not exclude each other.
    """

    def __init__(self, file: int, offset: int) -> None:
        self._file, self._door, self._room = file, offset, offset + 1
        self._held = False

    def take(self) -> None:
        if not self._held:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._door)
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._room)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._door)
            self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._room)
