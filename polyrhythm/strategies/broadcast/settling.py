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
    """A "settle" request is answered when this worker has all messages that the request names."""

    def __init__(self, node: Node, log: DeliveryLog, outbox: Outbox) -> None:
        self.node, self.log, self.outbox = node, log, outbox
        self._held = HeldRequests(node)

    def on_settle(self, message: Message) -> bool:
        """Answers the request, or holds it; True if messages are missing for that."""
        with self.node.lock():
            self._held.add(message)
            lacks = self._lacks(message)
        self.answer()
        return lacks

    def answer(self) -> None:
        """Answers the requests that can be answered by now."""
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
        answers: dict[Peer, Known] = {}
        asked = set(others(self.node))
        while asked:
            found, late = self._ask_all(asked, "settle", known=known)
            answers |= {peer: read_known(answer) for peer, answer in found.items()}
            asked = late & set(others(self.node))
            if asked:  # messages may have been lost with a connection
                self.outbox.post(sorted(asked), KNOWN)
        return answers

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
        for peer, answer in self._ask_all(others(self.node), "digest")[0].items():
            self.node.log(ReplicaDigest(str(peer), answer["digest"]))

    def _lacks(self, message: Message) -> bool:
        """True if this worker lacks messages that the request names."""
        return self.log.lacks(read_known(message))

    def _ask_all(
        self, peers: Iterable[Peer], kind: str, **fields: Any
    ) -> tuple[dict[Peer, Message], set[Peer]]:
        """Asks several workers at once; returns their answers, and the living workers that did not answer."""
        asked = {peer: self.node.request(peer, kind, **fields) for peer in sorted(peers)}
        answers: dict[Peer, Message] = {}
        late: set[Peer] = set()
        for peer, reply in asked.items():
            try:
                answers[peer] = reply.wait()
            except PeerLost:
                continue
            except WaitError:
                late.add(peer)
        return answers, late
