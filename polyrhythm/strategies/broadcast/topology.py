"""BroadcastTopology: the workers that one worker sends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


class BroadcastTopology:
    """A mesh, or a tree of the workers that are present, in which each one forwards to up to `fanout`."""

    def __init__(self, node: Node, fanout: int | None) -> None:
        self.node, self.fanout = node, fanout

    @property
    def forwards(self) -> bool:
        """True in a tree: workers pass messages on. In a mesh every worker sends to all others."""
        return self.fanout is not None

    @property
    def everyone(self) -> list[Peer]:
        """All workers. A replacement may not be among those that it was told of, so it adds itself."""
        return sorted({self.node.me, *self.node.members.workers})

    @property
    def ranks(self) -> list[int]:
        return [peer.rank for peer in self.everyone]

    @property
    def neighbors(self) -> list[Peer]:
        """The workers that this one sends to."""
        everyone, me, fanout = self.everyone, self.node.me, self.fanout
        if fanout is None:
            return [peer for peer in everyone if peer != me]
        mine = everyone.index(me)
        places = [(mine - 1) // fanout] if mine else []
        places += range(fanout * mine + 1, min(fanout * mine + fanout + 1, len(everyone)))
        return [everyone[place] for place in places]
