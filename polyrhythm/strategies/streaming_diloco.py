"""Streaming DiLoCo: fragments of the model take turns, and are exchanged while the workers compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied, cut, difference, split
from polyrhythm.strategies.diloco import DiLoCo, DiLoCoWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    r"""DiLoCo in fragments: one part of the model is exchanged at a time, while training continues.

    With a `period` of $H$ steps, the exchange of the next of $P$ fragments begins every $H/P$ steps; its
    result is used $\tau$ steps later. No worker waits unless the exchange takes longer than that.

    $$
    \Delta_p &= \frac{1}{N} \sum_i (\theta_p - w_{i,p}) \\
    m_p &\leftarrow \beta m_p + \Delta_p \\
    \theta_p &\leftarrow \theta_p - \gamma (\Delta_p + \beta m_p) \\
    w_{i,p} &\leftarrow (1 - \alpha) \theta_p + \alpha w_{i,p}
    $$

    For fragment $p$, $w_{i,p}$ are the parameters of worker $i$ and $\theta_p$ those that all share;
    $\gamma$ is the outer learning rate `lr` and $\beta$ the outer momentum `beta`. $\Delta_p$ is taken when
    the exchange begins, the rest follows $\tau$ steps later. The next $\Delta_p$ counts from $\theta_p$.
    One fragment with `overlap=0` and `mix=0` is `diloco`.

    - `fragments`: the number of fragments $P$; it divides `period`
    - `overlap`: the number of steps $\tau$ from the start of an exchange to the use of its result
    - `mix`: the share $\alpha$ of a worker's own parameters that it keeps

    >>> import polyrhythm as pr
    >>> pr.parse("streaming-diloco:100,fragments=5,overlap=2").traits.sync_period
    20
    """

    name: ClassVar[str] = "streaming-diloco"
    paper: ClassVar[str] = "Douillard et al. 2025, Streaming DiLoCo with Overlapping Communication"

    period: int = 100
    fragments: int = 4
    overlap: int = 1
    mix: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments < 1:
            raise UsageError("fragments must be 1 or more")
        if self.period % self.fragments:
            raise UsageError(
                f"fragments must divide period, so that each has its turn: {self.fragments} does not divide "
                f"{self.period}"
            )
        if not 0 <= self.overlap < self.every:
            raise UsageError(
                f"overlap must be from 0 to {self.every - 1}: a fragment is begun every {self.every} steps, "
                "when the one before has been joined"
            )
        if not 0 <= self.mix < 1:
            raise UsageError("mix must be 0 or more, and below 1")

    @property
    def every(self) -> int:
        """Steps from the beginning of one fragment to that of the next."""
        return self.period // self.fragments

    @property
    def traits(self) -> Traits:
        # Its workers are never equal, so they cannot be one site.
        return replace(super().traits, sync_period=self.every, sync_delay=self.overlap, inside_sites=False)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return StreamingDiLoCoWorker(self, node, replica, group)


class UnderWay(NamedTuple):
    """A fragment whose exchange has begun."""

    start: int
    stop: int
    residual: list[Tensor]  # of the codec before this exchange
    wait: Callable[[], None]


class StreamingDiLoCoWorker(DiLoCoWorker):
    strategy: StreamingDiLoCo

    def __init__(self, strategy: StreamingDiLoCo, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.steps = 0
        self._delta = replica.buffer()
        self._under_way: UnderWay | None = None

    def step(self) -> None:
        if self.steps == 0:
            self.theta = copied(self.replica.parameters, self.replica.scratch())
        self.replica.apply()
        self.steps += 1
        every = self.strategy.every
        if self.steps % every == 0:
            self._begin()
        if self.steps >= every and self.steps % every == self.strategy.overlap:
            self._join(self.replica.parameters, self.theta, self.m)
            self._under_way = None

    @property
    def replicas_equal(self) -> bool:
        return False  # at any time only some fragments are

    def finish(self) -> None:
        if self.steps:
            self._settle(self.replica.parameters, self.theta, self.m)
            self._under_way = None
            copied(self.theta, self.replica.parameters)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if not self.steps or final:
            return self.replica.parameters
        w = cloned(self.replica.parameters)
        theta = copied(self.theta, self.replica.consensus_vectors())
        self._settle(w, theta, cloned(self.m))
        return theta

    def _begin(self) -> None:
        """Starts to exchange the change of the next fragment since theta."""
        number = self.steps // self.strategy.every - 1
        ranges = split(self.replica.layout.total, self.strategy.fragments)
        start, stop = ranges[number % self.strategy.fragments]
        self.reducer.check_update(start, stop)
        theta, w, delta = (
            cut(each, start, stop) for each in (self.theta, self.replica.parameters, self._delta)
        )
        sent = difference(theta, w, delta)
        residual = cloned(self._residual(start, stop))
        begun = self.reducer.begin(sent, start=start, stop=stop)
        self._under_way = UnderWay(start, stop, residual, _once(begun))

    def _residual(self, start: int, stop: int) -> Sequence[Tensor]:
        """The codec's residual for a fragment."""
        sender = self.reducer.sender
        if sender is None or not sender.codec.feedback or not self.strategy.mix:
            return ()
        return cut(sender.residual, start, stop)

    def _join(self, w: Sequence[Tensor], theta: Sequence[Tensor], m: Sequence[Tensor]) -> None:
        """Waits for the fragment that is under way, and takes its outer step on these vectors."""
        assert self._under_way is not None
        start, stop, residual, wait = self._under_way
        wait()
        mix = self.strategy.mix
        own, outer, momentum, delta = (cut(each, start, stop) for each in (w, theta, m, self._delta))
        self._outer_step(outer, momentum, delta, outer)
        # The residual will be sent later: it must not be in the worker's own part as well.
        for mine, before, now in zip(own, residual, self._residual(start, stop), strict=False):
            mine.add_(now - before)
        for mine, agreed in zip(own, outer, strict=True):
            if mix:
                mine.mul_(mix).add_(agreed, alpha=1 - mix)
            else:
                mine.copy_(agreed)

    def _settle(self, w: Sequence[Tensor], theta: Sequence[Tensor], m: Sequence[Tensor]) -> None:
        """Joins the fragment that is under way; takes an outer step of each that has moved since its last."""
        strategy = self.strategy
        if self._under_way is not None:
            self._join(w, theta, m)
        for number, (start, stop) in enumerate(split(self.replica.layout.total, strategy.fragments)):
            turn = (self.steps // strategy.every - 1) % strategy.fragments
            if self.steps % strategy.every == 0 and number == turn:
                continue  # it has just been exchanged
            outer, own, momentum = (cut(each, start, stop) for each in (theta, w, m))
            delta = difference(outer, own, cloned(own))
            self.reducer.mean([part for part in delta if part.numel()], full=True)
            self._outer_step(outer, momentum, delta, outer)

    def state_dict(self) -> State:
        """Waits for the fragment that is under way: its mean is saved, and used when it is due."""
        state = {**super().state_dict(), "steps": self.steps, "under_way": None}
        state["parameters"] = cloned(self.replica.parameters)
        if self._under_way is not None:
            start, stop, residual, wait = self._under_way
            wait()
            state["under_way"] = (start, stop, cloned(residual), cloned(cut(self._delta, start, stop)))
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copied(state["parameters"], self.replica.parameters)
        self.steps = state["steps"]
        if state["under_way"] is not None:
            start, stop, residual, delta = state["under_way"]
            copied(delta, cut(self._delta, start, stop))
            self._under_way = UnderWay(start, stop, cloned(residual), lambda: None)


def _once(wait: Callable[[], None]) -> Callable[[], None]:
    """Waits when it is first called."""
    waits = [wait]

    def once() -> None:
        if waits:
            waits.pop()()

    return once
