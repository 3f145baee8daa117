"""What a node does about a limit of its address space (ulimit -v)."""

from __future__ import annotations

import contextlib
import ctypes
import threading

from polyrhythm.core.address_space import address_space

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # of mallopt, in glibc
_STACK = 1 << 20  # bytes for each thread, instead of 8 MiB


def spare() -> None:
    """Makes this process take less address space, if that is limited. Call it before threads start.

    glibc reserves 64 MiB for each thread that allocates, and keeps the memory of freed tensors for later.
    """
    if address_space() is None:
        return
    threading.stack_size(_STACK)
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 1 << 17)  # to give it here keeps it from growing
