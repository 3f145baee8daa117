"""Poller: reads all connections of a node, in the thread that waits.

Handing a message from a reader thread to the thread that waits for it costs two wake-ups and contention for
the interpreter lock; measured, that was half of a small round trip. So threads that wait read themselves, in
the leader/followers pattern: the first to wait *leads*, polls all connections and reads messages for itself
and for the others; when it has what it waits for, another one leads. A thread that waits until it can send
more leads too, because its peer may be sending as well and not reading. While no thread waits, because the
node computes, a background thread takes the lead after a moment, so that peers are not blocked.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from polyrhythm.wire.channel import Channel
from polyrhythm.wire.sockets import wait_writable

IDLE = 0.01  # seconds without a leader after which the background thread leads


class Poller:
    """Polls the connections of a node. `start` must be called before `add`."""

    def __init__(self, name: str) -> None:
        self._write_fd = -1  # duplicates the descriptor of the connection that the leader sends to
        self._writable = False
        self._poll = select.poll()
        self._channels: dict[int, Channel] = {}
        self._resumed: list[Channel] = []  # may have buffered messages, which poll does not show
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None
        self._waiting = 0
        self._last_led = time.monotonic()
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._poll.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._background, name=f"polyrhythm {name}", daemon=True)

    def start(self, read: Callable[[Channel], bool], check_stalled: Callable[[], float]) -> None:
        """Starts the background thread.

        `read` reads what a connection has and returns False when the connection has ended. `check_stalled` is
        called before each poll: it ends stalled connections and returns the seconds until it must run again.
        """
        self._read, self._check_stalled = read, check_stalled
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Starts to read a connection."""
        with self._lock:
            if self._wake_write < 0:
                return channel.release()
            self._channels[channel.fileno()] = channel
        self.resume(channel)

    def pause(self, channel: Channel) -> None:
        """Stops reading a connection until `resume`, so that its sender is blocked."""
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._poll.unregister(channel.fileno())

    def resume(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(channel.fileno()) is not channel:
                return
            self._resumed.append(channel)
            self._poll.register(channel.fileno(), select.POLLIN)
            self._wake_leader()  # a poll in progress does not include the new registration

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Waits until `done()`, reading meanwhile; False on timeout. A thread that changes the result of
        `done` calls `notify`."""
        deadline = time.monotonic() + timeout
        me = threading.get_ident()
        while not done():
            if time.monotonic() >= deadline or self._closing.is_set():
                return done()
            with self._lock:
                if self._leader is not None:
                    self._waiting += 1
                    if not done():
                        self._changed.wait(max(0.0, deadline - time.monotonic()))
                    self._waiting -= 1
                    continue
                self._leader = me
            self._lead(done, deadline)
        return True

    def wait_writable(self, channel: Channel, timeout: float) -> bool:
        """Waits until a connection accepts more bytes or is broken, reading meanwhile; False on timeout."""
        with self._lock:
            lead = self._leader is None and not self._closing.is_set()
            if lead:
                self._leader = threading.get_ident()
        if not lead:  # another thread reads
            return wait_writable(channel.fileno(), timeout)
        try:
            # A duplicate, because its own descriptor is registered for reading, or paused.
            self._write_fd, self._writable = os.dup(channel.fileno()), False
            self._poll.register(self._write_fd, select.POLLOUT)
        except OSError:
            self._writable = True  # it was closed meanwhile, and sending will fail
        self._lead(lambda: self._writable, time.monotonic() + timeout)
        return self._writable

    def notify(self) -> None:
        """Makes waiting threads check again whether they are done."""
        with self._lock:
            if self._waiting:
                self._changed.notify_all()
            if self._leader not in (None, threading.get_ident()):
                self._wake_leader()

    def close(self) -> None:
        """Ends all connections and waits, after the leader has stopped."""
        self._closing.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()
        self._stop_leader()
        with self._lock:
            for channel in self._channels.values():
                channel.release()
            self._channels.clear()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def drop(self, channel: Channel) -> None:
        """Forgets a connection that has ended, and closes its socket."""
        with self._lock:
            if self._channels.get(channel.fileno()) is not channel:
                return
            del self._channels[channel.fileno()]
            with contextlib.suppress(KeyError):
                self._poll.unregister(channel.fileno())
        channel.release()

    def _stop_leader(self) -> None:
        me = threading.get_ident()
        with self._lock:
            while self._leader not in (None, me):
                self._wake_leader()
                self._waiting += 1
                self._changed.wait(0.1)
                self._waiting -= 1
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _lead(self, done: Callable[[], bool], deadline: float) -> None:
        try:
            while not done() and not self._closing.is_set():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                while self._resumed:
                    channel = self._resumed.pop()
                    if channel.has_buffered and self._channels.get(channel.fileno()) is channel:
                        self._read_channel(channel)
                left = 0 if done() else min(left, self._check_stalled(), 1e6)
                for fd, _ in self._poll.poll(left * 1000):
                    if fd == self._write_fd:
                        self._writable = True
                    elif fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    elif fd in self._channels:
                        self._read_channel(self._channels[fd])
        finally:
            with self._lock:
                if self._write_fd >= 0:
                    self._poll.unregister(self._write_fd)
                    os.close(self._write_fd)
                    self._write_fd = -1
                self._leader = None
                self._last_led = time.monotonic()
                if self._waiting:
                    self._changed.notify_all()

    def _read_channel(self, channel: Channel) -> None:
        alive = self._read(channel)
        if self._waiting:
            with self._lock:
                self._changed.notify_all()
        if not alive:
            self.drop(channel)

    def _background(self) -> None:
        while not self._closing.wait(IDLE):
            with self._lock:
                if self._leader is not None or time.monotonic() - self._last_led < IDLE:
                    continue
                self._leader = threading.get_ident()
            # Until another thread waits: it leads with fewer wake-ups.
            self._lead(lambda: self._waiting > 0, float("inf"))

    def _wake_leader(self) -> None:
        """Interrupts the leader's poll. The caller holds the lock: the pipe may be closed without it."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"!")
