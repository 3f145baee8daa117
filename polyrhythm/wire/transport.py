"""Transport: sends and receives the messages of one node, whatever happens to its connections.

- `send` is one-way. Tensors are copied: to shared memory within a host (see `lending`), else inline; the call
  returns when the operating system has the bytes.
- `request` lends its tensors until `reply` arrives. Within a host, tensors in shared memory are sent by
  reference, and the reply is written straight into the memory that the request offers as `into`. Between
  hosts bytes are sent inline and received straight into place.
- `refuse` replies to a request with an error, which the `wait` of the requester raises.

If a connection breaks, the node reconnects and sends each request without a reply again with its old sequence
number, by which the receiver recognizes it (see `inbox`), until the peer is declared `lost` or the wait times
out. A connection with too many unreceived messages is paused, which blocks its sender.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from polyrhythm.core.errors import PeerLost, UsageError, WaitError
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.wire.buffers import Buffer, parts_of
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.connection import Connection
from polyrhythm.wire.dispatch import Dispatcher
from polyrhythm.wire.frame import Header
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.headers import DISCONNECTED, HeaderFactory
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.lending import Lender
from polyrhythm.wire.links import Links
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.poller import Poller
from polyrhythm.wire.receive_targets import ReceiveTarget, ReceiveTargets
from polyrhythm.wire.receiver import Receiver
from polyrhythm.wire.replies import Replies
from polyrhythm.wire.requests import Pending, Requests, wait_report
from polyrhythm.wire.sender import ReliableSender
from polyrhythm.wire.threads import ThreadGroup
from polyrhythm.wire.traffic import Traffic


class Transport:
    """The messages of one node. Every method may be called from any thread."""

    def __init__(self, me: Peer, key: bytes, options: TransportOptions | None = None) -> None:
        if len(key) != 32:
            raise UsageError(f"the key of a run has 32 bytes, not {len(key)}")
        options = options or TransportOptions()
        self.me, self.wait, self.host = me, options.wait, options.host_id
        self.traffic = Traffic()
        self.wake_count = 0  # calls of `wake` so far
        self._options = options
        identity = Identity(me, self.host, os.urandom(16))
        identity.check()
        self._threads = ThreadGroup(str(me))
        self._poller = Poller(str(me))
        self._headers = HeaderFactory(me, options.incarnation)
        self._requests = Requests(me, self._poller, options.wait)
        self._replies = Replies(options, self._headers, self._threads)
        self._inbox = self._replies.inbox
        self._targets = ReceiveTargets(options.arenas)
        self._lender = (
            None if options.arenas is None or options.arena < 0 else Lender(options.arenas, options.arena)
        )
        self._dispatcher = Dispatcher(
            self._headers, self._requests, self._replies, self._targets, options.on_error
        )
        self._receiver = Receiver(me, self._poller, self._dispatcher, self._threads, self._disconnected)
        try:
            self._links = Links(identity, key, options, self._threads, self._connected)
        except BaseException:
            self._poller.close()
            raise
        self._sender = ReliableSender(self._links, self._requests, self._threads)
        self.address = self._links.address
        self._links.start()

    @property
    def layout(self) -> str:
        """The layout of this node's model, which messages must match (see `frame.same_layout`)."""
        return self._headers.layout

    @layout.setter
    def layout(self, layout: str) -> None:
        self._headers.layout = layout

    @property
    def handlers(self) -> dict[str, Callable[[Incoming], None]]:
        """Functions by kind of one-way message. The thread that reads calls them, instead of `receive`."""
        return self._dispatcher.handlers

    @property
    def closed(self) -> bool:
        """True once `close` has been called."""
        return self._threads.closing.is_set()

    @property
    def arrived(self) -> int:
        """How many messages have been put into the inbox so far."""
        return self._inbox.arrived

    def introduce(self, peer: Peer, address: str) -> None:
        """Sets the address of a peer. A lost peer counts as found again."""
        link = self._links[peer]
        link.address, link.lost = address, None

    def send(
        self,
        to: Peer,
        kind: str,
        buffers: Sequence[Buffer] = (),
        fields: dict[str, Any] | None = None,
        retry: bool = True,
    ) -> None:
        """Sends a one-way message. The buffers may be overwritten when this returns.

        Without `retry` a peer that cannot be reached at once counts as lost.
        """
        header = self._headers.message(kind, fields, parts_of(buffers))
        with self.traffic.counting(to, buffers):
            self._sender.deliver(to, kind, lambda channel: self._send(channel, header, buffers), retry)

    def _send(self, channel: Channel, header: Header, buffers: Sequence[Buffer]) -> None:
        if not channel.bounds.arenas:
            header.parts = parts_of(buffers)
        elif self._lender is not None and header.inline:  # and not lent before a connection broke
            header.parts = self._lender.lend(header.sequence, buffers) or header.parts
        inline = zip(buffers, header.parts, strict=True)
        channel.send(header, [buffer.view for buffer, part in inline if part.arena < 0])

    def request(
        self,
        to: Peer,
        kind: str,
        buffers: Sequence[Buffer] = (),
        into: Sequence[Buffer] = (),
        fields: dict[str, Any] | None = None,
    ) -> Pending:
        """Sends a request. `buffers` and `into` are lent until the reply arrives."""
        header = self._headers.message(kind, fields, wants_reply=True)
        pending = self._requests.add(to, header, buffers, into)
        try:
            with self.traffic.counting(to, buffers):
                self._sender.send_request(pending)
        except BaseException:
            self._requests.forget(pending)
            raise
        return pending

    def reply(
        self, to: Incoming, buffers: Sequence[Buffer] = (), fields: dict[str, Any] | None = None
    ) -> bool:
        """Replies to a request. Its buffers must not be used afterwards.

        True if the reply is in the peer's memory already: if the message is lost, it is sent again.
        """
        with self.traffic.counting(to.sender, buffers):
            return self._replies.reply(to, buffers, fields or {})

    def refuse(self, to: Incoming, error: str) -> None:
        """Replies to a request with an error for the user."""
        self._replies.refuse(to, error)

    def expect(self, sender: Peer, kind: str, buffers: Sequence[Buffer]) -> Callable[[], None]:
        """Registers buffers that the next request of this kind is received into, if its tensors fit.

        Returns a function that undoes this: after it returns nothing is written to the buffers.
        """
        target = ReceiveTarget(sender, kind, buffers)
        self._targets.add(target)

        def withdraw() -> None:
            self._targets.remove(target)
            if target.channel is not None and not target.done:  # the request was repeated, or came too late
                target.channel.close()
                self._poller.wait(lambda: target.done, self.wait)

        return withdraw

    def receive(
        self,
        kinds: Collection[str] = (),
        timeout: float | None = None,
        wake_count: int | None = None,
        before: int | None = None,
    ) -> Incoming | None:
        """Returns the next message of these kinds (of any, if empty); None on timeout or `wake`.

        `wake_count` is the value of that attribute when the caller last looked, if not now. With `before`
        only the first `before` messages that `arrived` are considered.
        """
        began, known_wakes = time.monotonic(), self.wake_count if wake_count is None else wake_count
        deadline = began + (self.wait if timeout is None else timeout)
        closing = self._threads.closing.is_set
        while (taken := self._inbox.take(kinds, before)) is None:
            left = deadline - time.monotonic()
            if closing() or (left <= 0 and timeout is None):
                what = "to send " + (" or ".join(map(repr, sorted(kinds))) or "anything")
                why = f"{self.me} is closed" if closing() else ""
                raise WaitError(wait_report(self.me, time.monotonic() - began, "anyone", what, why))
            if known_wakes != self.wake_count or left <= 0:
                return None
            self._poller.wait(
                lambda: self._inbox.has(kinds) or known_wakes != self.wake_count or closing(), left
            )
        message, resumed = taken
        if resumed is not None:
            self._poller.resume(resumed.channel)
        return message

    def wake(self) -> None:
        """Makes every `receive` that waits return None."""
        self.wake_count += 1
        self._poller.notify()

    def lost(self, peer: Peer, reason: str) -> None:
        """Ends all waits for a peer that is gone. What it sent before, replies included, still arrives."""
        link = self._links[peer]
        link.lost = reason
        if link.channel is None or link.channel.broken:
            self._requests.fail(PeerLost, f"{peer} is gone: {reason}", peer)
        else:
            self._links.close_later(link.channel)  # the remaining requests fail when it is read to its end
        self._poller.notify()

    def abandon(self) -> None:
        """Ends all waits for replies, except those of the coordinator. Later requests are sent as always."""
        for peer in self._requests.peers() - {COORDINATOR}:
            self._requests.fail(PeerLost, "the run has failed", peer)

    def close(self) -> None:
        """Ends all threads and connections. May be called again."""
        if self.closed:
            return
        self._threads.closing.set()
        self._requests.fail(WaitError, f"{self.me} is closed")
        self._poller.notify()
        self._links.close()
        self._poller.close()

    def _connected(self, channel: Channel) -> None:
        channel.wait_writable = self._poller.wait_writable
        self.traffic.open(channel)
        self._receiver.add(self._inbox.connect(channel))

    def _disconnected(self, connection: Connection, malformed: str) -> None:
        """Resends the requests of a connection that has ended."""
        channel = connection.channel
        if malformed:
            self._options.on_error(malformed)
        unanswered = self._requests.detach(channel)
        self.traffic.close(channel)
        if channel.peer.role == self._options.watched_role:
            self._inbox.put(connection, Incoming(channel.peer, DISCONNECTED, -1, False, {}, []))
            self._poller.notify()
        self._sender.resend(unanswered, malformed)
