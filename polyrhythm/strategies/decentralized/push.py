"""Stochastic gradient push: each worker gives away shares of its parameters, and expects nothing back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from polyrhythm.core.errors import PeerLost, UsageError
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, cloned, copied
from polyrhythm.strategies.decentralized.base import Decentralized
from polyrhythm.strategies.decentralized.topology import exponential_peer
from polyrhythm.strategies.decentralized.transfer import TransferWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.published import Fetch, Publication
    from polyrhythm.model.replica import Replica


ONE = 1 << 40  # omega is counted in whole grains, so many to 1: rounding loses none
LEAST = 1 << 10  # an omega of less than 1 in so many makes the steps of z too long


@dataclass(frozen=True)
class Push(Decentralized):
    r"""Each worker pushes a share of its parameters and weight to one other per step (SGP).

    The receiver is 1, 2, 4, ... ranks further, in turn. Messages go one way, so no pair has to agree.

    $$
    x_i &\leftarrow x_i - \eta g_i(z_i) \\
    (x_i, \omega_i) &\leftarrow \sum_j P_{ij} (x_j, \omega_j) \\
    z_i &= x_i / \omega_i
    $$

    $P_{ij}$ is $1 / (F + 1)$ if worker $j$ sends to worker $i$ in this round or is worker $i$, otherwise 0.
    The model computes with $z_i$. The sum of all $\omega$ is the number of workers, including shares on their
    way, and only updates move the sum of all $x$. So $z_i$ stays near the mean of all, whatever the graph.

    A worker that dies takes its own $x$ and $\omega$ along, and shares for it stay with their senders. A new
    cohort starts with $\omega = 1$. A run resumed with as many workers continues with the same bits: a share
    on its way is saved by its receiver.

    - `ahead`: wait for the shares of this many rounds before, not for those of this round (overlap SGP)
    - `fanout`: the number of receivers $F$ in each round

    >>> import polyrhythm as pr
    >>> pr.parse("push:1,fanout=2").ahead
    1
    """

    name: ClassVar[str] = "push"
    main: ClassVar[str | None] = "ahead"
    paper: ClassVar[str] = (
        "Assran, Loizou, Ballas, Rabbat 2019, Stochastic Gradient Push for Distributed Deep Learning"
    )

    ahead: int = 0
    fanout: int = 1

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise UsageError("ahead must be 0 or more: a number of rounds")
        if self.fanout < 1:
            raise UsageError("fanout must be 1 or more: a number of receivers in each round")

    def check(self, plan: Plan) -> None:
        distances = (plan.workers - 1).bit_length()
        if self.fanout > distances > 0:
            raise UsageError(
                f"{self}: with {plan.workers} workers fanout is at most {distances}: receivers are 1, 2, 4, "
                "... ranks further"
            )
        rounds = int(math.log(LEAST, self.fanout + 1) + 1e-9)
        if self.ahead > rounds:
            raise UsageError(
                f"{self}: with fanout={self.fanout} ahead is at most {rounds}: by then a worker has given "
                f"away all but 1/{LEAST} of its weight, and has received nothing yet"
            )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return PushWorker(self, node, replica, group)


class Share(NamedTuple):
    """A share of weight, and the z that it counts for."""

    grains: int
    z: Sequence[Tensor]


class PushWorker(TransferWorker):
    """Holds z and omega. x = omega z is never stored: shares travel as z, with the omega that they count.

    z changes by differences only, so that a layer that is equal everywhere, a frozen one, keeps its bits.
    """

    strategy: Push

    def __init__(self, strategy: Push, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.omega, self.round = ONE, 0
        self.requested: dict[int, list[Fetch]] = {}  # shares of each round
        self.loaded: dict[int, list[Share]] = {}  # the same, that were on their way when the run was saved
        self.unclaimed: list[Share] = []  # their receivers died
        self._buffers: dict[tuple[int, int], Sequence[Tensor]] = {}

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        self.finish()
        for fetches in self.requested.values():
            for fetch in fetches:
                fetch.wait()  # for an empty reply: that round was never begun, and its buffers are lent
        self.omega, self.round = ONE, 0
        self.requested, self.loaded, self.unclaimed = {}, {}, []

    def step(self) -> None:
        self.published.start()
        if self.round not in self.requested:  # the first: where all continue from is known only now
            self.request()
        with self.node.lock():
            self.update()
        self.push()
        self.round += 1
        self.take(self.round - 1 - self.strategy.ahead)
        self.request()

    def finish(self) -> None:
        """Takes all shares that are still on their way."""
        self.take(*self.under_way())

    def update(self) -> None:
        """x <- x - update, which is z <- z - update / omega."""
        omega = self.omega / ONE
        if omega == 1:
            return self.replica.apply()
        before = copied(self.replica.parameters, self._before)
        self.replica.apply()
        for z, old in blocks(self.replica.parameters, before):
            z.sub_(old).div_(omega).add_(old)

    def push(self) -> None:
        """Gives a share of (x, omega) to each receiver of this round."""
        receivers = [self.position[0] + distance for distance in self.distances(self.round)]
        grains = self.omega // (len(receivers) + 1)
        self.omega -= grains * self.transfer(self.round, receivers, self.replica.parameters, grains=grains)

    def request(self) -> None:
        """Requests the shares of the next round, so that each is sent as soon as it is given."""
        round_, ahead, fetches = self.round, self.strategy.ahead, []
        for number, distance in enumerate(self.distances(round_)):
            slot = number, round_ % (ahead + 1)
            into = self._buffers[slot] = self._buffers.get(slot) or self.replica.buffer()
            fetches.append(self.fetch(round_, self.position[0] - distance, into, have=round_ - ahead))
        self.requested[round_] = [fetch for fetch in fetches if fetch is not None]

    def distances(self, round_: int) -> list[int]:
        """How many ranks further the receivers of a round are."""
        places = len(self.ranks)
        receivers = min(self.strategy.fanout, (places - 1).bit_length())
        return [exponential_peer(0, places, round_ * self.strategy.fanout + n) for n in range(receivers)]

    def take(self, *rounds: int) -> None:
        """Adds the shares that this worker was given in these rounds, and those that came back."""
        arrived = self.arrived(*rounds)
        with self.node.lock():
            unclaimed, self.unclaimed = self.unclaimed, []
            self.omega = merge(self.replica.parameters, self.omega, [s for s, _ in arrived] + unclaimed)
        for round_ in rounds:
            self.requested.pop(round_, None)
            self.loaded.pop(round_, None)
        for _, fetch in arrived:
            if fetch is not None:
                fetch.acknowledge()

    def arrived(self, *rounds: int) -> list[tuple[Share, Fetch | None]]:
        """The shares of these rounds, once all are here."""
        found: list[tuple[Share, Fetch | None]] = []
        for round_ in rounds:
            found += [(share, None) for share in self.loaded.get(round_, ())]
            for fetch in self.requested.get(round_, ()):
                if message := fetch.wait():
                    found.append((Share(message["grains"], fetch.into), fetch))
        return found

    def under_way(self) -> list[int]:
        """Rounds that were begun, and whose shares were not taken."""
        return [each for each in sorted({*self.loaded, *self.requested}) if each < self.round]

    def returned(self, publication: Publication) -> None:
        grains = publication.fields["grains"]
        assert isinstance(grains, int)
        self.unclaimed.append(Share(grains, cloned(publication.tensors)))

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        """The mean of all workers after all shares have arrived."""
        arrived = self.arrived(*self.under_way())
        if final or not arrived or not self.together:
            return super().consensus(final)
        z = copied(self.replica.parameters, self.replica.consensus_vectors())
        merge(z, self.omega, [share for share, _ in arrived])
        try:
            self.group.all_reduce(*z, op="mean")
        except PeerLost:
            self.replica.abandon_consensus()
            return self.fetch_mean(self.replica.consensus_vectors())
        return z

    @cached_property
    def _before(self) -> Sequence[Tensor]:
        return self.replica.buffer()

    def state_dict(self) -> State:
        # Shares that are on their way are waited for: their senders gave them before they save.
        under_way = {each: [share for share, _ in self.arrived(each)] for each in self.under_way()}
        return {
            **super().state_dict(),
            "omega": self.omega,
            "round": self.round,
            "under_way": {each: list(map(_saved, shares)) for each, shares in under_way.items()},
            "unclaimed": list(map(_saved, self.unclaimed)),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.omega, self.round = state["omega"], state["round"]
        self.loaded = {each: [Share(*one) for one in shares] for each, shares in state["under_way"].items()}
        self.unclaimed = [Share(*share) for share in state["unclaimed"]]
        self.resume(self.round, f"round {self.round}")


def _saved(share: Share) -> tuple[int, list[Tensor]]:
    return share.grains, cloned(share.z)


def merge(z: Sequence[Tensor], omega: int, shares: Sequence[Share]) -> int:
    """Replaces z by the mean of itself and the shares, each weighted by its omega; returns the total."""
    for grains, theirs in shares:
        omega += grains
        for mine, part in blocks(z, theirs):
            mine.lerp_(part, grains / omega)
    return omega
