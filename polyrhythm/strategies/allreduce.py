"""Synchronous data parallelism without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from polyrhythm.node import Node
    from polyrhythm.replica import Replica


@dataclass(frozen=True)
class AllReduce(Strategy):
    """All workers average their gradients, then each takes the same step (bulk-synchronous SGD).

    The average is weighted by the number of samples, G = sum(n_i g_i) / sum(n_i), so it is the gradient of
    the union of the batches. It is taken at the end of `backward()`: what the script does with gradients
    before `optimizer.step()`, such as clipping, it does to the average.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce"))
    allreduce
    """

    name: ClassVar[str] = "allreduce"
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    def ready(self, node: Node, replica: Replica) -> None:
        node.all_reduce(*replica.gradient, replica.present, op="mean", weight=replica.weigh())

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
