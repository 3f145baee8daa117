"""Workers that average with one other at a time, while both compute."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import PeerLost, WireError
from polyrhythm.core.events import Applied
from polyrhythm.core.peer import Peer
from polyrhythm.model.vectors import blocks, cut
from polyrhythm.strategies.decentralized.base import Peers
from polyrhythm.strategies.decentralized.topology import graph, parse_topology, regraph
from polyrhythm.strategies.decentralized.transfer import Transfer, gifts_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class ADPSGD(Peers):
    """Each averages with a random neighbour while it computes its gradient, and nobody waits (AD-PSGD).

    Both become (x_i + x_j) / 2, in one piece; then x_i <- x_i - update, with the gradient at x_i as it was
    when the batch began. The graph has two sides. Workers of the one ask: at the end of a step, for the next
    one. Those of the other only answer, at once, whatever they are computing. So nobody can wait for one that
    waits. `topology` says who may be whose neighbour (see `gossip`); edges within a side are not used.

    d = (x_i - x_j) / 2 is computed once, by the one that is asked: x_j gains what x_i loses, whatever either
    of them has done meanwhile, so the sum of all x moves by updates only. Staleness counts the averages that
    came between a gradient's beginning and its step.

    >>> import polyrhythm as pr
    >>> pr.parse("adpsgd:ring").topology
    'ring'
    """

    name: ClassVar[str] = "adpsgd"
    main: ClassVar[str | None] = "topology"
    kinds: ClassVar[tuple[str, ...]] = ("average", "got")
    paper: ClassVar[str] = "Lian, Zhang, Zhang, Liu 2018, Asynchronous Decentralized Parallel SGD"

    topology: str = "complete"

    def __post_init__(self) -> None:
        parse_topology(self.topology)

    @property
    def lockstep(self) -> bool:
        return False

    def check_counts(self, workers: int, servers: int) -> None:
        graph(parse_topology(self.topology), workers)

    # x is the model's own parameters, which stay as they are while it computes, and the drift: what averages
    # have added to them since.

    def shown(self, replica: Replica, start: int, stop: int) -> tuple[Tensor, ...]:
        x = super().shown(replica, start, stop)
        if replica.notes.get("averages"):
            for part, drift in zip(x, cut(_drift(replica), start, stop), strict=True):
                part.add_(drift)
        return x

    def step(self, node: Node, replica: Replica) -> None:
        averages = self._join(node, replica)
        with node.lock():
            averages += _settle(replica)
            replica.apply()
        node.log(Applied(staleness=averages))
        self._ask(node, replica)

    def finish(self, node: Node, replica: Replica) -> None:
        self._join(node, replica)

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        if message is None:
            gone = {peer for peer, _ in gifts_of(replica).given if peer not in node.members.workers}
            for gift in gifts_of(replica).left(gone).values():
                gift.settle()
        elif message.kind == "average":
            self._average(node, replica, message)
        elif message.kind == "got":
            gifts_of(replica).arrived(message.sender, message["name"])
        else:
            super().hear(node, replica, message)

    # The side that asks.

    def _ask(self, node: Node, replica: Replica) -> None:
        neighbour = self._neighbour(node, replica)
        if neighbour is None:
            return
        x = replica.buffer("x")  # lent until it is answered, when d is in its place
        with node.lock():
            for place, mine, drift in blocks(x, replica.parameters, _drift(replica)):
                place.copy_(mine)
                if replica.notes.get("averages"):
                    place.add_(drift)
        name = replica.notes["asked"] = f"{node.incarnation}/{replica.steps}"
        reply = node.request(neighbour, "average", *x, into=x, name=name)
        replica.outstanding.append((neighbour, reply))

    def _join(self, node: Node, replica: Replica) -> int:
        """Takes in the average that was asked for. 0 if there is none: one that died takes nothing along."""
        joined = 0
        for neighbour, reply in replica.outstanding:
            with contextlib.suppress(PeerLost):
                reply.wait()
                with node.lock():
                    for mine, d in blocks(replica.parameters, replica.buffer("x")):
                        mine.sub_(d)
                joined += 1
                node.send(neighbour, "got", name=replica.notes["asked"])
        replica.outstanding.clear()
        return joined

    def _neighbour(self, node: Node, replica: Replica) -> Peer | None:
        """Whom to ask in this step, by lot; None for those that do not ask."""
        known, near = replica.notes.get("neighbours", (None, ()))
        if known != node.members.workers:
            ranks = sorted({node.rank, *(peer.rank for peer in node.members.workers)})
            near = asked(self.topology, tuple(ranks), node.seed)[node.rank]
            replica.notes["neighbours"] = list(node.members.workers), near
        if not near:
            return None
        lot = hashlib.blake2b(repr((node.seed, node.rank, replica.steps)).encode(), digest_size=8).digest()
        return Peer("worker", near[int.from_bytes(lot, "little") % len(near)])

    # The side that is asked.

    def _average(self, node: Node, replica: Replica, message: Message) -> None:
        if _shape(message.tensors) != _shape(replica.parameters):
            raise WireError(f"{message.sender} wants to average with other parameters than {node.me} has")
        gifts, key = gifts_of(replica), (message.sender, message["name"])
        seen = replica.notes.setdefault("seen", {})
        if message.sequence > seen.get(message.sender, 0):
            seen[message.sender] = message.sequence
            for peer, name in [each for each in gifts.given if each[0] == message.sender]:
                gifts.arrived(peer, name)  # it has said so, but its word may have got lost
            gift = gifts.given[key] = Transfer(gifts.room(replica))
            theirs = [part.to(d.device) for part, d in zip(message.tensors, gift.vectors, strict=True)]
            with node.lock():
                for d, x_i, mine, drift in blocks(gift.vectors, theirs, replica.parameters, _drift(replica)):
                    d.copy_(x_i).sub_(mine).sub_(drift).mul_(0.5)
                    drift.add_(d)
                replica.notes["averages"] = replica.notes.get("averages", 0) + 1
        # One that asks again has lost the answer: it gets the same. Or it has it, and waits no longer.
        if key in gifts.given:
            gifts.given[key].reply(node, message)
        else:
            node.reply(message)


@lru_cache(maxsize=16)
def asked(topology: str, ranks: tuple[int, ...], seed: int) -> Mapping[int, Sequence[int]]:
    """Whom each of these workers may ask: nobody, if it is of the side that answers.

    The sides are every other one along a walk through the graph. So each step of the walk leads from one side
    to the other, and what is left of the graph still holds together.
    """
    near = regraph(parse_topology(topology), ranks, seed)
    side: dict[int, int] = {}
    ahead = [(ranks[0], 0)]
    while ahead:
        rank, turn = ahead.pop()
        if rank not in side:
            side[rank] = turn
            ahead += [(other, 1 - turn) for other in reversed(near[rank]) if other not in side]
    return {rank: () if side[rank] else tuple(other for other in near[rank] if side[other]) for rank in ranks}


def _drift(replica: Replica) -> Sequence[Tensor]:
    return replica.buffer("drift", exact=True)


def _settle(replica: Replica) -> int:
    """Moves the model's parameters to x; how many averages have come since they were there."""
    averages = int(replica.notes.get("averages", 0))
    if averages:
        for mine, drift in blocks(replica.parameters, _drift(replica)):
            mine.add_(drift)
            drift.zero_()
    replica.notes["averages"] = 0
    return averages


def _shape(vectors: Sequence[Tensor]) -> list[tuple[object, int]]:
    return [(vector.dtype, vector.numel()) for vector in vectors]
