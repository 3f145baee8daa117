"""Synchronous data parallelism without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.strategy import Strategy
from polyrhythm.strategies.reduce_ops import begin_part, in_buckets, join_parts, mean_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class AllReduce(Strategy):
    """All workers average their gradients, then each takes the same step (bulk-synchronous SGD).

    The average is the gradient of the union of the batches. It is taken at the end of `backward()`: what the
    script does with gradients before `optimizer.step()`, such as clipping, it does to the average. What
    backward completes early is exchanged while it goes on, in buckets; what a codec makes of it, at its end.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce"))
    allreduce
    """

    name: ClassVar[str] = "allreduce"
    codecs: ClassVar[bool] = True
    inside: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    @property
    def same_state(self) -> bool:
        return True

    @property
    def overlaps(self) -> bool:
        return in_buckets(self.codec)

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        # Whose gradients are missing is known with the last part.
        begin_part(node, replica, self.codec, gradient, *((replica.present,) if last else ()))

    def ready(self, node: Node, replica: Replica) -> None:
        if not join_parts(replica):
            mean_gradient(node, replica, self.codec, replica.present)

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
