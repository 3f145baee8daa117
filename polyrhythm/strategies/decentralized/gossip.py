"""D-PSGD: workers on a graph that mix their parameters with those of their neighbors in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned
from polyrhythm.strategies.decentralized.mixing import mix
from polyrhythm.strategies.decentralized.neighbor_exchange import NeighborMixing, NeighborWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Gossip(NeighborMixing):
    r"""Workers on a graph mix their parameters with those of their neighbors in every step (D-PSGD).

    There is no server and no all-reduce: a worker talks to its neighbors only.

    $$
    x_i \leftarrow \sum_j W_{ij} x_j - \eta g_i(x_i)
    $$

    The neighbors' parameters arrive while the gradient is computed, so it is the gradient at the parameters
    before mixing. The optimizer's step, and with it weight decay, starts from the mixed ones. With
    `order=step-then-mix` it is $x_i \leftarrow \sum_j W_{ij} (x_j - \eta g_j(x_j))$: a worker then waits for
    its neighbors, and on a complete graph it is `allreduce`. The weights $W$ are Metropolis-Hastings weights
    of the graph. The result is the mean of all workers.

    - `order`: mix the parameters while the gradient is computed, or after the step

    >>> import polyrhythm as pr
    >>> pr.parse("gossip:torus").topology
    'torus'
    """

    name: ClassVar[str] = "gossip"
    paper: ClassVar[str] = (
        "Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017, Can Decentralized Algorithms Outperform Centralized "
        "Algorithms?"
    )

    order: Literal["mix-while-computing", "step-then-mix"] = "mix-while-computing"

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return GossipWorker(self, node, replica, group)


class GossipWorker(NeighborWorker):
    """Publishes its parameters after each step, and mixes them with those of its neighbors."""

    strategy: Gossip

    def step(self) -> None:
        mixes_first = self.strategy.order == "mix-while-computing"
        if mixes_first and self.exchange.last_published is not None:  # before the first step all are equal
            self.mix()
        with self.node.lock():
            self.replica.apply()
        self.publish(self.replica.parameters)
        if not mixes_first:
            self.mix()

    def publish(self, x: Sequence[Tensor]) -> None:
        self.exchange.publish(self.exchange.copy(x))

    def mix(self) -> None:
        given = [(weight, fetch.into) for weight, fetch, _ in self.exchange.received()]
        with self.node.lock():
            # Relative to what the neighbors saw, so that changes that the script made since are kept.
            mix(self.replica.parameters, self.exchange.last_published or (), given)
        self.request()

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        self.request()
        if self.strategy.order == "mix-while-computing":
            self.publish(self.replica.parameters)

    def state_dict(self) -> State:
        # Published, and not mixed yet.
        published = self.exchange.last_published if self.strategy.order == "mix-while-computing" else None
        return {**super().state_dict(), "published": None if published is None else cloned(published)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        published = state["published"]
        self.resume(state["round"] - (published is not None), f"round {state['round']}")
        if published is not None:
            self.publish(published)
