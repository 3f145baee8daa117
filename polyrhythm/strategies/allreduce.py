"""Synchronous data parallelism without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Node
    from polyrhythm.replica import Replica
    from polyrhythm.strategy import Codec


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
        # Whose gradients are missing is known with the last part.
        begin_part(node, replica, self.codec, gradient, *((replica.present,) if last else ()))

    def ready(self, node: Node, replica: Replica) -> None:
        join_parts(replica)

    def check(self, workers: int, servers: int) -> None:
        check_summable(self)

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()


def mean(node: Node, codec: Codec | None, vectors: Sequence[Tensor], *flags: Tensor) -> None:
    """Replaces the vectors by their mean over all workers, sent through the codec if there is one.

    The flags are told as they are; above 0 is one that any worker has raised.
    """
    if codec is None:
        return node.all_reduce(*vectors, *flags, op="mean")
    begin_mean(node, codec, vectors, *flags)()


def begin_mean(
    node: Node, codec: Codec | None, vectors: Sequence[Tensor], *flags: Tensor
) -> Callable[[], None]:
    """The same, begun and not waited for: whoever calls what it returns waits, and may do so once."""
    if codec is None:
        return node.begin_all_reduce(*vectors, *flags, op="mean").join
    # Divided before it is coded, for the sum of short floats overflows sooner than their mean.
    coded = [codec.encode(part / len(node.workers)) for part in vectors]
    task = node.begin_all_reduce(*coded, *flags, op="sum")

    def join() -> None:
        task.join()
        for part, code in zip(vectors, coded, strict=True):
            part.copy_(codec.decode(code, part.numel(), part.dtype))

    return join


def begin_part(
    node: Node, replica: Replica, codec: Codec | None, gradient: Sequence[Tensor], *flags: Tensor
) -> None:
    """Begins the mean of a part of the gradient, which `join_parts` waits for."""
    replica.notes.setdefault("parts", []).append(begin_mean(node, codec, gradient, *flags))


def join_parts(replica: Replica) -> bool:
    """Waits for all parts of the gradient; False if there are none."""
    parts = replica.notes.pop("parts", [])
    for join in parts:
        join()
    return bool(parts)


def numbers(*values: float) -> Tensor:
    """A few numbers in 64 bits, to send."""
    import torch

    return torch.tensor(values, dtype=torch.float64)


def agree(node: Node, *values: float, op: str) -> list[float]:
    """The sum, max or min of each of a few numbers over all workers."""
    mine = numbers(*values)
    node.all_reduce(mine, op=op)
    return mine.tolist()


def check_summable(strategy: Strategy) -> None:
    """Raises UsageError if the strategy has to sum what its codec sends, and cannot."""
    if strategy.codec is not None and not strategy.codec.summable:
        raise UsageError(
            f"{strategy}: what {strategy.codec.name} sends cannot be summed; use it with async or sync"
        )
