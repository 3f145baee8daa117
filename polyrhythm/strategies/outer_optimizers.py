"""Workers that step alone, and an outer optimizer that takes what they have found as its gradient.

Where a round began, w_prev or theta, is kept in a buffer. The way from there to the mean of the workers is
the outer gradient; all compute the same outer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.collectives.arithmetic import cut, split
from polyrhythm.core.errors import UsageError
from polyrhythm.strategies.local_sgd import Averaging, Rounds
from polyrhythm.strategies.reduce_ops import begin_mean, check_way, mean, numbers
from polyrhythm.strategies.server.server_loop import copied

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.core.strategy import Strategy
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class SlowMo(Averaging):
    """Local SGD, with a slow momentum over the averages: each round goes on where the last ones went.

    u <- beta u + (w_prev - w_mean) / lr, w <- w_prev - alpha lr u, with the learning rate of each parameter
    group, in the mean over the workers if theirs differ. alpha = 1, beta = 0 is `local`.

    >>> import polyrhythm as pr
    >>> pr.parse("slowmo:12,beta=0.7").beta
    0.7
    """

    name: ClassVar[str] = "slowmo"
    remembers: ClassVar[tuple[str, ...]] = ("slow momentum",)
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

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        if not all("lr" in group for group in groups):
            raise UsageError(f"{self} takes slow steps by the optimizer's lr, and this one has none")

    def step(self, node: Node, replica: Replica) -> None:
        if self.alone(replica) == 1:
            copied(replica.parameters, replica.buffer("w_prev"))
        super().step(node, replica)

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        super().exchange(node, replica, full)
        self._move(replica, replica.parameters, replica.buffer("slow momentum"))

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        shown = super().consensus(node, replica)
        if self.alone(replica) > 0:
            self._move(replica, shown, [part.clone() for part in replica.buffer("slow momentum")])
        return shown

    def mean(
        self,
        node: Node,
        replica: Replica,
        vectors: Sequence[Tensor],
        *flags: Tensor,
        full: bool = False,
    ) -> None:
        # All take the same slow step, or they would part for good: so they take it by the same rates.
        rates = numbers(*(float(group["lr"]) for group in replica.optimizer.param_groups))
        super().mean(node, replica, vectors, *flags, rates, full=full)
        replica.notes["rates"] = rates.tolist()

    def _move(self, replica: Replica, w_mean: Sequence[Tensor], momentum: Sequence[Tensor]) -> None:
        """The slow step from the mean, in place, written so that what has no weight changes no bit."""
        w_prev = replica.buffer("w_prev")
        for span in replica.spans(whole=True):
            lr = replica.notes["rates"][span.group]
            w, u = span.of(w_mean), span.of(momentum)
            difference = span.of(w_prev) - w
            if self.alpha != 1:
                w.add_(difference, alpha=1 - self.alpha)
            if self.beta:
                u.mul_(self.beta)
                w.sub_(u, alpha=self.alpha * lr)
                if lr:
                    u.add_(difference, alpha=1 / lr)


@dataclass(frozen=True)
class DiLoCo(Rounds):
    """Workers train alone for `period` steps; the mean way they went is one step of Nesterov's momentum.

    delta = mean_i(theta - theta_i), m <- beta m + delta, theta <- theta - lr (delta + beta m). The state of
    the script's own optimizer, AdamW in the paper, stays with its worker, and so does weight decay. A codec
    makes delta shorter. Steps left over at the end make one more outer step.

    >>> import polyrhythm as pr
    >>> pr.parse("diloco:100+bf16").lr
    0.7
    """

    name: ClassVar[str] = "diloco"
    remembers: ClassVar[tuple[str, ...]] = ("m",)
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

    def step(self, node: Node, replica: Replica) -> None:
        if self.alone(replica) == 1:
            copied(replica.parameters, replica.buffer("theta"))
        super().step(node, replica)

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        delta = self._delta(node, replica, full)  # if this fails, theta and m are as they were
        self._move(replica.buffer("theta"), replica.buffer("m"), delta, replica.parameters)
        super().exchange(node, replica, full)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        if self.alone(replica) <= 0:
            return replica.parameters
        delta, m = (
            self._delta(node, replica, full=True),
            [part.clone() for part in replica.buffer("m")],
        )
        return self._move(replica.buffer("theta"), m, delta, replica.buffer("consensus"))

    def _delta(self, node: Node, replica: Replica, full: bool) -> Sequence[Tensor]:
        check_way(node, replica, self.codec)
        delta = _difference(replica.buffer("theta"), replica.parameters, replica.buffer("delta"))
        mean(node, replica, None if full else self.codec, delta)
        return delta

    def _move(
        self, theta: Sequence[Tensor], m: Sequence[Tensor], delta: Sequence[Tensor], into: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """One outer step from theta: m is changed in place, and what theta becomes is written `into`."""
        for start, momentum, change, place in zip(theta, m, delta, into, strict=True):
            momentum.mul_(self.beta).add_(change)
            place.copy_(start).sub_(change.add(momentum, alpha=self.beta), alpha=self.lr)
        return into


@dataclass(frozen=True)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in `fragments` that take turns, each sent while the next `overlap` steps are computed.

    Every H/P steps the next of P fragments is begun, and joined tau steps later: theta_p makes its outer
    step, and the worker goes on from (1 - mix) theta_p + mix w_p. The next delta counts from theta_p. So the
    network carries 1/P at a time, and nobody waits for it if it takes no longer than tau steps.

    >>> import polyrhythm as pr
    >>> pr.parse("streaming-diloco:100,fragments=5,overlap=2").fragments
    5
    """

    name: ClassVar[str] = "streaming-diloco"
    inside: ClassVar[bool] = False  # its workers are never equal
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
        """A fragment is begun every so many steps."""
        return self.period // self.fragments

    @property
    def beat(self) -> int | None:
        return self.every

    def check_inside(self, within: Strategy) -> None:
        super().check_inside(within)
        if within.beat and self.overlap % within.beat:
            raise UsageError(
                "what sites have agreed on must come when the workers of a site are together: overlap must "
                f"be a multiple of {within.beat} too, and not {self.overlap}"
            )

    def step(self, node: Node, replica: Replica) -> None:
        if replica.steps == 1:
            copied(replica.parameters, replica.buffer("theta"))
        replica.apply()
        if replica.steps % self.every == 0:
            self._begin(node, replica)
        if replica.steps >= self.every and replica.steps % self.every == self.overlap:
            self._join(replica, replica.parameters, replica.buffer("theta"), replica.buffer("m"))
            replica.notes.pop("under way")

    def finish(self, node: Node, replica: Replica) -> None:
        if replica.steps:
            theta = replica.buffer("theta")
            self._settle(node, replica, replica.parameters, theta, replica.buffer("m"))
            replica.notes.pop("under way", None)
            copied(theta, replica.parameters)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        if not replica.steps:
            return replica.parameters
        theta = copied(replica.buffer("theta"), replica.buffer("consensus"))
        copies = [[part.clone() for part in each] for each in (replica.parameters, replica.buffer("m"))]
        self._settle(node, replica, copies[0], theta, copies[1])
        return theta

    def _begin(self, node: Node, replica: Replica) -> None:
        """Sends how far the next fragment has come from theta."""
        number = replica.steps // self.every - 1
        start, stop = split(replica.layout.total, self.fragments)[number % self.fragments]
        theta, w, delta = (
            cut(each, start, stop)
            for each in (replica.buffer("theta"), replica.parameters, replica.buffer("delta"))
        )
        check_way(node, replica, self.codec, start=start, stop=stop)
        sent = _difference(theta, w, delta)
        owed = [part.clone() for part in self._owed(replica, start, stop)]
        begun = begin_mean(node, replica, self.codec, sent, start=start, stop=stop)
        replica.notes["under way"] = (start, stop, owed, _once(begun))

    def _owed(self, replica: Replica, start: int, stop: int) -> Sequence[Tensor]:
        """What the codec has not sent of a fragment."""
        if self.codec is None or not self.codec.feedback or not self.mix:
            return ()
        return cut(replica.owed, start, stop)

    def _join(
        self, replica: Replica, w: Sequence[Tensor], theta: Sequence[Tensor], m: Sequence[Tensor]
    ) -> None:
        """Waits for the fragment that is under way; its outer step is made on these vectors."""
        start, stop, owed, wait = replica.notes["under way"]
        wait()
        own, outer, momentum, delta = (
            cut(each, start, stop) for each in (w, theta, m, replica.buffer("delta"))
        )
        self._move(outer, momentum, delta, outer)
        # What was not sent now waits to be sent: it may not be in the worker's own part as well.
        for mine, before, now in zip(own, owed, self._owed(replica, start, stop), strict=False):
            mine.add_(now - before)
        for mine, agreed in zip(own, outer, strict=True):
            if self.mix:
                mine.mul_(self.mix).add_(agreed, alpha=1 - self.mix)
            else:
                mine.copy_(agreed)

    def _settle(
        self,
        node: Node,
        replica: Replica,
        w: Sequence[Tensor],
        theta: Sequence[Tensor],
        m: Sequence[Tensor],
    ) -> None:
        """Joins what is under way, and makes one more outer step of all fragments with steps left over."""
        if "under way" in replica.notes:
            self._join(replica, w, theta, m)
        for number, (start, stop) in enumerate(split(replica.layout.total, self.fragments)):
            turn = (replica.steps // self.every - 1) % self.fragments
            if replica.steps % self.every == 0 and number == turn:
                continue  # it has just been exchanged
            outer, own, momentum = (cut(each, start, stop) for each in (theta, w, m))
            delta = _difference(outer, own, [part.clone() for part in own])
            mean(node, replica, None, [part for part in delta if part.numel()])
            self._move(outer, momentum, delta, outer)


def _difference(one: Sequence[Tensor], other: Sequence[Tensor], into: Sequence[Tensor]) -> Sequence[Tensor]:
    for left, right, place in zip(one, other, into, strict=True):
        place.copy_(left).sub_(right)
    return into


def _once(wait: Callable[[], None]) -> Callable[[], None]:
    """Waits when it is first called."""
    waits = [wait]

    def once() -> None:
        if waits:
            waits.pop()()

    return once
