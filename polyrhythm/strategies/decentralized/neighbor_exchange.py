"""Workers that mix with their neighbours in a graph, round by round: what they show each other, and how.

Each shows something of its own in every round, and each takes what its neighbours have shown in that round:
nobody sends to anybody who has not asked. Asks go out a round ahead, so that what is shown is on its way at
once. What was shown is kept until all neighbours have it, and that they say by asking for a later round: a
connection may break with the answer, and then they ask again. That is two rounds, or three: before anybody
shows a third, each neighbour has asked for the second, though that may not have been heard yet. (Where the
graph changes by turns a neighbour comes up again after one cycle, and so it is a cycle and one more.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.message import Message
from polyrhythm.core.peer import Peer
from polyrhythm.model.vectors import BLOCK, copied
from polyrhythm.strategies.decentralized.base import Peers
from polyrhythm.strategies.decentralized.topology import (
    Topology,
    check_weights,
    graph,
    matrix,
    parse_topology,
    regraph,
)

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Reply
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica

Weights = Mapping[Peer, float]


class Board:
    """What a worker shows its neighbours, and what it has asked of them; all that the two sides share.

    It changes inside `node.lock()` only.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.group = 0
        self.turns: Sequence[Weights] = [{}]  # neighbours in rank order at each turn, and what they count
        self.gone: set[Peer] = set()  # neighbours that are so no longer
        self.round = -1  # what was shown last
        self.shown: dict[int, Sequence[Tensor]] = {}  # by round, as long as somebody needs it
        self.unread: dict[int, set[Peer]] = {}  # who may not have got it yet
        self.held: list[Message] = []  # asks for what was not shown yet
        self.over = False  # nothing will be
        self.asked: list[tuple[Peer, Reply]] = []

    def neighbours(self, round_: int) -> Weights:
        """Those that are there in a round. The weight of one that is gone goes to this worker itself."""
        near = self.turns[round_ % len(self.turns)]
        return {peer: weight for peer, weight in near.items() if peer not in self.gone}

    # --- the script's own thread ----------------------------------------------------------------------

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Shows the next round to whoever has asked or will ask; the tensors stay as they are for so long."""
        with self.node.lock():
            self.forget()
            self.round += 1
            self.shown[self.round] = tensors
            self.unread[self.round] = set(self.neighbours(self.round))
            self._sort()

    def forget(self) -> list[Sequence[Tensor]]:
        """Drops what everybody has got; returns what is still needed."""
        with self.node.lock():
            for round_ in [each for each, missing in self.unread.items() if not missing]:
                del self.unread[round_], self.shown[round_]
            return list(self.shown.values())

    def request(self, into: Callable[[int, Peer], Sequence[Tensor]] = lambda *_: ()) -> None:
        """Asks for what the neighbours will show in the round after the last one shown here."""
        node, round_ = self.node, self.round + 1
        for number, peer in enumerate(self.neighbours(round_)):
            reply = node.request(peer, "mix", into=into(number, peer), group=self.group, round=round_)
            self.asked.append((peer, reply))

    def answers(self) -> Iterator[tuple[int, float, Message]]:
        """What was asked for, in rank order: the how-manieth it is, what it counts, and the answer.

        A neighbour that does not answer is gone from now on.
        """
        near = self.neighbours(self.round)
        asked, self.asked = self.asked, []
        for number, (peer, reply) in enumerate(asked):
            message = _heard(reply)
            if message is not None:
                yield number, near[peer], message
                continue
            with self.node.lock():
                self.gone.add(peer)
                for missing in self.unread.values():
                    missing.discard(peer)

    def join(self, number: int) -> None:
        """A worker that comes later belongs to no group yet: not to this one, nor to those before it."""
        self.group, self.round = number, sys.maxsize

    def regroup(self, number: int, turns: Sequence[Weights]) -> None:
        """Begins anew with other neighbours. What was asked in the group before is of no use any longer."""
        with self.node.lock():
            self.group, self.turns, self.round = number, turns, -1
            self.gone, self.shown, self.unread = set(), {}, {}
            self._sort()
        self._await()

    def close(self) -> None:
        """Nothing more will be shown, nor asked."""
        with self.node.lock():
            self.over = True
            self._sort()
        self._await()

    def _sort(self) -> None:
        """Answers those that need not wait any longer."""
        held, self.held = self.held, []
        for message in held:
            # Inside `exclusive`, for when this node has heard of a death that one's memory may be another's.
            if self.node.members.alive(message) and not self._answered(message):
                self.held.append(message)

    def _await(self) -> None:
        """Waits for what was asked and is not wanted: until then its place is lent."""
        asked, self.asked = self.asked, []
        for _, reply in asked:
            _heard(reply)

    # --- what it listens with -------------------------------------------------------------------------

    def hear(self, message: Message | None) -> None:
        """Answers a neighbour, or keeps what it asks until it can be answered; None: somebody has gone."""
        node = self.node
        if message is not None:
            with node.lock():
                if message["group"] == self.group:
                    for round_ in [each for each in self.unread if each < message["round"]]:
                        self.unread[round_].discard(message.sender)
                if self._wanted(message) is None:
                    self.held.append(message)
                    return
            self._answered(message)  # outside, for it may be large; nobody changes what is not read yet
            return
        with node.lock():
            self.held = [each for each in self.held if node.members.alive(each)]
            for missing in self.unread.values():
                missing.intersection_update(node.members.workers)

    def _wanted(self, message: Message) -> Sequence[Tensor] | None:
        """What to answer: nothing if it will never be shown, None if it is not shown yet."""
        group, round_ = message["group"], message["round"]
        if (group, round_) > (self.group, self.round):
            return () if self.over else None
        return self.shown.get(round_, ()) if group == self.group else ()

    def _answered(self, message: Message) -> bool:
        """Answers an ask if that can be done now."""
        tensors = self._wanted(message)
        if tensors is None:
            return False
        self.node.reply(message, *tensors, **({} if tensors else {"over": True}))
        return True


@dataclass(frozen=True)
class Mixing(Peers):
    """Workers on a graph, each of which mixes with its neighbours in every step.

    By x_i <- x_i + sum_j W_ij (x_j - x_i), with Metropolis-Hastings weights: what one is given the other is
    taken, to the last bit, so the mean of all stays where it is. If a neighbour dies its weight goes to
    oneself; from the next epoch on the living are a graph of their own.
    """

    main: ClassVar[str | None] = "topology"
    kinds: ClassVar[tuple[str, ...]] = ("mix",)

    topology: str = "ring"

    def __post_init__(self) -> None:
        parse_topology(self.topology)

    def check_counts(self, workers: int, servers: int) -> None:
        check_weights(matrix(graph(parse_topology(self.topology), workers)))

    def begin(self, node: Node, replica: Replica) -> None:
        board = replica.notes["board"] = Board(node)
        if node.incarnation:
            board.join(node.cohort)
        else:
            board.regroup(0, self._turns(node, [worker.rank for worker in node.members.workers]))

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        if message is None or message.kind == "mix":
            board_of(replica).hear(message)
        else:
            super().hear(node, replica, message)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        board_of(replica).regroup(number, self._turns(node, ranks))
        self.catch_up(node, replica)

    def finish(self, node: Node, replica: Replica) -> None:
        board_of(replica).close()

    def _turns(self, node: Node, ranks: Sequence[int]) -> list[Weights]:
        every = _weights(parse_topology(self.topology), tuple(ranks), node.seed)
        return [{Peer("worker", rank): weight for rank, weight in turn[node.rank].items()} for turn in every]


def _heard(reply: Reply) -> Message | None:
    """An answer; None if whoever was asked has died, or has nothing more to show."""
    try:
        message = reply.wait()
    except PeerLost:
        return None
    return None if "over" in message.fields else message


def board_of(replica: Replica) -> Board:
    board = replica.notes["board"]
    assert isinstance(board, Board)
    return board


def spare(replica: Replica, vectors: Sequence[Tensor], exact: bool = False) -> Sequence[Tensor]:
    """A copy to show: the next step changes the vectors, and a slow neighbour may still have to read them."""
    kept = board_of(replica).forget()
    places = (replica.buffer(f"shown {number}", exact) for number in count())
    return copied(vectors, next(place for place in places if all(place is not each for each in kept)))


@lru_cache(maxsize=8)
def _weights(topology: Topology, ranks: tuple[int, ...], seed: int) -> list[dict[int, dict[int, float]]]:
    """For each turn what each of these workers gives each of its neighbours, checked.

    Kept, for in simulation all workers ask for the same.
    """
    place = {rank: number for number, rank in enumerate(ranks)}
    every = []
    for turn in range(topology.turns(len(ranks))):
        near = regraph(topology, ranks, seed, turn)
        weights = matrix(tuple(tuple(place[rank] for rank in near[own]) for own in ranks))
        check_weights(weights, whole=False)
        every.append(
            {own: {rank: float(weights[place[own], place[rank]]) for rank in near[own]} for own in ranks}
        )
    return every


def pull(
    own: Sequence[Tensor], shown: Sequence[Tensor], given: Sequence[tuple[float, Sequence[Tensor]]]
) -> None:
    """own <- own + sum_j W_ij (shown_j - shown_i), in rank order.

    In this form what all have equal stays so to the last bit. In pieces that stay in the cache, so that each
    vector is read once. Numbers of 16 bits are added up in 32 and rounded once.
    """
    import torch

    if not given:
        return
    for part, (target, mine) in enumerate(zip(own, shown, strict=True)):
        exact = torch.promote_types(target.dtype, torch.float32)
        spare = torch.empty(min(BLOCK, target.numel()), dtype=exact, device=target.device)
        for start in range(0, target.numel(), BLOCK):
            here = slice(start, start + BLOCK)
            total, base = target[here].to(exact), mine[here].to(exact)  # themselves, if they are exact
            difference = spare[: total.numel()]
            for weight, theirs in given:
                torch.sub(theirs[part][here], base, out=difference)
                total.add_(difference, alpha=weight)
            if target.dtype != exact:
                target[here].copy_(total)
