"""Mutexes in shared memory: libc's own, which any process of the host can take, and none can take with it.

They are robust: when a holder dies, however it dies, the kernel marks the mutex, and the next one has it. A
holder that is merely stopped keeps it. So nobody waits longer than a slice at a time: after each, signals are
heard and whoever waits can be told that it waits in vain, and for whom.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from polyrhythm.core.errors import PolyrhythmError, WaitError
from polyrhythm.core.node import Lock

SIZE = 64  # a line of the cache: the mutex, and in its last 8 bytes the rank of whoever has it, plus 1
HOLDER = 56
SLICE = 0.5  # seconds
BOTH = 2 * SIZE  # the door, and the room

# (the rank of whom one waits for, or -1 if that is not known; for how many seconds): raises if it is in vain.
GiveUp = Callable[[int, float], None]


def patient(holder: int, waited: float) -> None:
    """Waits on."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "pthread_mutexattr_setrobust") or not hasattr(libc, "pthread_mutex_timedlock"):
        raise PolyrhythmError("locks between processes need robust mutexes, which this system does not have")
    for name in ("trylock", "unlock", "consistent"):
        getattr(libc, f"pthread_mutex_{name}").argtypes = [ctypes.c_void_p]
    libc.pthread_mutex_timedlock.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Time)]
    return libc


def begin(memory: memoryview) -> None:
    """Makes mutexes of shared memory, one of every `SIZE` bytes. Once, by whoever is the first there."""
    libc, attributes = _libc(), ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, 1)  # PTHREAD_PROCESS_SHARED
    libc.pthread_mutexattr_setrobust(attributes, 1)  # PTHREAD_MUTEX_ROBUST
    for start in range(0, len(memory), SIZE):
        place = (ctypes.c_char * SIZE).from_buffer(memory, start)
        if failed := libc.pthread_mutex_init(place, attributes):
            raise PolyrhythmError(f"no mutex can be had: {os.strerror(failed)}")
    libc.pthread_mutexattr_destroy(attributes)


class Mutex:
    """A mutex as one process sees it. A thread that has it must be the one to release it."""

    def __init__(self, memory: memoryview, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self._holder = ctypes.c_int64.from_buffer(memory, HOLDER)  # which keeps the memory where it is
        self.address = ctypes.addressof(self._holder) - HOLDER

    @property
    def holder(self) -> int:
        """The rank of whoever has it, as far as it has told; -1 if nobody has told."""
        return self._holder.value - 1

    def take(self, give_up: GiveUp, whom: Callable[[], int] | None = None) -> None:
        """Blocks until it has it. It waits for the holder, or for `whom`; when that is another, the line has
        moved on, and time counts anew. By slices, for this process may have been stopped itself."""
        look = whom or (lambda: self.holder)
        holder, waited = look(), 0.0
        while not self._try(SLICE):
            before, holder = holder, look()
            waited = waited + SLICE if holder == before else 0.0
            give_up(holder, waited)

    def release(self) -> None:
        self._holder.value = 0
        if failed := _libc().pthread_mutex_unlock(self.address):
            raise PolyrhythmError(f"a lock is released by the thread that took it: {os.strerror(failed)}")

    def taken(self) -> bool:
        """Whether somebody has it."""
        if not self._try(0):
            return True
        self.release()
        return False

    def _try(self, seconds: float) -> bool:
        libc = _libc()
        code = libc.pthread_mutex_trylock(self.address)
        if code == errno.EBUSY and seconds:
            until = time.clock_gettime_ns(time.CLOCK_REALTIME) + int(seconds * 1e9)
            code = libc.pthread_mutex_timedlock(self.address, _Time(*divmod(until, 10**9)))
        if code in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        if code == errno.EOWNERDEAD:  # it died, and this process has it now
            code = libc.pthread_mutex_consistent(self.address)
        if code:
            raise WaitError(f"a lock cannot be had: {os.strerror(code)}")
        self._holder.value = self.rank + 1
        return True


class SharedLock(Lock):
    """Two mutexes: the door, at which one waits and the others behind it, and the room.

    Whoever leaves the room and wants to come back has to pass the door, and there somebody who waits is
    first. Compiled code that takes the room only, and for a moment, does without the door: see `mutex`.
    """

    def __init__(self, memory: memoryview, rank: int = 0, give_up: GiveUp = patient) -> None:
        self.door, self.room = Mutex(memory[:SIZE], rank), Mutex(memory[SIZE:], rank)
        self._give_up = give_up
        self._held = False

    @property
    def mutex(self) -> memoryview:
        return self.room.memory

    def waited(self, seconds: float) -> None:
        self._give_up(self.room.holder, seconds)

    def take(self) -> None:
        if self._held:
            return
        self.door.take(self._give_up, self._inside)
        try:
            self.room.take(self._give_up)
            self._held = True
        finally:
            self.door.release()

    def _inside(self) -> int:
        """Whom those at the door wait for: who has the room, or, if nobody has, who stands before it."""
        holder = self.room.holder
        return self.door.holder if holder < 0 else holder

    def release(self) -> None:
        if self._held:
            self._held = False
            self.room.release()
