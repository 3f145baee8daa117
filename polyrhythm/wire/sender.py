"""ReliableSender: sends messages to peers although connections break."""

from __future__ import annotations

import time
from collections.abc import Callable

from polyrhythm.core.errors import PeerLost, PolyrhythmError, WaitError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.buffers import parts_of
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.links import Links
from polyrhythm.wire.requests import Pending, Requests, wait_report
from polyrhythm.wire.threads import ThreadGroup

_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.2  # seconds between two attempts


class ReliableSender:
    """Retries until a message is sent, its peer is lost, or the time is over; resends unanswered requests."""

    def __init__(self, links: Links, requests: Requests, threads: ThreadGroup) -> None:
        self._links, self._requests, self._threads = links, requests, threads

    def deliver(self, to: Peer, kind: str, send: Callable[[Channel], None], retry: bool = True) -> None:
        """Calls `send` with a connection to a peer, and again with a new one whenever that breaks."""
        me, wait, closing = self._requests.me, self._requests.wait, self._threads.closing
        link = self._links[to]
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            why = ""
            try:
                channel = self._links.channel(link)
                try:
                    return send(channel)
                except BlockingIOError:
                    why = f"{to} does not receive"
            except OSError as error:
                if time.monotonic() - began > wait:
                    why = str(error)
            seconds, what = time.monotonic() - began, f"to receive {kind!r}"
            if link.lost is not None or not retry:
                why = f"{to} is gone: {link.lost or 'its connection broke'}"
                raise PeerLost(wait_report(me, seconds, to, what, why))
            if closing.is_set():
                why = f"{me} is closed"
            if why:
                raise WaitError(wait_report(me, seconds, to, what, why))
            closing.wait(pause)
            pause = min(pause * 2, _LAST_PAUSE)

    def send_request(self, pending: Pending) -> None:
        """Sends a request, for the first time or again. No other thread may send it at the same time."""

        def send(channel: Channel) -> None:
            shared = channel.bounds.arenas > 0
            header = pending.header
            header.parts = parts_of(pending.buffers, shared)
            offered = parts_of(pending.into, shared)
            # The reply is written to shared memory completely or not at all.
            header.into = pending.offered = offered if all(part.arena >= 0 for part in offered) else []
            header.confirmed = self._requests.first_unanswered(pending.to)
            inline = zip(pending.buffers, header.parts, strict=True)
            channel.send(header, [buffer.view for buffer, part in inline if part.arena < 0])
            self._requests.sent(pending, channel)

        self.deliver(pending.to, pending.header.kind, send)

    def resend(self, unanswered: list[Pending], malformed: str) -> None:
        """Sends requests again after their connection ended, in a thread because connecting takes time.

        If the connection ended because the peer sent a `malformed` message, the requests fail instead: the
        peer would send the same bytes again.
        """
        if unanswered:
            self._threads.spawn(self._resend_all, unanswered, malformed)

    def _resend_all(self, unanswered: list[Pending], malformed: str) -> None:
        for pending in unanswered:
            self._resend_one(pending, malformed)

    def _resend_one(self, pending: Pending, malformed: str) -> None:
        lost = self._links[pending.to].lost
        error: PolyrhythmError
        if malformed:
            error = WireError(malformed)
        elif lost is not None:
            why = f"{pending.to} is gone: {lost}"
            return self._requests.complete(
                pending, failure=lambda seconds: PeerLost(pending.report(seconds, why))
            )
        else:
            try:
                return self.send_request(pending)
            except PolyrhythmError as failure:
                error = failure
        self._requests.complete(pending, failure=lambda _: error)
