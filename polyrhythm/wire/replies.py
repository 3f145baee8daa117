"""The reply side of requests: sends replies, keeps those that may be lost, and sends them again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from polyrhythm.core.errors import WaitError
from polyrhythm.wire.buffers import Buffer, copy, parts_of, shapes
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header, Part
from polyrhythm.wire.headers import REFUSED, REJECTED, HeaderFactory
from polyrhythm.wire.inbox import Inbox
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.requests import wait_report
from polyrhythm.wire.threads import ThreadGroup


class Replies:
    """Replies to the requests of peers.

    A lost reply is not an error here: the peer sees its connection break and sends the request again. A reply
    without inline tensors is then sent again from the history of the peer (see `history`). A reply with
    tensors is not kept, and the request is delivered again.
    """

    def __init__(self, options: TransportOptions, headers: HeaderFactory, threads: ThreadGroup) -> None:
        self.inbox = Inbox(options.queue, self._send_in_background)
        self._headers, self._threads = headers, threads
        self._arenas, self._wait = options.arenas, options.wait

    def reply(self, to: Incoming, buffers: Sequence[Buffer], fields: dict[str, Any]) -> bool:
        """Replies to a request: straight into the memory that it offered, if that fits, else inline.

        True if nothing is inline: then the reply is kept until it has arrived.
        """
        parts, views = parts_of(buffers), [buffer.view for buffer in buffers]
        if to._into and self._arenas and shapes(parts) == shapes(to._into):
            for target, view, buffer in zip(to._into, views, buffers, strict=True):
                if (target.arena, target.offset) == (buffer.arena, buffer.offset):
                    continue  # the reply was computed in place
                copy(self._arenas.view(target.arena)[target.offset : target.offset + target.nbytes], view)
            parts, views = to._into, []
        self._send(to, to.kind, fields, parts, views)
        return not views

    def refuse(self, to: Incoming, error: str) -> None:
        """Replies to a request with an error for the user."""
        self._send(to, REFUSED, {"error": error})

    def reject(self, channel: Channel, request: Header, error: str) -> None:
        """Replies to an invalid request, which has not been delivered."""
        self._send_in_background(channel, self._headers.reply(REJECTED, request.sequence, {"error": error}))

    def _send(
        self,
        to: Incoming,
        kind: str,
        fields: dict[str, Any],
        parts: Sequence[Part] = (),
        views: Sequence[memoryview] = (),
    ) -> None:
        header = self._headers.reply(kind, to.sequence, fields, parts)
        connection = self.inbox.complete(to, header, keep=not views)
        try:
            connection.channel.send(header, views)
        except BlockingIOError:
            what = f"to receive the reply to {to.kind!r}"
            raise WaitError(wait_report(self._headers.me, self._wait, to.sender, what)) from None
        except OSError:
            pass  # the peer notices too and sends its request again
        connection.pool.release(to._memory)
        to._memory = None

    def _send_in_background(self, channel: Channel, header: Header) -> None:
        """Sends from another thread: the thread that reads may be in the middle of sending a message."""

        def send() -> None:
            with contextlib.suppress(OSError):
                channel.send(header)

        self._threads.spawn(send)
