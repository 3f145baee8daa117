"""NoLoCo: workers that train locally, and meet one other worker now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, cloned, copied
from polyrhythm.strategies.decentralized.base import Decentralized
from polyrhythm.strategies.decentralized.topology import partners
from polyrhythm.strategies.decentralized.transfer import TransferWorker

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class NoLoCo(Decentralized):
    r"""Local training; every `period` steps random pairs of workers take an outer step together (NoLoCo).

    $$
    m_i &\leftarrow \mu m_i + \frac{\gamma}{2} \big((\theta_i - \phi_i) + (\theta_j - \phi_j)\big)
    + \frac{\gamma}{2} (\phi_j - \phi_i) \\
    \phi_i &\leftarrow \phi_i + m_i, \qquad \theta_i \leftarrow \phi_i
    $$

    Worker $i$ began the round at $\phi_i$ and ended it at $\theta_i$; $j$ is its partner. The pull between
    the two, $\phi_j - \phi_i$, cancels in their sum, so the mean of all $\phi$ follows heavy-ball momentum
    along the mean displacement. The seed chooses other pairs in each round, so workers need not agree on
    them. One of an odd number of workers, and a worker whose partner has died, takes its outer step alone.
    The result is the mean of all $\theta$. A run resumed with as many workers continues with the same bits.

    - `period`: local steps in a round
    - `lr`: the outer learning rate $\gamma$
    - `mu`: the outer momentum

    >>> import polyrhythm as pr
    >>> pr.parse("noloco:100,mu=0.3").period
    100
    """

    name: ClassVar[str] = "noloco"
    main: ClassVar[str | None] = "period"
    shows_main: ClassVar[bool] = True
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

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return NoLoCoWorker(self, node, replica, group)


class NoLoCoWorker(TransferWorker):
    """Takes local steps from phi to theta, and an outer step at the end of each round."""

    strategy: NoLoCo

    def __init__(self, strategy: NoLoCo, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.round = self.local_steps = 0
        self.phi, self.m = replica.buffer(), replica.buffer()
        self.theirs = replica.buffer(), replica.buffer()  # theta and phi of the partner

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        self.round = self.local_steps = 0  # so that all are at the same place

    def step(self) -> None:
        self.published.start()
        if self.local_steps == 0:
            copied(self.replica.parameters, self.phi)
        with self.node.lock():
            self.replica.apply()
        self.local_steps += 1
        if self.local_steps == self.strategy.period:
            self.outer_step()
            self.local_steps, self.round = 0, self.round + 1

    def outer_step(self) -> None:
        own, lr, mu = (self.replica.parameters, self.phi), self.strategy.lr, self.strategy.mu
        partner = partners(len(self.ranks), self.node.seed, self.round).get(self.position[0])
        met = partner is not None and self.swap(self.round, partner, own, self.theirs)
        with self.node.lock():
            for theta, phi, m, their_theta, their_phi in blocks(*own, self.m, *self.theirs):
                displacement = theta - phi
                m.mul_(mu)
                if met:
                    # The same, or its negative, on both sides to the last bit.
                    displacement.add_(their_theta - their_phi).div_(2)
                    m.add_(their_phi - phi, alpha=lr / 2)
                m.add_(displacement, alpha=lr)
                theta.copy_(phi).add_(m)

    def state_dict(self) -> State:
        position = {"round": self.round, "local_steps": self.local_steps}
        return {**super().state_dict(), **position, "phi": cloned(self.phi), "m": cloned(self.m)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.round, self.local_steps = state["round"], state["local_steps"]
        copied(state["phi"], self.phi)
        copied(state["m"], self.m)
        self.resume(self.round, f"step {self.round * self.strategy.period + self.local_steps}")
