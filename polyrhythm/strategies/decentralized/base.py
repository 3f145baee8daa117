"""Workers that talk to each other, and to no server.

Each listens while it computes: what another asks of it is answered at once, or when it has come so far. The
script's own thread asks, and never listens. Nobody holds the one model: it is the mean of all replicas, so no
worker leaves before the last one is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.core.errors import PeerLost, WireError
from polyrhythm.core.legacy import Legacy
from polyrhythm.model.vectors import copied, cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.model.replica import Replica


SLICE = 1 << 22  # numbers of a replica that are looked at at a time


@dataclass(frozen=True)
class Peers(Legacy):
    """What they have in common: how they begin, and how one looks at what all have come to."""

    stays: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ()  # of messages that it listens to, besides "look"

    @property
    def survives(self) -> bool:
        return True

    def own(self, replica: Replica) -> Sequence[Tensor]:
        """This worker's part in the consensus. It changes inside `node.lock()` only."""
        return replica.parameters

    def shown(self, replica: Replica, start: int, stop: int) -> tuple[Tensor, ...]:
        """A copy of a stretch of it."""
        return tuple(part.clone() for part in cut(self.own(replica), start, stop))

    def start(self, node: Node, replica: Replica) -> None:
        if node.incarnation:
            if self.adopt(node, replica, replica.parameters) is None:
                raise PeerLost(
                    f"{node.me} came in place of one that died, and all that held the parameters are gone"
                )
        else:
            node.group().broadcast(*replica.parameters)
        self.begin(node, replica)
        node.subscribe(partial(self.hear, node, replica), "look", *self.kinds)

    def begin(self, node: Node, replica: Replica) -> None:
        """Runs when the parameters are those to start from, and before this worker listens."""

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        """Takes what another worker sends, while this one computes; None if one has come or gone."""
        if message is not None and message.kind == "look":
            start, stop = message["start"], message["stop"]
            if not 0 <= start <= stop <= replica.layout.total:
                raise WireError(f"{message.sender} looks at {start} to {stop} of {replica.layout.total}")
            with node.lock():
                shown = self.shown(replica, start, stop)
            node.reply(message, *shown)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        average = replica.buffer("consensus")
        if (
            self.lockstep and not node.incarnation and not node.members.lost
        ):  # all are at the same place of the script
            try:
                with node.lock():
                    copied(self.own(replica), average)
                node.group().all_reduce(*average, op="mean")
                return average
            except PeerLost:
                pass
        return self.look(node, replica, average)

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self.look(node, replica, replica.buffer("consensus"))

    def look(self, node: Node, replica: Replica, into: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean of all replicas as they are now, added up in rank order."""
        import torch

        for start in range(0, replica.layout.total, SLICE):
            stop = min(start + SLICE, replica.layout.total)
            with node.lock():
                given = {node.me: self.shown(replica, start, stop)}
            asked = []
            for peer in others(node):
                places = tuple(torch.empty_like(part) for part in given[node.me])
                asked.append((peer, places, node.request(peer, "look", into=places, start=start, stop=stop)))
            for peer, places, reply in asked:
                try:
                    reply.wait()
                except PeerLost:
                    continue
                given[peer] = places
            for index, place in enumerate(cut(into, start, stop)):
                reduce([given[peer][index] for peer in sorted(given)], "mean", [place])
        return into

    def catch_up(self, node: Node, replica: Replica) -> None:
        """One that has come late has waited for its first epoch: what it took over then is old by now."""
        if node.incarnation and not replica.steps:
            latest = replica.buffer("consensus")
            if self.adopt(node, replica, latest) is not None:
                with node.lock():
                    copied(latest, replica.parameters)

    def adopt(self, node: Node, replica: Replica, into: Sequence[Tensor]) -> Peer | None:
        """Takes the parameters of another worker, whoever answers first; None if there is none."""
        for peer in others(node):
            try:
                node.request(peer, "look", into=into, start=0, stop=replica.layout.total).wait()
            except PeerLost:
                continue
            return peer
        return None


def others(node: Node) -> list[Peer]:
    """All other workers that are in the run, as far as is known."""
    return [peer for peer in node.members.workers if peer != node.me]
