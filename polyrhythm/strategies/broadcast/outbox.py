"""Outbox: sends messages beside the script, so that neither a step nor a message handler waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import WaitError
from polyrhythm.strategies.broadcast.messages import KNOWN, Outgoing

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer

Composed = tuple[Sequence["Tensor"], dict[str, Any]]  # the tensors and fields of a message


class Outbox:
    """The messages that wait for each peer, in order.

    `compose` makes a message when its turn comes, inside `node.lock()`, so it says what is known then. It
    returns None for pulses that are no longer kept. The peer is told what this worker knows instead, and
    requests what it lacks.
    """

    def __init__(self, node: Node, compose: Callable[[Peer, Outgoing], Composed | None]) -> None:
        self.node, self._compose = node, compose
        self.queues: dict[Peer, deque[Outgoing]] = {}
        self._sending: set[Peer] = set()  # a task sends to these

    def post(self, to: Iterable[Peer], *items: Outgoing) -> None:
        """Queues messages for some peers. All but pulses wait once at most: they would say the same."""
        for peer in to:
            with self.node.lock():
                queue = self.queues.setdefault(peer, deque())
                queue.extend(item for item in items if item.kind == "pulses" or item not in queue)
                idle = peer not in self._sending
                self._sending.add(peer)
            if idle:
                self.node.spawn(self._send_all, peer)

    def waiting(self, peer: Peer) -> set[Outgoing]:
        """The messages that wait for a peer."""
        return {*self.queues.get(peer, ())}

    def first_waiting(self, origin: str) -> list[int]:
        """The number of the first pulses of an origin in each queue that holds some."""
        firsts = (
            next((item.number for item in queue if (item.kind, item.origin) == ("pulses", origin)), 0)
            for queue in self.queues.values()
        )
        return [number for number in firsts if number]

    def rename(self, renamed: Callable[[Outgoing], Outgoing]) -> None:
        """Replaces waiting messages after some were merged; those that became equal wait once."""
        for peer, queue in self.queues.items():
            self.queues[peer] = deque(dict.fromkeys(renamed(item) for item in queue))

    def _send_all(self, peer: Peer) -> None:
        while True:
            with self.node.lock():
                if not self.queues[peer]:
                    self._sending.discard(peer)
                    return
                item = self.queues[peer].popleft()
                composed = self._compose(peer, item)
            if composed is None:
                self.post([peer], KNOWN)
                continue
            tensors, fields = composed
            try:
                self.node.send(peer, item.kind, *tensors, **fields)
            except WaitError:  # the peer is gone
                continue
