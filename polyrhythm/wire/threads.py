"""The background threads of a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadGroup:
    """Threads that end when the transport closes: each checks `closing` or is unblocked by other means."""

    def __init__(self, name: str) -> None:
        self.closing = threading.Event()
        self._name = f"polyrhythm {name}"
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def spawn(self, function: Callable[..., None], *args: Any) -> None:
        """Runs a function in a new thread; in the caller's thread if the group is closing."""
        with self._lock:
            closing = self.closing.is_set()
            if not closing:
                thread = threading.Thread(target=function, args=args, name=self._name, daemon=True)
                self._threads = [old for old in self._threads if old.is_alive()]
                self._threads.append(thread)
                thread.start()
        if closing:  # a new thread would not be joined, and the function only has to clean up
            function(*args)

    def join(self) -> None:
        """Waits for all threads. Call it after `closing` is set: then no thread is added."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
