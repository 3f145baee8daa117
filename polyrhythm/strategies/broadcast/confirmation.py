"""Confirmations: which messages all workers have, so that they need not be kept any longer."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from polyrhythm.strategies.broadcast.messages import read_known

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, Known
    from polyrhythm.strategies.broadcast.topology import BroadcastTopology

EVERY = 8  # messages from each neighbor, on average, between two confirmations


class Confirmations:
    """From time to time each worker tells each neighbor what all workers on its side of the edge have.

    Messages that all workers on both sides of all edges have are dropped from the log.
    """

    def __init__(self, node: Node, log: DeliveryLog, topology: BroadcastTopology) -> None:
        self.node, self.log, self.topology = node, log, topology
        self._sides: dict[Peer, Known] = {}  # what all workers on the other side of each edge have
        self._new = 0  # messages since the last confirmation,
        self._new_by_origin: Known = {}

    def due(self, origin: str, count: int) -> bool:
        """Counts new messages of an origin; True if it is time to confirm them."""
        self._new += count
        self._new_by_origin[origin] = self._new_by_origin.get(origin, 0) + count
        # Where few train, or one is much faster, its messages are confirmed before it holds updates back.
        if self._new < EVERY * len(self.topology.neighbors) and self._new_by_origin[origin] < 2 * EVERY:
            return False
        self._new = 0
        self._new_by_origin.clear()
        return True

    def side(self, peer: Peer) -> Known:
        """What all workers on this side of the edge to a neighbor have; in a mesh that is this worker."""
        known = dict(self.log.known)
        if not self.topology.forwards:
            return known
        sides = [self._sides.get(each, {}) for each in self.topology.neighbors if each != peer]
        return {origin: _least(number, sides, origin) for origin, number in known.items()}

    def on_confirm(self, message: Message) -> None:
        """Drops the messages that all workers have by now."""
        neighbors = self.topology.neighbors
        if message.fields.get("workers") != self.topology.ranks or message.sender not in neighbors:
            return  # one of the two does not know yet who joined or left: the sides are not the same
        with self.node.lock():
            self._sides[message.sender] = read_known(message)
            sides = [self._sides.get(peer, {}) for peer in neighbors]
            for origin, number in self.log.known.items():
                self.log.drop(origin, _least(number, sides, origin))

    def forget(self) -> None:
        """Workers joined or left: the edges have other sides now."""
        self._sides.clear()


def _least(number: int, sides: Iterable[Known], origin: str) -> int:
    """The last message of an origin that all sides have, up to this number."""
    return min(number, sys.maxsize, *(side.get(origin, 0) for side in sides))
