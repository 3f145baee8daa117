"""Settling: how workers wait until all have the same messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.core.events import ReplicaDigest
from polyrhythm.core.held_requests import HeldRequests
from polyrhythm.core.node import others
from polyrhythm.strategies.broadcast.messages import KNOWN, read_known

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, Known
    from polyrhythm.strategies.broadcast.outbox import Outbox


class Settling:
    """A "settle" request gets its reply when this worker has all messages that the request names."""

    def __init__(self, node: Node, log: DeliveryLog, outbox: Outbox) -> None:
        self.node, self.log, self.outbox = node, log, outbox
        self._held = HeldRequests(node)

    def on_settle(self, message: Message) -> bool:
        """Replies to the request, or holds it; True if messages are missing for that."""
        with self.node.lock():
            self._held.add(message)
            lacks = self._lacks(message)
        self.reply()
        return lacks

    def reply(self) -> None:
        """Replies to the requests whose messages are all known by now."""
        with self.node.lock():
            settled = list(self._held.take(lambda message: not self._lacks(message)))
            known = dict(self.log.known)
        for message in settled:
            self.node.reply(message, known=known)

    def forget_dead(self) -> None:
        """Drops the requests of workers that are gone. Called inside `node.lock()`."""
        self._held.forget_dead()

    def settle(self, known: Known) -> dict[Peer, Known]:
        """Waits until all others have these messages; returns what each of them knows."""
        theirs: dict[Peer, Known] = {}
        waiting = set(others(self.node))
        while waiting:
            found, late = self._request_all(waiting, "settle", known=known)
            theirs |= {peer: read_known(reply) for peer, reply in found.items()}
            waiting = late & set(others(self.node))
            if waiting:  # messages may have been lost with a connection
                self.outbox.post(sorted(waiting), KNOWN)
        return theirs

    def settle_all(self) -> None:
        """Waits until all have everything, once no worker sends anything new."""
        while True:
            with self.node.lock():
                mine = dict(self.log.known)
            theirs = self.settle(mine)
            with self.node.lock():
                ahead = [peer for peer in theirs if self.log.lacks(theirs[peer])]
            if not ahead:
                return
            self.outbox.post(ahead, KNOWN)

    def agree(self) -> None:
        """Waits until all have everything, and logs the digest of each worker's counts."""
        self.settle_all()
        self.node.log(ReplicaDigest(str(self.node.me), self.log.digest()))
        for peer, reply in self._request_all(others(self.node), "digest")[0].items():
            self.node.log(ReplicaDigest(str(peer), reply["digest"]))

    def _lacks(self, message: Message) -> bool:
        """True if this worker lacks messages that the request names."""
        return self.log.lacks(read_known(message))

    def _request_all(
        self, peers: Iterable[Peer], kind: str, **fields: Any
    ) -> tuple[dict[Peer, Message], set[Peer]]:
        """Sends a request to several workers; returns the replies, and the living workers that sent none."""
        requests = {peer: self.node.request(peer, kind, **fields) for peer in sorted(peers)}
        replies: dict[Peer, Message] = {}
        late: set[Peer] = set()
        for peer, request in requests.items():
            try:
                replies[peer] = request.wait()
            except PeerLost:
                continue
            except WaitError:
                late.add(peer)
        return replies, late
