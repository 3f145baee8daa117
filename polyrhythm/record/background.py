"""BackgroundWriter: a thread that writes, so that nobody who logs waits for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

TICK = 0.5  # seconds between two calls of `tick`
MAX_WAITING = 64 << 20  # bytes that wait to be written
CLOSE_TIMEOUT = 60.0  # seconds for the last writes


class BackgroundWriter:
    """Calls functions in order in a thread of its own, and `tick` now and then.

    The thread starts with the first call: before that the process may fork.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._queue: queue.SimpleQueue[tuple[Callable[[bytes], None], bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._ticking = False  # a call of `tick` is due
        self._closed = False

    def submit(self, write: Callable[[bytes], None], content: bytes) -> bool:
        """Has `write(content)` called soon. False if too much waits already: then it is not called."""
        with self._lock:
            if self._waiting + len(content) > MAX_WAITING:
                return False
            self._waiting += len(content)
        self._queue.put((write, content))
        self._start()
        return True

    def wake(self) -> None:
        """Has `tick` called soon."""
        self._start()
        if not self._ticking:
            self._ticking = True
            self._queue.put((lambda _: self._tick_now(), b""))

    def close(self) -> bool:
        """Ends the thread when all is written. False if that takes too long; the thread is left to itself."""
        self._closed = True
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        return not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="polyrhythm record", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=TICK)
            except queue.Empty:
                self._tick_now()
                continue
            if item is None:
                return
            write, content = item
            write(content)
            with self._lock:
                self._waiting -= len(content)

    def _tick_now(self) -> None:
        self._ticking = False
        self._tick()
