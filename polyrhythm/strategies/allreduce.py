"""Synchronous data parallelism without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.strategies.reduce_ops import MeanReducer, in_buckets

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class AllReduce(Strategy):
    r"""All workers average their gradients, then each takes the same step (bulk-synchronous SGD).

    The mean is the gradient of the union of the batches, and the replicas stay equal.

    $$
    G &= \frac{1}{N} \sum_i g_i(w) \\
    w &\leftarrow \operatorname{Opt}(w, G)
    $$

    The mean is taken at the end of `backward()`: whatever the script does to gradients before
    `optimizer.step()`, such as clipping, it does to the mean. Buckets of the gradient that are complete early
    are exchanged while backward still runs, unless a codec needs the whole gradient.

    >>> import polyrhythm as pr
    >>> pr.parse("allreduce").traits.sync_period
    1
    """

    name: ClassVar[str] = "allreduce"
    codecs: ClassVar[bool] = True
    paper: ClassVar[str] = "Goyal et al. 2017, Accurate, Large Minibatch SGD"

    @property
    def traits(self) -> Traits:
        return Traits(identical_optimizers=True, inside_sites=True, closures=True)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return (InBuckets if in_buckets(self.codec) else AtOnce)(self, node, replica, group)


class AtOnce(Worker):
    """Averages the gradient when it is complete."""

    strategy: AllReduce

    def __init__(self, strategy: AllReduce, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.reducer = MeanReducer(strategy.codec, node, replica, group)

    def on_gradient(self) -> None:
        self.reducer.mean_gradient(self.replica.gradients.present)

    def step(self) -> None:
        self.replica.apply()

    @property
    def replicas_equal(self) -> bool:
        return True

    def state_dict(self) -> State:
        return self.reducer.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.reducer.load_state_dict(state)


class InBuckets(AtOnce):
    """Averages the gradient bucket by bucket while backward runs."""

    def on_bucket(self, gradient: Sequence[Tensor], last: bool) -> None:
        # The gradients that are missing are known with the last bucket.
        self.reducer.begin_bucket(gradient, *((self.replica.gradients.present,) if last else ()))

    def on_gradient(self) -> None:
        self.reducer.join_buckets()
