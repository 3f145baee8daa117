"""Synchronous data parallelism without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from polyrhythm.node import Node
    from polyrhythm.replica import Replica


@dataclass(frozen=True)
class AllReduce(Strategy):
    """All workers average their gradients, then each takes the same step (bulk-synchronous SGD).

    The average is the gradient of the union of the batches. It is taken at the end of `backward()`: what the
    script does with gradients before `optimizer.step()`, such as clipping, it does to the average.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce"))
    allreduce
    """

    name: ClassVar[str] = "allreduce"
    codecs: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    def ready(self, node: Node, replica: Replica) -> None:
        if self.codec is None:
            node.all_reduce(*replica.gradient, replica.present, op="mean")
            return
        # Divided before it is coded, for the sum of short floats overflows sooner than their mean.
        coded = [self.codec.encode(part / len(node.workers)) for part in replica.gradient]
        node.all_reduce(*coded, replica.present, op="sum")
        for part, code in zip(replica.gradient, coded, strict=True):
            part.copy_(self.codec.decode(code, part.numel(), part.dtype))

    def check(self, workers: int, servers: int) -> None:
        if self.codec is not None and not self.codec.summable:
            raise UsageError(
                f"{self}: what {self.codec.name} sends cannot be summed; use it with async or sync"
            )

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
