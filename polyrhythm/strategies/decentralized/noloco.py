"""NoLoCo: workers that train alone, and now and then meet one other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import blocks, copied
from polyrhythm.strategies.decentralized.topology import pairs
from polyrhythm.strategies.decentralized.transfer import Handing, gifts_of, group_of

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class NoLoCo(Handing):
    """Workers train alone; every `period` steps random pairs take an outer step that draws them together.

    m_i <- mu m_i + lr mean(theta - phi) + lr (mean phi - phi_i), phi_i <- phi_i + m_i, theta_i <- phi_i, with
    phi_i where the round began, theta_i where it led, and means over the two of a pair. What draws one of
    them to the other draws that as much to the first: the mean of all phi goes by heavy ball down the mean
    way. Others meet in the next round, chosen by the seed, so that nothing is asked of anybody else. With an
    odd number one at a time stays alone, and so does one whose partner has died. The result is the mean of
    all theta. A run that is saved and resumed with as many workers goes on to the same bits.

    >>> import polyrhythm as pr
    >>> pr.parse("noloco:100,mu=0.3").period
    100
    """

    name: ClassVar[str] = "noloco"
    main: ClassVar[str | None] = "period"
    remembers: ClassVar[tuple[str, ...]] = ("m",)
    paper: ClassVar[str] = (
        "Kolehmainen et al. 2025, NoLoCo: No-all-reduce Low Communication Training Method for Large Models"
    )

    period: int = 50
    lr: float = 0.7
    mu: float = 0.5

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UsageError("period must be 1 or more")
        if not 0 < self.lr < math.inf:
            raise UsageError("lr must be a finite number above 0")
        if not 0 <= self.mu < 1:
            raise UsageError("mu must be 0 or more, and below 1")

    def begin(self, node: Node, replica: Replica) -> None:
        super().begin(node, replica)
        replica.notes.update(alone=0, round=0)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        super().regroup(node, replica, ranks, number)
        replica.notes.update(alone=0, round=0)  # so that all are at the same place

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        alone = replica.notes["alone"]
        phi = [part.clone() for part in replica.buffer("phi")] if alone else []
        return {**super().keep(node, replica), "round": replica.notes["round"], "alone": alone, "phi": phi}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        super().resume(node, replica, kept)
        replica.notes.update(alone=kept["alone"], round=kept["round"])
        if kept["phi"]:
            copied(kept["phi"], replica.buffer("phi"))
        group_of(replica).began = kept["round"] * self.period + kept["alone"]

    def step(self, node: Node, replica: Replica) -> None:
        if replica.notes["alone"] == 0:
            copied(replica.parameters, replica.buffer("phi"))
        with node.lock():
            replica.apply()
        replica.notes["alone"] += 1
        if replica.notes["alone"] == self.period:
            self._meet(node, replica)
            replica.notes["alone"] = 0
            replica.notes["round"] += 1

    def _meet(self, node: Node, replica: Replica) -> None:
        theirs = replica.buffer("their theta"), replica.buffer("their phi")
        met = self._swap(node, replica, (*theirs[0], *theirs[1]))
        own = replica.parameters, replica.buffer("phi"), replica.buffer("m")
        with node.lock():
            for theta, phi, m, their_theta, their_phi in blocks(*own, *theirs):
                way = theta - phi
                m.mul_(self.mu)
                if met:
                    # The same, or its negative, on both sides to the last bit.
                    way.add_(their_theta - their_phi).div_(2)
                    m.add_(their_phi - phi, alpha=self.lr / 2)
                m.add_(way, alpha=self.lr)
                theta.copy_(phi).add_(m)

    def _swap(self, node: Node, replica: Replica, into: Sequence[Tensor]) -> bool:
        """Swaps theta and phi with the partner of this round; False if there is none."""
        ranks, turn = group_of(replica).ranks, replica.notes["round"]
        place = partners(len(ranks), node.seed, turn).get(ranks.index(node.rank))
        if place is None:
            return False
        gifts = gifts_of(replica)
        room = gifts.room(replica, times=2)
        copied((*replica.parameters, *replica.buffer("phi")), room)
        if not self.hand(node, replica, ranks[place], turn, room):
            gifts.spare.append(room)
            return False
        fetched = self.fetch(node, replica, ranks[place], turn, into)
        if fetched is None or self.wait(fetched) is None:
            return False
        self.got(node, fetched)
        return True


@lru_cache(maxsize=64)
def partners(places: int, seed: int, turn: int) -> Mapping[int, int]:
    """Whom each place meets in a round."""
    met = pairs(places, seed, turn)
    return {one: other for pair in met for one, other in (pair, pair[::-1])}
