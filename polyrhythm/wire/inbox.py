"""Inbox: messages that have arrived, in order, bounded per connection, each delivered once.

A sender whose connection broke sends its request again with the same sequence number. The inbox remembers the
sequence numbers of each peer. If a one-way message is repeated, it is dropped. If a request is repeated,

- and has no reply yet, its reply goes over the new connection;
- and its reply was kept (see `replies`), the reply is sent again;
- otherwise it is delivered again: the receiver replies, but must not apply the sequence number twice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.connection import Connection
from polyrhythm.wire.history import KeptReply, SenderHistory
from polyrhythm.wire.incoming import Incoming


class Inbox:
    """The messages of a node from all connections until it receives them.

    A connection with `queue` unreceived messages is paused. `resend` sends a kept reply again.
    """

    def __init__(self, queue: int, resend: Callable[[Channel, KeptReply], None]) -> None:
        self.arrived = 0
        self._resend = resend
        self._queue = queue
        self._messages: deque[Incoming] = deque()
        self._histories: dict[Peer, SenderHistory] = {}
        self._lock = threading.Lock()

    def connect(self, channel: Channel) -> Connection:
        """Adds a connection. A peer that was restarted gets a new history."""
        with self._lock:
            history = self._histories.get(channel.peer)
            if history is None or history.instance != channel.instance:
                known, history = history, SenderHistory(channel.instance, channel.number)
                # Handshakes may complete out of order: this connection may be of the earlier process.
                if known is None or known.first_connection < history.first_connection:
                    self._histories[channel.peer] = history
            return Connection(channel, history)

    def is_new(self, connection: Connection, sequence: int) -> bool:
        """Records a one-way message that is not put into the inbox. False if it is a repetition."""
        with self._lock:
            if sequence in connection.history.seen:
                return False
            connection.history.record(sequence)
            return True

    def put(self, connection: Connection, message: Incoming, confirmed: int = 0) -> bool:
        """Adds a message, which confirms earlier replies (see `Header`).

        False if the connection must be paused until `take` says otherwise.
        """
        history, sequence = connection.history, message.sequence
        with self._lock:
            for memory in history.confirm(confirmed):
                connection.pool.release(memory)
            original = history.unanswered.get(sequence)
            if original is not None:
                before = original._connection
                assert before is not None
                if connection.channel.number > before.channel.number:
                    original._connection = connection
                    if original in self._messages:  # a received message no longer counts
                        before.unreceived -= 1
                        connection.unreceived += 1
                connection.pool.release(message._memory)
                connection.paused = connection.unreceived >= self._queue
                return not connection.paused
            if sequence in history.seen:
                if not message.wants_reply:
                    return True
                if sequence in history.replies:
                    connection.pool.release(message._memory)
                    self._resend(connection.channel, history.replies[sequence])
                    return True
            history.record(sequence)
            message._connection = connection
            if message.wants_reply:
                history.unanswered[sequence] = message
            self.arrived += 1
            message._number = self.arrived
            self._messages.append(message)
            connection.unreceived += 1
            connection.paused = connection.unreceived >= self._queue
            return not connection.paused

    def has(self, kinds: Collection[str]) -> bool:
        """True if there is a message of these kinds (of any, if empty)."""
        messages = self._messages
        if not kinds or not messages:
            return bool(messages)
        with self._lock:
            return any(message.kind in kinds for message in messages)

    def take(
        self, kinds: Collection[str], before: int | None = None
    ) -> tuple[Incoming, Connection | None] | None:
        """Removes the next message of these kinds. Returns it with its connection if that can be resumed."""
        with self._lock:
            for at, message in enumerate(self._messages):
                if before is not None and message._number > before:
                    return None
                if not kinds or message.kind in kinds:
                    del self._messages[at]
                    connection = message._connection
                    assert connection is not None
                    connection.unreceived -= 1
                    resumed = connection.paused and connection.unreceived < self._queue
                    connection.paused = connection.paused and not resumed
                    return message, connection if resumed else None
        return None

    def complete(self, request: Incoming, reply: KeptReply | None) -> Connection:
        """Marks a request as replied to, and keeps the reply if there is one. Returns its connection."""
        with self._lock:
            connection = request._connection
            if connection is None or connection.history.unanswered.pop(request.sequence, None) is None:
                raise UsageError(
                    f"{request.kind!r} from {request.sender} is not a request, or has been replied to"
                )
            if reply is not None:
                connection.history.keep_reply(reply)
            return connection
