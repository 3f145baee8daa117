"""Receiver: reads messages from all connections and ends connections that break or stall."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from polyrhythm.core.errors import WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.channel import STALL, Channel
from polyrhythm.wire.connection import Connection
from polyrhythm.wire.dispatch import Dispatcher
from polyrhythm.wire.frame import Header
from polyrhythm.wire.incoming import PartialMessage
from polyrhythm.wire.poller import Poller
from polyrhythm.wire.threads import ThreadGroup

_BULK = 1 << 22  # bytes of tensors from which a message is read by its own thread


class Receiver:
    """Reads messages in the thread that leads the poller, large ones each in its own thread.

    `on_disconnect` is called when a connection has ended, with a description of the malformed message if one
    ended it.
    """

    def __init__(
        self,
        me: Peer,
        poller: Poller,
        dispatcher: Dispatcher,
        threads: ThreadGroup,
        on_disconnect: Callable[[Connection, str], None],
    ) -> None:
        self._me, self._poller, self._dispatcher = me, poller, dispatcher
        self._threads, self._on_disconnect = threads, on_disconnect
        self.connections: dict[Channel, Connection] = {}
        self._partial: set[Connection] = set()  # with a message that has not arrived completely
        poller.start(self.read, self.check_stalled)

    def add(self, connection: Connection) -> None:
        """Starts to read a connection."""
        self.connections[connection.channel] = connection
        self._poller.add(connection.channel)

    def read(self, channel: Channel) -> bool:
        """Reads what a connection has. False if it has ended."""
        connection = self.connections[channel]
        try:
            while True:
                if connection.partial is None:
                    header = channel.receive_header()
                    partial = PartialMessage(self._receive(connection, header), header.inline)
                    if header.inline > _BULK and 2 * channel.available() < header.inline:
                        # Large messages are read, and decrypted, in parallel.
                        self._poller.pause(channel)
                        self._threads.spawn(self._read_bulk, connection, partial)
                        return True
                    connection.partial = partial
                # A slow sender must not block others: the rest is read when it arrives.
                if not connection.partial.read_available(channel):
                    self._partial.add(connection)
                    return True
                connection.partial = None
                self._partial.discard(connection)
                if connection.paused or not channel.has_buffered:
                    return True
        except Exception as error:
            self._disconnect(connection, error)
            return False

    def check_stalled(self) -> float:
        """Ends connections on which a message stopped half-way. Returns the seconds until the next check."""
        if not self._partial:
            return float("inf")
        now, next_check = time.monotonic(), STALL
        for connection in list(self._partial):
            partial, channel = connection.partial, connection.channel
            if partial is not None and channel.available():
                partial.last_progress = now  # more has arrived; this node has not read it yet
            left = STALL - (now - partial.last_progress if partial else 0)
            if left <= 0:
                self._disconnect(connection, TimeoutError("a message stopped half-way"))
                self._poller.drop(channel)
            else:
                next_check = min(next_check, left)
        return next_check

    def _receive(self, connection: Connection, header: Header) -> Generator[memoryview, None, None]:
        """Yields the memory to fill with a message, handles the message, and applies backpressure."""
        if not (yield from self._dispatcher.dispatch(connection, header)):
            self._poller.pause(connection.channel)
            if not connection.paused:  # a message was received meanwhile
                self._poller.resume(connection.channel)

    def _read_bulk(self, connection: Connection, partial: PartialMessage) -> None:
        try:
            partial.read_all(connection.channel)
        except Exception as error:
            partial.abort()
            self._disconnect(connection, error)
            self._poller.drop(connection.channel)
        else:
            if not connection.paused:
                self._poller.resume(connection.channel)
        self._poller.notify()

    def _disconnect(self, connection: Connection, error: Exception) -> None:
        """Ends a connection after an error. Errors other than OSError are reported; the node continues."""
        channel, malformed = connection.channel, ""
        if isinstance(error, WireError):
            malformed = str(error)
        elif not isinstance(error, OSError):  # out of memory, for example
            malformed = f"{self._me} cannot read what {channel.peer} sent: {error!r}"
        channel.close()
        del self.connections[channel]
        self._partial.discard(connection)
        if connection.partial is not None:
            connection.partial.abort()
        self._on_disconnect(connection, malformed)
