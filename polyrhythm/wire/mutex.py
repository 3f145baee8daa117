"""Mutexes in shared memory: robust process-shared mutexes of libc.

If a holder dies, the kernel marks the mutex and the next process gets it. A holder that is merely stopped
keeps it. So a process waits in slices: between them signals are handled, and an error that names the holder
can end the wait.
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

SIZE = 64  # one cache line: the mutex and, in the last 8 bytes, the rank of its holder plus 1
HOLDER = 56
SLICE = 0.5  # seconds
LOCK_SIZE = 2 * SIZE

# Called with the rank of the holder (-1 if unknown) and the seconds waited. Raises to end the wait.
CheckWait = Callable[[int, float], None]


def wait_forever(holder: int, waited: float) -> None:
    """Never ends a wait."""


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


def initialize(memory: memoryview) -> None:
    """Initializes a mutex in every `SIZE` bytes of shared memory. Must be called once, before any use."""
    libc, attributes = _libc(), ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(attributes)
    libc.pthread_mutexattr_setpshared(attributes, 1)  # PTHREAD_PROCESS_SHARED
    libc.pthread_mutexattr_setrobust(attributes, 1)  # PTHREAD_MUTEX_ROBUST
    for start in range(0, len(memory), SIZE):
        mutex = (ctypes.c_char * SIZE).from_buffer(memory, start)
        if code := libc.pthread_mutex_init(mutex, attributes):
            raise PolyrhythmError(f"cannot create a mutex: {os.strerror(code)}")
    libc.pthread_mutexattr_destroy(attributes)


class Mutex:
    """A mutex as one process sees it. The thread that acquired it must release it."""

    def __init__(self, memory: memoryview, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self._holder = ctypes.c_int64.from_buffer(memory, HOLDER)  # also keeps the memory alive
        self.address = ctypes.addressof(self._holder) - HOLDER

    @property
    def holder(self) -> int:
        """The rank of the holder; -1 if there is none, or it has not written its rank yet."""
        return self._holder.value - 1

    def acquire(self, check_wait: CheckWait, blocker: Callable[[], int] | None = None) -> None:
        """Blocks until this process holds the mutex.

        It waits for the holder, or for the rank that `blocker` returns. When that changes there is progress,
        and the time starts again. Time is counted in slices: this process may have been stopped itself.
        """
        find = blocker or (lambda: self.holder)
        holder, waited = find(), 0.0
        while not self._try(SLICE):
            before, holder = holder, find()
            waited = waited + SLICE if holder == before else 0.0
            check_wait(holder, waited)

    def release(self) -> None:
        self._holder.value = 0
        if code := _libc().pthread_mutex_unlock(self.address):
            raise PolyrhythmError(f"only the thread that took a lock can release it: {os.strerror(code)}")

    def locked(self) -> bool:
        """True if a process holds it."""
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
        if code == errno.EOWNERDEAD:  # the holder died, and this process holds the mutex now
            code = libc.pthread_mutex_consistent(self.address)
        if code:
            raise WaitError(f"cannot take a lock: {os.strerror(code)}")
        self._holder.value = self.rank + 1
        return True


class SharedLock(Lock):
    """A fair lock of two mutexes: `main` is the lock itself, and only the holder of `next` waits for it.

    A process that releases the lock and wants it back must take `next` first, behind a process that waits
    already. Compiled code that holds the lock only for a moment takes `main` directly (see `mutex`).
    """

    def __init__(self, memory: memoryview, rank: int = 0, check_wait: CheckWait = wait_forever) -> None:
        self.next, self.main = Mutex(memory[:SIZE], rank), Mutex(memory[SIZE:], rank)
        self._check_wait = check_wait
        self._held = False

    @property
    def mutex(self) -> memoryview:
        return self.main.memory

    def waited(self, seconds: float) -> None:
        self._check_wait(self.main.holder, seconds)

    def take(self) -> None:
        if self._held:
            return
        self.next.acquire(self._check_wait, self._blocker)
        try:
            self.main.acquire(self._check_wait)
            self._held = True
        finally:
            self.next.release()

    def _blocker(self) -> int:
        """Whom a process that waits for `next` waits for: the holder of the lock or, if none, of `next`."""
        holder = self.main.holder
        return self.next.holder if holder < 0 else holder

    def release(self) -> None:
        if self._held:
            self._held = False
            self.main.release()
