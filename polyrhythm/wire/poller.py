"""Who reads: the thread that waits.

A message that goes from the socket through a reader thread to the thread that waits for it costs two wake-ups
and a fight for the interpreter lock; measured, that was half of a small round trip. So whoever waits reads:
the first to wait *leads*, polls all connections and takes messages in, for itself and for the others; when it
has what it waited for, the next one leads. Who waits until more can be sent leads too: the peer may be
sending as much, and not read before it is read. While nobody waits, which is while a node computes, a
background thread leads after a moment, so that peers are not held up.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from polyrhythm.wire.channel import Channel, writable

IDLE = 0.01  # seconds without a leader after which the background thread leads


class Poller:
    """Polls connections. `take` reads what a connection has, and returns False when that has ended.

    `overdue` is asked before each poll; it ends what has come to a stop, and says when to ask again.
    """

    def __init__(self, take: Callable[[Channel], bool], overdue: Callable[[], float], name: str) -> None:
        self._take = take
        self._overdue = overdue
        self._outlet = -1  # stands for the connection that the leader wants to send more by
        self._writable = False
        self._poll = select.poll()
        self._channels: dict[int, Channel] = {}
        self._backlog: list[Channel] = []  # with messages that are read already, which no poll shows
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None
        self._waiting = 0
        self._left = time.monotonic()  # when there last was a leader
        self._closing = threading.Event()
        self._alarm, self._bell = os.pipe()
        for end in (self._alarm, self._bell):
            os.set_blocking(end, False)
        self._poll.register(self._alarm, select.POLLIN)
        self._thread = threading.Thread(target=self._background, name=f"polyrhythm {name}", daemon=True)
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Reads this connection from now on."""
        with self._lock:
            if self._bell < 0:
                return channel.release()
            self._channels[channel.fileno()] = channel
        self.resume(channel)

    def pause(self, channel: Channel) -> None:
        """Stops reading a connection for a while, so that its sender feels it."""
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._poll.unregister(channel.fileno())

    def resume(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(channel.fileno()) is not channel:
                return
            self._backlog.append(channel)
            self._poll.register(channel.fileno(), select.POLLIN)
            self._ring()  # a poll that is under way does not know of it

    def wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Waits until `done`, reading meanwhile; False when time is over. Whoever changes what `done`
        looks at calls `notify`."""
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

    def until_writable(self, channel: Channel, timeout: float) -> bool:
        """Waits until a connection takes more, or is broken; False when time is over."""
        with self._lock:
            lead = self._leader is None and not self._closing.is_set()
            if lead:
                self._leader = threading.get_ident()
        if not lead:  # somebody reads
            return writable(channel, timeout)
        try:
            # Its own number is registered for reading, or must not be while its reader rests.
            self._outlet, self._writable = os.dup(channel.fileno()), False
            self._poll.register(self._outlet, select.POLLOUT)
        except OSError:
            self._writable = True  # closed meanwhile, as sending will find out
        self._lead(lambda: self._writable, time.monotonic() + timeout)
        return self._writable

    def notify(self) -> None:
        """Something changed that somebody may be waiting for."""
        with self._lock:
            if self._waiting:
                self._changed.notify_all()
            if self._leader not in (None, threading.get_ident()):
                self._ring()

    def close(self) -> None:
        """Ends all connections and waits. A leader that is still at it lets go first."""
        self._closing.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()
        self._end_leading()
        with self._lock:
            for channel in self._channels.values():
                channel.release()
            self._channels.clear()
            os.close(self._alarm)
            os.close(self._bell)
            self._bell = -1

    def _end_leading(self) -> None:
        me = threading.get_ident()
        with self._lock:
            while self._leader not in (None, me):
                self._ring()
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
                while self._backlog:
                    channel = self._backlog.pop()
                    if channel.ahead and self._channels.get(channel.fileno()) is channel:
                        self._read(channel)
                left = 0 if done() else min(left, self._overdue(), 1e6)
                for file, _ in self._poll.poll(left * 1000):
                    if file == self._outlet:
                        self._writable = True
                    elif file == self._alarm:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._alarm, 4096)
                    elif file in self._channels:
                        self._read(self._channels[file])
        finally:
            with self._lock:
                if self._outlet >= 0:
                    self._poll.unregister(self._outlet)
                    os.close(self._outlet)
                    self._outlet = -1
                self._leader = None
                self._left = time.monotonic()
                if self._waiting:
                    self._changed.notify_all()

    def _read(self, channel: Channel) -> None:
        alive = self._take(channel)
        if self._waiting:
            with self._lock:
                self._changed.notify_all()
        if not alive:
            self.drop(channel)

    def drop(self, channel: Channel) -> None:
        """Forgets a connection that has ended."""
        with self._lock:
            if self._channels.get(channel.fileno()) is not channel:
                return
            del self._channels[channel.fileno()]
            with contextlib.suppress(KeyError):
                self._poll.unregister(channel.fileno())
        channel.release()

    def _background(self) -> None:
        while not self._closing.wait(IDLE):
            with self._lock:
                if self._leader is not None or time.monotonic() - self._left < IDLE:
                    continue
                self._leader = threading.get_ident()
            self._lead(lambda: self._waiting > 0, float("inf"))  # for one who waits leads better himself

    def _ring(self) -> None:
        """Wakes the leader. The lock is held: a file that is closed must not be written to."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._bell, b"!")
