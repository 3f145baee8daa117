"""Where strategies that are not ported yet keep what they need for a codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.compress.state import SenderState
from polyrhythm.model.replica import SENT

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


class ReplicaState(SenderState):
    """Keeps the vectors of a sender among the buffers of its replica, where they are saved."""

    def __init__(self, node: Node, replica: Replica) -> None:
        super().__init__(replica.layout, seed=node.seed, worker=node.rank, workers=len(node.members.workers))
        self._replica = replica

    def vector(self, name: str) -> tuple[Tensor, ...]:
        return self._replica.buffer(f"{SENT}{name}", exact=True)
