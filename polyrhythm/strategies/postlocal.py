"""Post-local SGD: all-reduce at first, local SGD once the learning rate has fallen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.strategies.reduce_ops import in_buckets, numbers
from polyrhythm.strategies.rounds import Averaging, AveragingWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class PostLocal(Averaging):
    r"""All-reduce until the learning rate first falls, local SGD from then on (post-local SGD).

    $$
    w_i &\leftarrow w_i - \frac{\eta}{N} \sum_j g_j(w_j) && \text{up to step } t_0 \\
    w_i &\leftarrow w_i - \eta g_i(w_i), \text{ averaged in every } H\text{-th step} && \text{from then on}
    $$

    Up to $t_0$ it is `allreduce`, afterwards `local:period`. The first worker to see a lower learning rate
    tells the others with its next gradient, so all change after the same step.

    - `after`: change after this many steps; 0: when the learning rate first falls

    >>> import polyrhythm as pr
    >>> pr.parse("postlocal:16,after=1000").after
    1000
    """

    name: ClassVar[str] = "postlocal"
    paper: ClassVar[str] = "Lin, Stich, Patel, Jaggi 2020, Don't Use Large Mini-Batches, Use Local SGD"

    period: int = 8
    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after < 0:
            raise UsageError("after must be a number of steps, or 0: until the learning rate first falls")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, inside_sites=False, between_sites=False)  # at first it has no rounds

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        if not self.after and not all("lr" in group for group in replica.optimizer.param_groups):
            raise UsageError(f"{self} waits until lr falls, but this optimizer has no lr; set after=STEPS")
        return (PostLocalInBuckets if in_buckets(self.codec) else PostLocalWorker)(self, node, replica, group)


class PostLocalWorker(AveragingWorker):
    """Averages gradients at first, then parameters."""

    strategy: PostLocal

    def __init__(self, strategy: PostLocal, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.steps = 0
        self.local = False  # True once it has switched to local steps
        self.fell: int | None = None  # the step at which a learning rate was seen to fall
        self._rates: list[float] = []
        self._falls = numbers(0.0)  # a flag that travels with the gradient

    @property
    def averages_gradients(self) -> bool:
        after = self.strategy.after or (math.inf if self.fell is None else self.fell)
        return not self.local and self.steps < after

    def on_gradient(self) -> None:
        if not self.averages_gradients:
            self._turn_local()
            super().on_gradient()
            return
        self.mean_gradient()
        # This gradient is for the next step; another batch may still be added to it.
        if self._falls.item():
            self.fell = self.steps + 1

    def mean_gradient(self) -> None:
        self.reducer.mean_gradient(self.replica.gradients.present, self.falls())

    def step(self) -> None:
        together = self.averages_gradients
        self.steps += 1
        if together:
            self.replica.apply()
        else:
            super().step()

    def falls(self) -> Tensor:
        """A flag: 1 if the learning rate is lower than before."""
        rates = [float(group.get("lr", 0.0)) for group in self.replica.optimizer.param_groups]
        before, self._rates = self._rates or rates, rates
        lower = any(now < then for now, then in zip(rates, before, strict=True))
        self._falls = numbers(not self.strategy.after and lower)
        return self._falls

    def _turn_local(self) -> None:
        """Turns the residual of gradients into a residual of updates."""
        import torch

        sender = self.reducer.sender
        if self.local:
            return
        self.local = True
        if sender is None or not sender.codec.feedback:
            return
        # Only of SGD is it known how far a gradient leads; for other optimizers the residual is dropped.
        known = isinstance(self.replica.optimizer, torch.optim.SGD)
        rates = sender.rates  # the present ones may have changed since
        for span in self.replica.spans(whole=True):
            uphill = span.settings.get("maximize", False)
            rate = (rates[span.group] if uphill else -rates[span.group]) if known else 0.0
            span.of(sender.residual).mul_(rate)

    def state_dict(self) -> State:
        change = {"steps": self.steps, "local": self.local, "fell": self.fell, "rates": list(self._rates)}
        return {**super().state_dict(), **change}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.steps, self.local, self.fell = state["steps"], state["local"], state["fell"]
        self._rates = list(state["rates"])


class PostLocalInBuckets(PostLocalWorker):
    """Averages gradients bucket by bucket while backward runs."""

    def on_bucket(self, gradient: Sequence[Tensor], last: bool) -> None:
        if self.averages_gradients:
            flags = (self.replica.gradients.present, self.falls()) if last else ()
            self.reducer.begin_bucket(gradient, *flags)

    def mean_gradient(self) -> None:
        self.reducer.join_buckets()
