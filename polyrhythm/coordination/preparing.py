"""Preparing: the nodes that have built their models and wait for the others. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import PreparedReply


class Preparing:
    """Their pending replies, and what the scripts of workers have seeded. Worker 0 decides for all."""

    def __init__(self) -> None:
        self._waiting: ReplyBarrier[PreparedReply] = ReplyBarrier()
        self._seeds: dict[Peer, int | None] = {}

    def add(self, peer: Peer, seed: int | None, respond: Callable[[PreparedReply], None]) -> None:
        """A node has built its model. The seed of a worker's replacement does not count."""
        self._waiting.add(peer, respond)
        if peer.role == "worker":
            self._seeds.setdefault(peer, seed)

    def release(self) -> None:
        """Replies to all waiting nodes."""
        reply = PreparedReply(self._seeds.get(Peer("worker", 0)), len({*self._seeds.values()}) > 1)
        self._waiting.release_all(lambda peer: reply)
