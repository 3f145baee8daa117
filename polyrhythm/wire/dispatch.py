"""Dispatcher: hands each incoming message to the request, handler or inbox that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Generator

from polyrhythm.core.errors import PolyrhythmError, WireError
from polyrhythm.wire.buffers import parts_of, shapes
from polyrhythm.wire.connection import Connection
from polyrhythm.wire.frame import Header, same_layout
from polyrhythm.wire.headers import REFUSED, REJECTED, HeaderFactory
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.receive_targets import ReceiveTargets, Repeated, discard
from polyrhythm.wire.replies import Replies
from polyrhythm.wire.requests import Requests

# Yields the memory to fill with the tensors of a message, then handles the message. Returns False if the
# connection must be paused.
Dispatch = Generator[memoryview, None, bool]


class Dispatcher:
    """Handles the incoming messages of a node.

    `handlers` are called with one-way messages of their kinds by the thread that reads. Such messages are not
    put into the inbox.
    """

    def __init__(
        self,
        headers: HeaderFactory,
        requests: Requests,
        replies: Replies,
        targets: ReceiveTargets,
        on_error: Callable[[str], None],
    ) -> None:
        self.handlers: dict[str, Callable[[Incoming], None]] = {}
        self._headers, self._requests, self._replies = headers, requests, replies
        self._inbox, self._targets, self._on_error = replies.inbox, targets, on_error

    def dispatch(self, connection: Connection, header: Header) -> Dispatch:
        """Receives and handles the message with this header."""
        return self._reply(connection, header) if header.reply_to else self._message(connection, header)

    def _message(self, connection: Connection, header: Header) -> Dispatch:
        channel, kind = connection.channel, header.kind
        if not same_layout(header.layout, self._headers.layout):
            yield from discard(header)
            theirs = f"{channel.peer} sent {kind!r} for layout {header.layout}"
            ours = f"{self._headers.me} has {self._headers.layout}"
            error = f"{theirs}, {ours}: all nodes must build the same model"
            if header.wants_reply:
                self._replies.reject(channel, header, error)
            self._on_error(error)
            return True
        try:
            buffers, memory = yield from self._targets.receive(channel, header, connection.pool)
        except Repeated:
            return True
        message = Incoming(channel.peer, kind, header.sequence, header.wants_reply, header.fields, buffers)
        message._into, message._memory = header.into, memory
        if kind in self.handlers and not header.wants_reply:
            if self._inbox.is_new(connection, header.sequence):
                self.handlers[kind](message)
            return True
        return self._inbox.put(connection, message, header.confirmed)

    def _reply(self, connection: Connection, header: Header) -> Dispatch:
        channel = connection.channel
        pending = self._requests.match(channel, header.reply_to)
        if pending is None:
            yield from discard(header)
            return True
        got, wanted = shapes(header.parts), shapes(parts_of(pending.into))
        buffers = list(pending.into)
        error: PolyrhythmError | None = None
        if header.kind in (REFUSED, REJECTED):
            failed = WireError if header.kind == REJECTED else PolyrhythmError
            error = failed(str(header.fields.get("error")))
        elif header.parts and header.parts == pending.offered:
            pass  # the peer has written the reply to shared memory
        elif any(part.arena >= 0 for part in header.parts) or (got and wanted and got != wanted):
            error = WireError(f"{channel.peer} replied to {header.kind!r} with {got}, not with {wanted}")
        elif got and wanted:
            for buffer in buffers:
                yield buffer.view
        else:
            buffers, _ = yield from self._targets.receive(channel, header, connection.pool)
        if error is not None:
            yield from discard(header)
            self._requests.complete(pending, failure=lambda _: error)
            return True
        reply = Incoming(channel.peer, header.kind, header.sequence, False, header.fields, buffers)
        self._requests.complete(pending, reply)
        return True
