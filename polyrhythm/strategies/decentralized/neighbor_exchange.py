"""Rounds in which each worker of a graph publishes something and fetches what its neighbors publish.

Requests go out one round ahead, so that a neighbor's publication is sent as soon as it is made. A request for
a round acknowledges the rounds before it (see `core.published`). So a publication is kept for two rounds, or
three: before a worker publishes a third, each neighbor has requested the second, though that request may not
have arrived yet. Where the graph changes by turns, a neighbor returns after one cycle of turns, and a
publication is kept for a cycle and one more round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.peer import Peer
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.decentralized.base import Cohort, CohortWorker, Decentralized
from polyrhythm.strategies.decentralized.mixing import check_weights, matrix, weights_by_turn
from polyrhythm.strategies.decentralized.topology import Topology, graph, parse_topology

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.published import Fetch, Published
    from polyrhythm.core.worker import State
    from polyrhythm.model.replica import Replica

Weights = Mapping[Peer, float]


@dataclass(frozen=True)
class NeighborMixing(Decentralized):
    """Workers on a graph, each of which mixes with its neighbors in every step.

    x_i <- x_i + sum_j W_ij (x_j - x_i), with Metropolis-Hastings weights. Both ends of an edge add the same
    number with opposite signs, so the mean of all is preserved. If a neighbor dies, its weight goes to the
    worker itself; from the next epoch on the survivors form a graph of their own.

    - `topology`: ring, torus, exponential (at distances of 1, 2, 4, ... by turns), exponential-all,
      hypercube, complete, random:D with D neighbors each, or edges as in 0-1/1-2/2-0
    """

    main: ClassVar[str | None] = "topology"

    topology: str = "ring"

    def __post_init__(self) -> None:
        parse_topology(self.topology)

    def check(self, plan: Plan) -> None:
        check_weights(matrix(graph(parse_topology(self.topology), plan.workers)))


class NeighborExchange:
    """The rounds of one worker with its neighbors in the graph of a cohort."""

    def __init__(self, published: Published, topology: Topology, cohort: Cohort) -> None:
        self.published, self.topology = published, topology
        self._fetches: list[Fetch] = []
        self.begin(cohort)

    def begin(self, cohort: Cohort, round_: int = 0) -> None:
        """Begins with a round of a cohort. Requests for other rounds are given up."""
        node, ranks = self.published.node, tuple(cohort.ranks)
        self.cohort = cohort
        self.round = round_  # that this worker publishes next
        self.last_published: Sequence[Tensor] | None = None  # None before the first round
        self._turns: Sequence[Weights] = [  # the neighbors at each turn, in rank order
            {Peer("worker", rank): weight for rank, weight in turn[node.rank].items()}
            for turn in weights_by_turn(self.topology, ranks, node.seed)
        ]
        if any(fetch.key != cohort.key(round_) for fetch in self._fetches):
            self.give_up()

    def neighbors(self) -> Weights:
        """The neighbors in the next round that are still there, and their weights."""
        near, gone = self._turns[self.round % len(self._turns)], self.cohort.gone
        return {peer: weight for peer, weight in near.items() if peer not in gone}

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """Publishes this worker's part of the next round. The tensors must not change (see `copy`)."""
        with self.published.node.lock():
            self.published.publish(self.cohort.key(self.round), self.neighbors(), tensors)
        self.last_published, self.round = tensors, self.round + 1

    def copy(self, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        """A copy to publish: the next step changes the vectors, and a slow neighbor may still read them.

        Empty if there is nobody to mix with, not even one that has replied and died.
        """
        return (
            copied(vectors, self.published.spare_buffers(vectors))
            if self.neighbors() or self._fetches
            else ()
        )

    def request(self, into: Callable[[int, Peer], Sequence[Tensor]]) -> None:
        """Requests what the neighbors publish in the next round, unless that was done before."""
        if not self._fetches:
            key = self.cohort.key(self.round)
            for number, peer in enumerate(self.neighbors()):
                self._fetches.append(self.published.fetch(peer, key, into=into(number, peer)))

    @property
    def weights(self) -> Weights:
        """The weights of the neighbors in the round that was published last."""
        return self._turns[(self.round - 1) % len(self._turns)]

    @property
    def near(self) -> bool:
        """True if waiting for the requested publications waits for no network."""
        here = self.published.on_this_host
        return all(fetch.arrived or fetch.publisher in here for fetch in self._fetches)

    def received(self) -> Iterator[tuple[float, Fetch, Message]]:
        """What the neighbors published in this round, in rank order, each with the neighbor's weight.

        A neighbor that sends no reply is gone for the rest of the cohort.
        """
        near = self.weights
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            message = fetch.wait()
            if message is not None:
                yield near[fetch.publisher], fetch, message
                continue
            with self.published.node.lock():
                self.cohort.gone.add(fetch.publisher)
                self.published.drop(fetch.publisher)

    def give_up(self) -> None:
        """Waits for the requests that are not needed: until the replies are here their buffers are lent."""
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            fetch.wait()


class NeighborWorker(CohortWorker):
    """Mixes with its neighbors in every step."""

    kind: ClassVar[str] = "mix"
    exact: ClassVar[bool] = False  # receives vectors of at least 32 bits
    strategy: NeighborMixing
    exchange: NeighborExchange

    def __init__(self, strategy: NeighborMixing, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self._buffers: list[Sequence[Tensor]] = []

    def into(self, number: int, _: Peer) -> Sequence[Tensor]:
        """Memory for the publication of a neighbor."""
        if number == len(self._buffers):
            self._buffers.append(self.replica.scratch(exact=self.exact))
        return self._buffers[number]

    def begin(self) -> None:
        super().begin()
        self.exchange = NeighborExchange(self.published, parse_topology(self.strategy.topology), self.cohort)
        self.request()

    def request(self) -> None:
        """Requests what the neighbors publish in the next round."""
        self.exchange.request(self.into)

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        self.published.forget(self.cohort.key(0))
        self.exchange.begin(self.cohort)
        self.catch_up()

    def finish(self) -> None:
        self.published.close()
        self.exchange.give_up()
        self._buffers.clear()
        self.published.trim()

    def state_dict(self) -> State:
        return {**super().state_dict(), "round": self.exchange.round}

    def resume(self, round_: int, origin: str) -> None:
        super().resume(round_, origin)
        self.exchange.begin(self.cohort, round_)
        self.request()
