"""Common: memory and locks that the processes of a host find by name, in the last of their arenas.

The arena belongs to no process, so what is there outlives each of them; it goes with the last, as all arenas
do. It begins with a list of names and places, to which any process may add. Who adds holds the kernel's lock
on a byte of the file for that moment: it is taken from a process that dies, however it dies.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.wire import mutex
from polyrhythm.wire.mutex import GiveUp, SharedLock

if TYPE_CHECKING:
    from polyrhythm.wire.arena import Arenas

_ENTRY = struct.Struct("<112sQQ")  # name, offset, bytes
_ENTRIES = 512
_PAGE = 1 << 16  # what lies there begins at its own page, whatever a page is here
_LIST = (0, -(-_ENTRIES * _ENTRY.size // _PAGE) * _PAGE)


class SharedRegion:
    """This process's view of what all have in common."""

    def __init__(self, arenas: Arenas) -> None:
        self._file = arenas.file(arenas.count - 1)
        self._view = arenas.view(arenas.count - 1)
        self._size = arenas.size

    def memory(self, name: str, nbytes: int) -> memoryview:
        """The bytes of this name, zero when they were first asked for."""
        offset = self._place(name, nbytes)
        return self._view[offset : offset + nbytes]

    def lock(self, name: str, rank: int = 0, give_up: GiveUp = mutex.patient) -> SharedLock:
        """The lock of this name, for the worker of this rank; `give_up` is asked whether it waits in vain."""
        place = self._place(f"lock {name}", mutex.BOTH, mutex.begin)
        return SharedLock(self._view[place : place + mutex.BOTH], rank, give_up)

    def _place(self, name: str, nbytes: int, begin: Callable[[memoryview], None] | None = None) -> int:
        """Where it is; `begin` makes of it what it is to be, once, before anybody else can find it."""
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
            if begin is not None:
                begin(self._view[free : free + nbytes])
            _ENTRY.pack_into(self._view, number * _ENTRY.size, word, free, nbytes)
            return free
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)
