"""DiLoCo: the averaged displacement of a round of local steps is the gradient of an outer Nesterov step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import blocks, cloned, copied
from polyrhythm.strategies.rounds import Rounds, RoundsWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class DiLoCo(Rounds):
    r"""Local training; every `period` steps the mean displacement drives an outer Nesterov step (DiLoCo).

    $$
    \Delta &= \frac{1}{N} \sum_i (\theta - \theta_i) \\
    m &\leftarrow \beta m + \Delta, \qquad \theta \leftarrow \theta - \gamma (\Delta + \beta m)
    $$

    All workers began the round at $\theta$, and worker $i$ ended it at $\theta_i$. The state of the script's
    optimizer (AdamW in the paper) and weight decay stay with each worker. Steps left over at the end make one
    more outer step.

    - `lr`: the outer learning rate $\gamma$
    - `beta`: the outer momentum $\beta$

    >>> import polyrhythm as pr
    >>> pr.parse("diloco:100+bf16").traits.sync_period
    100
    """

    name: ClassVar[str] = "diloco"
    codecs: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of Language Models"
    )

    period: int = 500
    lr: float = 0.7
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr < math.inf:
            raise UsageError("lr must be a finite number above 0")
        if not 0 <= self.beta < 1:
            raise UsageError("beta must be 0 or more, and below 1")

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return DiLoCoWorker(self, node, replica, group)


class DiLoCoWorker(RoundsWorker):
    strategy: DiLoCo

    def __init__(self, strategy: DiLoCo, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.theta: Sequence[Tensor] = ()  # needs no memory between two rounds
        self.m = replica.buffer()

    def step(self) -> None:
        if self.local_steps == 0:
            self.theta = copied(self.replica.parameters, self.theta or self.replica.scratch())
        super().step()

    def synchronize(self, full: bool = False) -> None:
        try:
            delta = self._mean_delta(self.replica.parameters, full)  # in their memory, to save a vector
        except BaseException:
            copied(self.theta, self.replica.parameters)  # the script may save the model
            raise
        self._outer_step(self.theta, self.m, delta, delta)
        super().synchronize(full)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if not self.local_steps:
            self.theta = ()  # all are at theta; freed here only, because new memory takes time
            return self.replica.parameters
        delta = self._mean_delta(self.replica.consensus_vectors(), full=True)
        return self._outer_step(self.theta, self.m, delta, delta, preview=True)

    def _mean_delta(self, into: Sequence[Tensor], full: bool) -> Sequence[Tensor]:
        import torch

        self.reducer.check_update()
        for theta, w, place in zip(self.theta, self.replica.parameters, into, strict=True):
            torch.sub(theta, w, out=place)
        self.reducer.mean(into, full=full)
        return into

    def _outer_step(
        self,
        theta: Sequence[Tensor],
        m: Sequence[Tensor],
        delta: Sequence[Tensor],
        into: Sequence[Tensor],
        preview: bool = False,
    ) -> Sequence[Tensor]:
        """One outer step from theta. Writes the new theta to `into`, and changes m unless `preview`."""
        lr, beta = self.strategy.lr, self.strategy.beta
        for start, momentum, change, place in blocks(theta, m, delta, into):
            after = (momentum.clone() if preview else momentum).mul_(beta).add_(change)
            step = change.add(after, alpha=beta)
            place.copy_(start).sub_(step, alpha=lr)
        return into

    def state_dict(self) -> State:
        return {**super().state_dict(), "theta": cloned(self.theta), "m": cloned(self.m)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state["theta"]:
            self.theta = copied(state["theta"], self.theta or self.replica.scratch())
        copied(state["m"], self.m)
