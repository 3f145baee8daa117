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
    script does with gradients before `optimizer.step()`, such as clipping, it does to the average.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce"))
    allreduce
    """

    name: ClassVar[str] = "allreduce"
    codecs: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    def ready(self, node: Node, replica: Replica) -> None:
        mean(node, self.codec, replica.gradient, replica.present)

    def check(self, workers: int, servers: int) -> None:
        check_summable(self)

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()


def mean(node: Node, codec: Codec | None, vectors: Sequence[Tensor], *flags: Tensor) -> None:
    """Replaces the vectors by their mean over all workers, sent through the codec if there is one.

    The flags are told as they are; above 0 is one that any worker has raised.
    """
    if codec is None:
        node.all_reduce(*vectors, *flags, op="mean")
        return
    coded = _coded(node, codec, vectors)
    node.all_reduce(*coded, *flags, op="sum")
    _decode(codec, coded, vectors)


def begin_mean(node: Node, codec: Codec | None, vectors: Sequence[Tensor]) -> Callable[[], None]:
    """The same, begun and not waited for: whoever calls what it returns waits, and may do so once."""
    if codec is None:
        return node.begin_all_reduce(*vectors, op="mean").join
    coded = _coded(node, codec, vectors)
    task = node.begin_all_reduce(*coded, op="sum")

    def join() -> None:
        task.join()
        _decode(codec, coded, vectors)

    return join


def _coded(node: Node, codec: Codec, vectors: Sequence[Tensor]) -> list[Tensor]:
    # Divided before it is coded, for the sum of short floats overflows sooner than their mean.
    return [codec.encode(part / len(node.workers)) for part in vectors]


def _decode(codec: Codec, coded: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
    for part, code in zip(vectors, coded, strict=True):
        part.copy_(codec.decode(code, part.numel(), part.dtype))


def check_summable(strategy: Strategy) -> None:
    """Raises UsageError if the strategy has to sum what its codec sends, and cannot."""
    if strategy.codec is not None and not strategy.codec.summable:
        raise UsageError(
            f"{strategy}: what {strategy.codec.name} sends cannot be summed; use it with async or sync"
        )
