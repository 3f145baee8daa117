"""SharedRegion: memory and locks that the processes of a host share by name, in the last of their arenas.

No process owns that arena, so its contents outlive each of them; it is freed with the last process. It begins
with a table of names and offsets, to which any process may add. A process that searches or adds holds the
kernel's lock on a byte of the file, which is released even if the process dies.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.wire import mutex
from polyrhythm.wire.mutex import CheckWait, SharedLock

if TYPE_CHECKING:
    from polyrhythm.wire.arena import Arenas

_ENTRY = struct.Struct("<112sQQ")  # name, offset, bytes
_ENTRIES = 512
_PAGE = 1 << 16  # every allocation starts at a page, whatever the page size of this system
_TABLE_SIZE = -(-_ENTRIES * _ENTRY.size // _PAGE) * _PAGE


class SharedRegion:
    """This process's view of the memory that all processes of the host share."""

    def __init__(self, arenas: Arenas) -> None:
        self._file = arenas.file(arenas.count - 1)
        self._view = arenas.view(arenas.count - 1)
        self._size = arenas.size

    def memory(self, name: str, nbytes: int) -> memoryview:
        """Returns the memory of this name, zero when first used."""
        offset = self._find(name, nbytes)
        return self._view[offset : offset + nbytes]

    def lock(self, name: str, rank: int = 0, check_wait: CheckWait = mutex.wait_forever) -> SharedLock:
        """Returns the lock of this name for the worker of this rank. `check_wait` may end its waits."""
        offset = self._find(f"lock {name}", mutex.LOCK_SIZE, mutex.initialize)
        return SharedLock(self._view[offset : offset + mutex.LOCK_SIZE], rank, check_wait)

    def _find(self, name: str, nbytes: int, initialize: Callable[[memoryview], None] | None = None) -> int:
        """Returns the offset of a name. A new name is allocated and initialized before others can see it."""
        encoded = name.encode()
        if not 0 < len(encoded) <= 112 or b"\0" in encoded:
            raise PolyrhythmError(f"{name!r} cannot be the name of shared memory")
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            free = _TABLE_SIZE
            for number in range(_ENTRIES):
                known, offset, size = _ENTRY.unpack_from(self._view, number * _ENTRY.size)
                if not size:
                    break
                if known.rstrip(b"\0") == encoded:
                    if size != nbytes:
                        raise PolyrhythmError(
                            f"shared memory {name!r} has {size} bytes, and {nbytes} were requested"
                        )
                    return int(offset)
                free = offset + -(-size // _PAGE) * _PAGE
            else:
                raise PolyrhythmError(f"all {_ENTRIES} names of shared memory are in use")
            if free + nbytes > self._size:
                raise PolyrhythmError(f"shared memory has no room for {nbytes} more bytes")
            if initialize is not None:
                initialize(self._view[free : free + nbytes])
            _ENTRY.pack_into(self._view, number * _ENTRY.size, encoded, free, nbytes)
            return free
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)
