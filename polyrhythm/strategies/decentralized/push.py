"""Stochastic gradient push: workers that give away parts of what they have, and ask for nothing in return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import PeerLost, UsageError
from polyrhythm.model.vectors import blocks, copied
from polyrhythm.strategies.decentralized.topology import exponential_peer
from polyrhythm.strategies.decentralized.transfer import Fetched, Handing, Transfer, gifts_of, group_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica

    Given = tuple[int, Sequence[Tensor]]  # grains of omega, and the z that they stand for


ONE = 1 << 40  # omega is counted in whole grains, so many to 1: none is ever lost by rounding
LEAST = 1 << 10  # and one that is less than 1 in so many makes steps of z that are too long


@dataclass(frozen=True)
class Push(Handing):
    """Each gives half of its weight and parameters to another, in turn 1, 2, 4, ... places further (SGP).

    x_i <- x_i - update, with the gradient at z_i; then the share p of (x_i, omega_i) goes to the receiver of
    this round, and what others have given is added; z_i = x_i / omega_i is what the model computes with. With
    `fanout` F there are F receivers, and p = 1 / (F + 1). A worker waits for what it is given in this round;
    with `ahead` for what was given so many rounds before, which has come while it computed (overlap SGP).

    The sum of all omega is the number of workers, what is on its way included, and the sum of all x moves by
    updates only. So z_i is near the mean of all, whatever the graph: one that dies takes along what it has,
    and what would have been for it stays where it is. A new group of workers begins with omega = 1. A run
    that is saved and resumed with as many workers goes on to the same bits: what was on its way is saved by
    the one that it is for.

    >>> import polyrhythm as pr
    >>> pr.parse("push:1,fanout=2").ahead
    1
    """

    # x is never written down: in its place z travels, with the omega that it counts. z changes by differences
    # only, so what is equal everywhere, a frozen layer, stays as it is to the last bit.

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

    def check_counts(self, workers: int, servers: int) -> None:
        distances = (workers - 1).bit_length()
        if self.fanout > distances > 0:
            raise UsageError(
                f"{self}: with {workers} workers fanout is at most {distances}: receivers are 1, 2, 4, ... "
                "places further"
            )
        rounds = int(math.log(LEAST, self.fanout + 1) + 1e-9)
        if self.ahead > rounds:
            raise UsageError(
                f"{self}: with fanout={self.fanout} ahead is at most {rounds}: by then a worker has given "
                f"away all but 1/{LEAST} of its weight, and has got nothing yet"
            )

    def begin(self, node: Node, replica: Replica) -> None:
        super().begin(node, replica)
        self._anew(node, replica)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        super().regroup(node, replica, ranks, number)
        self.finish(node, replica)
        for asked in replica.notes["asked"].values():
            for _, fetched in asked:
                self.wait(fetched)  # that round never came: until the other says so its place is lent
        self._anew(node, replica)

    def _anew(self, node: Node, replica: Replica) -> None:
        replica.notes.update(omega=ONE, turn=0, asked={}, saved={}, returned=[])

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        """What is on its way is waited for: others have given it before they come here, or will soon."""
        notes = replica.notes
        way = {turn: [each for each, _ in self._given(replica, turn)] for turn in self._begun(replica)}
        return {
            **super().keep(node, replica),
            "omega": notes["omega"],
            "turn": notes["turn"],
            "given": {turn: [_own(each) for each in given] for turn, given in way.items()},
            "returned": [_own(each) for each in notes["returned"]],
        }

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        super().resume(node, replica, kept)
        group_of(replica).began = kept["turn"]
        replica.notes.update(
            omega=kept["omega"], turn=kept["turn"], saved=dict(kept["given"]), returned=list(kept["returned"])
        )

    def step(self, node: Node, replica: Replica) -> None:
        turn = replica.notes["turn"]
        if turn not in replica.notes["asked"]:  # the first one: only now it is known from where all go on
            self._ask(node, replica)
        with node.lock():
            _update(replica)
        self._give(node, replica, turn)
        replica.notes["turn"] = turn + 1
        self._take(node, replica, turn - self.ahead)
        self._ask(node, replica)

    def finish(self, node: Node, replica: Replica) -> None:
        """Takes in all that is still on its way."""
        self._take(node, replica, *self._begun(replica))

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """What all will have when that which is on its way is there."""
        given = self._given(replica, *self._begun(replica))
        if not given or node.incarnation or node.members.lost:
            return super().consensus(node, replica)
        z = copied(replica.parameters, replica.buffer("consensus"))
        _mix(z, replica.notes["omega"], [each for each, _ in given])
        try:
            node.group().all_reduce(*z, op="mean")
        except PeerLost:
            return self.look(node, replica, z)
        return z

    def returned(self, replica: Replica, gift: Transfer) -> None:
        replica.notes["returned"].append((gift.words["grains"], gift.vectors))

    # One round.

    def _begun(self, replica: Replica) -> list[int]:
        """Rounds of which something may still be on its way: the next one has not begun."""
        asked = sorted({*replica.notes["saved"], *replica.notes["asked"]})
        return [turn for turn in asked if turn < replica.notes["turn"]]

    def _distances(self, replica: Replica, turn: int) -> Iterator[int]:
        """How many places further the receivers of a round are."""
        places = len(group_of(replica).ranks)
        for number in range(min(self.fanout, (places - 1).bit_length())):
            yield exponential_peer(0, places, turn * self.fanout + number)

    def _give(self, node: Node, replica: Replica, turn: int) -> None:
        ranks, distances = group_of(replica).ranks, list(self._distances(replica, turn))
        grains = replica.notes["omega"] // (len(distances) + 1)
        for distance in distances:
            to = ranks[(ranks.index(node.rank) + distance) % len(ranks)]
            room = gifts_of(replica).room(replica)
            if self.hand(node, replica, to, turn, copied(replica.parameters, room), grains=grains):
                replica.notes["omega"] -= grains
            else:
                gifts_of(replica).spare.append(room)

    def _ask(self, node: Node, replica: Replica) -> None:
        """Asks for what is given in the next round, so that it comes as soon as it is there."""
        ranks, turn = group_of(replica).ranks, replica.notes["turn"]
        asked = replica.notes["asked"][turn] = []
        for number, distance in enumerate(self._distances(replica, turn)):
            sender = ranks[(ranks.index(node.rank) - distance) % len(ranks)]
            into = replica.buffer(f"given {number} {turn % (self.ahead + 1)}")
            if fetched := self.fetch(node, replica, sender, turn, into):
                asked.append((into, fetched))

    def _given(self, replica: Replica, *turns: int) -> list[tuple[Given, Fetched | None]]:
        """What this worker was given in these rounds, when all of it is here."""
        found: list[tuple[Given, Fetched | None]] = []
        for turn in turns:
            found += [(given, None) for given in replica.notes["saved"].get(turn, ())]
            heard = [(self.wait(each), into, each) for into, each in replica.notes["asked"].get(turn, ())]
            found += [((message["grains"], into), each) for message, into, each in heard if message]
        return found

    def _take(self, node: Node, replica: Replica, *turns: int) -> None:
        given = self._given(replica, *turns)
        with node.lock():
            _add(replica, [each for each, _ in given])
        for turn in turns:
            replica.notes["asked"].pop(turn, None)
            replica.notes["saved"].pop(turn, None)
        for _, fetched in given:
            if fetched is not None:
                self.got(node, fetched)


def _own(given: Given) -> Given:
    """A copy to save."""
    grains, vectors = given
    return grains, [part.clone() for part in vectors]


def _update(replica: Replica) -> None:
    """x <- x - update, which is z <- z - update / omega."""
    omega = replica.notes["omega"] / ONE
    if omega == 1:
        return replica.apply()
    before = copied(replica.parameters, replica.buffer("before"))
    replica.apply()
    for z, old in blocks(replica.parameters, before):
        z.sub_(old).div_(omega).add_(old)


def _add(replica: Replica, given: Sequence[Given]) -> None:
    """Adds what others have given, and what was for one that is gone."""
    returned, replica.notes["returned"] = replica.notes["returned"], []
    replica.notes["omega"] = _mix(replica.parameters, replica.notes["omega"], [*given, *returned])
    gifts_of(replica).spare += [vectors for _, vectors in returned]


def _mix(z: Sequence[Tensor], omega: int, given: Sequence[Given]) -> int:
    """Makes of z the mean of itself and what was given, each with its omega; the omega of all."""
    for grains, theirs in given:
        omega += grains
        for mine, part in blocks(z, theirs):
            mine.lerp_(part, grains / omega)
    return omega
