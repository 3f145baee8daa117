"""The reply side of requests: sends replies, keeps those that may be lost, and sends them again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from polyrhythm.core.errors import WaitError
from polyrhythm.wire.buffers import Buffer, copy, is_inside, parts_of, shapes
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header, Part
from polyrhythm.wire.headers import REFUSED, REJECTED, HeaderFactory
from polyrhythm.wire.history import KeptReply
from polyrhythm.wire.inbox import Inbox
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.requests import wait_report
from polyrhythm.wire.threads import ThreadGroup


class Replies:
    """Replies to the requests of peers.

    A lost reply is not an error here: the peer sees its connection break and sends the request again. A kept
    reply is then sent again from the history of the peer (see `history`). Replies without inline tensors are
    kept, and those computed in the memory of the request, as in an all-reduce. Other tensors would have to be
    copied, so their request is delivered again.
    """

    def __init__(self, options: TransportOptions, headers: HeaderFactory, threads: ThreadGroup) -> None:
        self.inbox = Inbox(options.queue, self._send_in_background)
        self._headers, self._threads = headers, threads
        self._arenas, self._wait = options.arenas, options.wait

    def reply(self, to: Incoming, buffers: Sequence[Buffer], fields: dict[str, Any]) -> bool:
        """Replies to a request: straight into the memory that it offered, if that fits, else inline.

        True if the reply is kept until it has arrived.
        """
        parts, views = parts_of(buffers), [buffer.view for buffer in buffers]
        if to._into and self._arenas and shapes(parts) == shapes(to._into):
            for target, view, buffer in zip(to._into, views, buffers, strict=True):
                if (target.arena, target.offset) == (buffer.arena, buffer.offset):
                    continue  # the reply was computed in place
                copy(self._arenas.view(target.arena)[target.offset : target.offset + target.nbytes], view)
            parts, views = to._into, []
        return self._send(to, to.kind, fields, parts, views)

    def refuse(self, to: Incoming, error: str) -> None:
        """Replies to a request with an error for the user."""
        self._send(to, REFUSED, {"error": error})

    def reject(self, channel: Channel, request: Header, error: str) -> None:
        """Replies to an invalid request, which has not been delivered."""
        header = self._headers.reply(REJECTED, request.sequence, {"error": error})
        self._send_in_background(channel, KeptReply(header))

    def _send(
        self,
        to: Incoming,
        kind: str,
        fields: dict[str, Any],
        parts: Sequence[Part] = (),
        views: Sequence[memoryview] = (),
    ) -> bool:
        header = self._headers.reply(kind, to.sequence, fields, parts)
        lent = to._memory if views else None  # until the reply is confirmed
        keep = all(is_inside(view, lent) for view in views)
        connection = self.inbox.complete(to, KeptReply(header, views, lent) if keep else None)
        try:
            connection.channel.send(header, views)
        except BlockingIOError:
            what = f"to receive the reply to {to.kind!r}"
            raise WaitError(wait_report(self._headers.me, self._wait, to.sender, what)) from None
        except OSError:
            pass  # the peer notices too and sends its request again
        if not keep or lent is None:
            connection.pool.release(to._memory)
        to._memory = None
        return keep

    def _send_in_background(self, channel: Channel, reply: KeptReply) -> None:
        """Sends from another thread: the thread that reads may be in the middle of sending a message."""

        def send() -> None:
            with contextlib.suppress(OSError):
                channel.send(reply.header, reply.views)

        self._threads.spawn(send)
