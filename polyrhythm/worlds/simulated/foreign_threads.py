"""ForeignThreads: ends a simulation in which a thread of the script waits for other nodes.

All nodes run in one thread, so another thread cannot wait for them. The script may wait for what that thread
would have done, and with it the whole simulation: an exception is raised in the simulation's thread, and a
signal wakes it if it waits.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer

WAKE = signal.SIGURG  # is ignored unless somebody handles it


class ForeignThread(BaseException):
    """Raised in the simulation's thread: not an Exception, which the script might handle."""


class ForeignThreads:
    """Guards one simulation, from the thread in which it was made."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.error: UsageError | None = None
        self._lock = threading.Lock()
        self._guarded = False

    def refuse(self, peer: Peer) -> UsageError:
        """Called in another thread of the script, which waits as this node. Returns the error for it."""
        error = UsageError(
            f"{peer}: a thread of the script reads a prepared loader, or calls the session, but a simulation "
            "runs all workers in one thread: do so in the script's own thread, or use real processes, by "
            "polyrhythm run"
        )
        with self._lock:
            if self._guarded and self.error is None:
                self.error = error
                _raise_in(self.thread, ForeignThread)
                signal.pthread_kill(self.thread, WAKE)
        return error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A context that ends early if another thread was refused; `error` says why."""
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(WAKE, lambda *_: None) if in_main else None
        self._guarded = True
        try:
            try:
                yield
            finally:
                with self._lock:  # what was raised before is raised here at the latest
                    self._guarded = False
        except ForeignThread:
            self._guarded = False
        finally:
            if in_main:
                signal.signal(WAKE, before)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
