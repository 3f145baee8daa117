"""D-PSGD: workers on a graph that mix their parameters with those of their neighbors in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, cloned
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
    """Publishes its parameters after each step, and mixes them with those of its neighbors.

    What it has not mixed yet is saved as published_j - published_i. A consensus keeps these in place of both,
    to save a vector while the script has its copy.
    """

    strategy: Gossip

    def __init__(self, strategy: Gossip, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.differences: dict[Peer, Sequence[Tensor]] | None = None  # by neighbor, if they replace both

    def step(self) -> None:
        mixes_first = self.strategy.order == "mix-while-computing"
        # Before the first step all are equal.
        if mixes_first and (self.differences is not None or self.exchange.last_published is not None):
            self.mix()
        with self.node.lock():
            self.replica.apply()
        self.publish(self.replica.parameters)
        if not mixes_first:
            self.mix()

    def publish(self, x: Sequence[Tensor]) -> None:
        self.exchange.publish(self.exchange.copy(x))

    def mix(self) -> None:
        # Relative to what the neighbors saw, so that changes that the script made since are kept.
        published: Sequence[Tensor] | None = self.exchange.last_published or ()
        if self.differences is None:
            given = [(weight, fetch.into) for weight, fetch, _ in self.exchange.received()]
        else:
            weights, published = self.exchange.weights, None
            given = [(weights[peer], each) for peer, each in self.differences.items()]
        with self.node.lock():
            mix(self.replica.parameters, published, given)
        self.differences = None
        self.request()

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        saves_memory = all(part.element_size() >= 4 for part in self.replica.parameters)
        # Not if that waits for a network: the rest may arrive while the next gradient is computed.
        if saves_memory and not final and self.together and self.exchange.near:
            self.hold_differences()
        return super().consensus(final)

    def hold_differences(self) -> None:
        """Waits for the neighbors' parameters and makes differences of them; its own copy is free then."""
        published = self.exchange.last_published
        if self.strategy.order != "mix-while-computing" or not published:
            return
        self.differences = {}
        for _, fetch, _ in self.exchange.received():
            # In their memory, unless they are 16-bit numbers, whose differences have more bits.
            exact = [part if part.element_size() >= 4 else part.float() for part in fetch.into]
            for theirs, mine in blocks(exact, published):
                theirs.sub_(mine)
            self.differences[fetch.publisher] = exact
            fetch.acknowledge()
        self.published.join_writes()
        self.exchange.last_published = ()

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        self.differences = None
        self.request()
        if self.strategy.order == "mix-while-computing":
            self.publish(self.replica.parameters)

    def state_dict(self) -> State:
        self.hold_differences()
        differences: dict[int, list[Tensor]] | None = None
        if self.differences is not None:
            places = {rank: place for place, rank in enumerate(self.ranks)}
            differences = {places[peer.rank]: cloned(each) for peer, each in self.differences.items()}
        return {**super().state_dict(), "differences": differences}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if "differences" not in state:
            raise UsageError(
                "an older version of polyrhythm saved this state, and gossip cannot resume from it; leave "
                "out session.load_state_dict() to start from the saved model"
            )
        self.resume(state["round"], f"round {state['round']}")
        if state["differences"] is not None:
            self.differences = {
                Peer("worker", self.ranks[place]): cloned(each)
                for place, each in state["differences"].items()
            }
