"""Synchronous data parallelism without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Node
    from polyrhythm.replica import Replica


@dataclass(frozen=True)
class AllReduce(Strategy):
    """All workers average their gradients, then each takes the same step (bulk-synchronous SGD).

    The average is the gradient of the union of the batches. It is taken at the end of `backward()`: what the
    script does with gradients before `optimizer.step()`, such as clipping, it does to the average. What
    backward completes early is exchanged while it goes on, in buckets.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce"))
    allreduce
    """

    name: ClassVar[str] = "allreduce"
    codecs: ClassVar[bool] = True
    overlaps: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        sent = gradient
        if self.codec is not None:
            # Divided before it is coded, for the sum of short floats overflows sooner than their mean.
            sent = tuple(self.codec.encode(part / len(node.workers)) for part in gradient)
        more = (replica.present,) if last else ()  # whose gradients are missing is known by then
        task = node.begin_all_reduce(*sent, *more, op="mean" if self.codec is None else "sum")
        replica.notes.setdefault("parts", []).append((task, gradient, sent))

    def ready(self, node: Node, replica: Replica) -> None:
        for task, gradient, sent in replica.notes.pop("parts"):
            task.join()
            if self.codec is not None:
                for part, code in zip(gradient, sent, strict=True):
                    part.copy_(self.codec.decode(code, part.numel(), part.dtype))

    def check(self, workers: int, servers: int) -> None:
        if self.codec is not None and not self.codec.summable:
            raise UsageError(
                f"{self}: what {self.codec.name} sends cannot be summed; use it with async or sync"
            )

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
