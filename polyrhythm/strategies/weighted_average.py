"""Parameter averaging, weighted by the examples of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.strategy import Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.strategies.reduce_ops import agree
from polyrhythm.strategies.rounds import Averaging, AveragingWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Average(Averaging):
    r"""Workers train on their own share; every `period` steps they average, weighted by examples.

    A worker that has seen more examples counts more, so uneven shares of the data are no problem.

    $$
    w_i &\leftarrow w_i - \eta g_i(w_i) && \text{in every step} \\
    w_i &\leftarrow \frac{\sum_j n_j w_j}{\sum_j n_j} && \text{in every } H\text{-th step}
    $$

    Here $n_j$ counts the examples that worker $j$ trained on since the last average.

    >>> import polyrhythm as pr
    >>> pr.parse("average:5").traits.weighted_by_examples
    True
    """

    name: ClassVar[str] = "average"
    paper: ClassVar[str] = (
        "McDonald, Hall, Mann 2010, Distributed Training Strategies for the Structured Perceptron"
    )

    period: int = 8

    @property
    def traits(self) -> Traits:
        return replace(super().traits, weighted_by_examples=True)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return WeightedWorker(self, node, replica, group)


class WeightedWorker(AveragingWorker):
    """Averages parameters weighted by the examples of each worker."""

    def __init__(self, strategy: Average, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.averaged = 0  # examples at the last average
        self._weight: float | None = None

    @property
    def sends_updates(self) -> bool:
        return True

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        self._weight = self._share()
        if self._weight is None and self.strategy.codec is None:
            return self.reducer.mean(vectors, *flags)
        super().mean(vectors, *flags, full=full)

    def weight(self) -> float | None:
        return self._weight

    def _share(self) -> float | None:
        mine = self.replica.examples_since(self.averaged)
        places = range(self.group.size)
        counts = agree(self.group, *(mine if rank == self.group.rank else 0.0 for rank in places), op="sum")
        return None if min(counts) == max(counts) else mine * len(counts) / sum(counts)

    def synchronize(self, full: bool = False) -> None:
        super().synchronize(full)
        self.averaged = self.replica.samples

    def state_dict(self) -> State:
        return {**super().state_dict(), "examples": self.replica.samples - self.averaged}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.averaged = self.replica.samples - state["examples"]
