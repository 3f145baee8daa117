"""BackgroundWriter: a thread that writes files, so that logging does not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

TICK = 0.5  # seconds between two calls of `tick`
MAX_WAITING = 64 << 20  # bytes that may wait to be written
CLOSE_TIMEOUT = 60.0  # seconds to finish writing


class BackgroundWriter:
    """Calls functions in order in a thread of its own, and `tick` every half second when idle.

    The thread starts with the first call, because the process may fork before that.
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
        """Schedules `write(content)`. Returns False and drops it if too many bytes are waiting."""
        with self._lock:
            if self._waiting + len(content) > MAX_WAITING:
                return False
            self._waiting += len(content)
        self._queue.put((write, content))
        self._start()
        return True

    def wake(self) -> None:
        """Schedules a call of `tick`."""
        self._start()
        if not self._ticking:
            self._ticking = True
            self._queue.put((lambda _: self._tick_now(), b""))

    def close(self) -> bool:
        """Ends the thread when everything is written. Returns False after a timeout; the thread goes on."""
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
