"""SlowMo: a slow momentum over the averages of local SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, cloned, copied
from polyrhythm.strategies.reduce_ops import numbers
from polyrhythm.strategies.rounds import Averaging, AveragingWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class SlowMo(Averaging):
    r"""Local SGD with a slow momentum on top of the averages (SlowMo).

    $$
    u &\leftarrow \beta u + \frac{1}{\eta} (w_{\text{prev}} - \bar{w}) \\
    w &\leftarrow w_{\text{prev}} - \alpha \eta u
    $$

    A round began at $w_{\text{prev}}$ and ended at the mean $\bar{w}$ of all workers. $\eta$ is the learning
    rate of each parameter group, averaged over the workers. With $\alpha = 1$ and $\beta = 0$ it is `local`.

    - `alpha`: the slow learning rate
    - `beta`: the slow momentum

    >>> import polyrhythm as pr
    >>> pr.parse("slowmo:12,beta=0.7").beta
    0.7
    """

    name: ClassVar[str] = "slowmo"
    paper: ClassVar[str] = (
        "Wang, Tantia, Ballas, Rabbat 2020, SlowMo: Improving Communication-Efficient Distributed SGD with "
        "Slow Momentum"
    )

    period: int = 12
    alpha: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < math.inf:
            raise UsageError("alpha must be a finite number above 0")
        if not 0 <= self.beta < 1:
            raise UsageError("beta must be 0 or more, and below 1")

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        if not all("lr" in settings for settings in replica.optimizer.param_groups):
            raise UsageError(f"{self} scales slow steps by the optimizer's lr, but this optimizer has none")
        return SlowMoWorker(self, node, replica, group)


class SlowMoWorker(AveragingWorker):
    strategy: SlowMo

    def __init__(self, strategy: SlowMo, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.w_prev: Sequence[Tensor] = ()  # needs no memory between two rounds
        self.u = replica.buffer()
        self._rates: list[float] = []  # of all workers, in the mean

    def step(self) -> None:
        if self.local_steps == 0:
            self.w_prev = copied(self.replica.parameters, self.w_prev or self.replica.scratch())
        super().step()

    def synchronize(self, full: bool = False) -> None:
        super().synchronize(full)
        self._slow_step(self.replica.parameters, self.u)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        consensus = super().consensus(final)
        if self.local_steps:
            self._slow_step(consensus, self.u, preview=True)
        else:
            self.w_prev = ()  # freed here only, because new memory takes time
        return consensus

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        # All must take the same slow step, or they would stay different: so they average their rates.
        rates = numbers(*(float(group["lr"]) for group in self.replica.optimizer.param_groups))
        super().mean(vectors, *flags, rates, full=full)
        self._rates = rates.tolist()

    def _slow_step(self, w_mean: Sequence[Tensor], momentum: Sequence[Tensor], preview: bool = False) -> None:
        """The slow step from the mean, in place, written so that a term without weight changes no bit.

        It changes the momentum unless `preview`.
        """
        alpha, beta = self.strategy.alpha, self.strategy.beta
        for span in self.replica.spans(whole=True):
            lr = self._rates[span.group]
            parts = [[span.of(each)] for each in (self.w_prev, w_mean, momentum)]
            for w_prev, w, before in blocks(*parts):
                change = w_prev - w
                if alpha != 1:
                    w.add_(change, alpha=1 - alpha)
                if beta:
                    u = (before.clone() if preview else before).mul_(beta)
                    w.sub_(u, alpha=alpha * lr)
                    if lr:
                        u.add_(change, alpha=1 / lr)

    def state_dict(self) -> State:
        return {**super().state_dict(), "w_prev": cloned(self.w_prev), "u": cloned(self.u)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state["w_prev"]:
            self.w_prev = copied(state["w_prev"], self.w_prev or self.replica.scratch())
        copied(state["u"], self.u)
