"""Local SGD: workers take local steps and average their parameters periodically."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import PeriodChosen
from polyrhythm.core.worker import State, Worker
from polyrhythm.strategies.reduce_ops import numbers
from polyrhythm.strategies.rounds import Averaging, AveragingWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


WINDOW = 5  # rounds whose median decides a period, so that one slow round does not


@dataclass(frozen=True)
class LocalSGD(Averaging):
    r"""Workers take local steps and average their parameters every `period` steps (local SGD).

    Nothing is sent between two averages, so communication shrinks by the factor `period`.

    $$
    w_i &\leftarrow w_i - \eta g_i(w_i) && \text{in every step} \\
    w_i &\leftarrow \frac{1}{N} \sum_j w_j && \text{in every } H\text{-th step}
    $$

    The local steps are those of the script's own optimizer. `period=auto` chooses $H$ after each average, so
    that averaging takes at most the share `overhead` of the time for steps. The times of a step and of an
    average are medians of the last rounds, so a pause between two steps changes nothing.

    - `shortest`: the least period that `period=auto` may choose
    - `longest`: the largest period that `period=auto` may choose
    - `overhead`: the time for averaging, as a share of the time for steps, that `period=auto` aims at

    >>> import polyrhythm as pr
    >>> pr.parse("local:16").traits.sync_period
    16
    """

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "Stich 2018, Local SGD Converges Fast and Communicates Little"

    shortest: int = 1
    longest: int = 128
    overhead: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period != "auto" and (self.shortest, self.longest, self.overhead) != (1, 128, 0.1):
            raise UsageError("shortest, longest and overhead need period=auto")
        if not 1 <= self.shortest <= self.longest:
            raise UsageError("shortest must be 1 or more, and longest no less than it")
        if not 0 < self.overhead < math.inf:
            raise UsageError(
                "overhead must be a finite number above 0: it is the share of time that averaging may take"
            )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return (AutoPeriod if self.period == "auto" else AveragingWorker)(self, node, replica, group)


class AutoPeriod(AveragingWorker):
    """Chooses the period from the time that steps and averages take."""

    strategy: LocalSGD

    def __init__(self, strategy: LocalSGD, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.period = strategy.shortest
        self.averages: list[float] = []  # seconds of the last averages,
        self.steps: list[float] = []  # and of a step in the last rounds
        self._took: list[float] = []  # seconds of each step of this round
        self._figures: Tensor | None = None  # the workers' measurements, while they travel with an average
        self._communication = self._since = 0.0

    def start(self) -> None:
        super().start()
        self._since = self.node.now()

    def due(self) -> bool:
        now = self.node.now()
        self._took.append(now - self._since)
        self._since = now
        return self.local_steps >= self.period

    def synchronize(self, full: bool = False) -> None:
        self._figures = self._measured()
        super().synchronize(full)
        self._choose(self._figures)
        self._figures = None
        self._since = self.node.now()

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        if self._figures is None:
            return super().mean(vectors, *flags, full=full)
        begun = self.node.now()
        super().mean(vectors, *flags, self._figures, full=full)
        self._communication = self.node.now() - begun

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        begun = self.node.now()
        consensus = super().consensus(final)
        self._since += self.node.now() - begun  # it is not part of a step
        return consensus

    def _measured(self) -> Tensor:
        """This worker's measurements, at its place among those of all. They travel with the average itself.

        That is the time of the average before this one, and the median step of this round: the script may
        have paused in one of them to evaluate or to save.
        """
        figures = numbers(*[0.0] * (2 * self.group.size))
        figures[2 * self.group.rank] = self._communication
        figures[2 * self.group.rank + 1] = statistics.median(self._took)
        self._took = []
        return figures

    def _choose(self, figures: Tensor) -> None:
        """Chooses the next period from the measurements of all, whose mean holds an N-th of each."""
        told = (figures * self.group.size).tolist()
        if self.steps:  # at the first average no worker has measured one yet
            # The last worker to arrive does not wait: the least time is that of the averaging itself.
            self.averages.append(min(told[::2]))
        self.steps.append(max(told[1::2]))
        del self.averages[:-WINDOW], self.steps[:-WINDOW]
        if not self.averages:
            return
        strategy = self.strategy
        communication, step = statistics.median_low(self.averages), statistics.median_low(self.steps)
        wanted = communication / (strategy.overhead * step) if step > 0 else math.inf
        # The difference of two clock readings is a little off, and ceil would make a whole step of it.
        period = math.ceil(min(max(wanted - 1e-6, strategy.shortest), strategy.longest))
        if period != self.period or len(self.averages) == 1:
            self.node.log(PeriodChosen(period, communication, step))
        self.period = period

    def state_dict(self) -> State:
        timing = (self.period, list(self.averages), list(self.steps), list(self._took), self._communication)
        return {**super().state_dict(), "timing": timing}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.period, averages, steps, took, self._communication = state["timing"]
        self.averages, self.steps, self._took = list(averages), list(steps), list(took)
