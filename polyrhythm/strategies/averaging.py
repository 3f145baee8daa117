"""Workers that step alone and average their parameters now and then."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.errors import PolyrhythmError, UsageError
from polyrhythm.strategies.allreduce import agree, begin_part, join_parts, mean, numbers
from polyrhythm.strategies.desk import copied
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Node
    from polyrhythm.replica import Replica


ROUNDS = 5  # from the median of so many a period is chosen, so that one that took long does not decide


@dataclass(frozen=True)
class Rounds(Strategy):
    """Workers step alone for a round of `period` steps, then exchange. What they exchange is up to each."""

    main: ClassVar[str | None] = "period"

    period: Literal["auto"] | int = 8

    def __post_init__(self) -> None:
        if self.period != "auto" and self.period < 1:
            raise UsageError("period must be 1 or more")

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
        if self.due(node, replica):
            self.exchange(node, replica)

    def finish(self, node: Node, replica: Replica) -> None:
        if self.alone(replica) > 0:
            self.exchange(node, replica)

    def alone(self, replica: Replica) -> int:
        """How many steps this worker has taken since all were together."""
        return replica.steps - int(replica.notes.get("together", 0))

    def due(self, node: Node, replica: Replica) -> bool:
        """Whether the step that has just been taken is the last of its round."""
        assert self.period != "auto"
        return self.alone(replica) >= self.period

    def exchange(self, node: Node, replica: Replica) -> None:
        """Brings all workers together."""
        replica.notes["together"] = replica.steps


@dataclass(frozen=True)
class Averaging(Rounds):
    """At the end of a round all take the mean of their parameters, and decide what becomes of momentum.

    `momentum` stands for all that the optimizer keeps for each element, Adam's two moments too. Each worker
    keeps its own, or all take the average, or it is reset: each optimizer goes on as a new one.
    """

    momentum: Literal["keep", "average", "reset"] = "keep"

    def exchange(self, node: Node, replica: Replica) -> None:
        names = self._moment_names(node, replica) if self.momentum == "average" else []
        if names:
            moments, held = replica.moments.flat(names)
            self.mean(node, replica, [*replica.parameters, *moments], held)
            replica.moments.adopt(names)
        else:
            self.mean(node, replica, replica.parameters)
        if self.momentum == "reset":
            replica.moments.forget()
        super().exchange(node, replica)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        if self.alone(replica) <= 0:
            return replica.parameters
        average = copied(replica.parameters, replica.buffer("average"))
        self.mean(node, replica, average)
        return average

    def mean(self, node: Node, replica: Replica, vectors: Sequence[Tensor], *flags: Tensor) -> None:
        """Replaces each vector by its mean over all workers."""
        mean(node, None, vectors, *flags)

    def _moment_names(self, node: Node, replica: Replica) -> list[str]:
        """What all optimizers keep. They agree on it once, for some may not have taken a step yet."""
        if "moments" not in replica.notes:
            mine = replica.moments.names()
            number = float(zlib.crc32(" ".join(mine).encode())) if mine else 0.0
            least, most = agree(node, number, -number, op="min")
            if least == 0:
                return []  # somebody has nothing to average yet
            if least != -most:
                raise PolyrhythmError(
                    f"{self}: {node.me}'s optimizer keeps {', '.join(mine)}, and another's something else"
                )
            replica.notes["moments"] = mine
        return list(replica.notes["moments"])


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """Every worker steps alone; every `period` steps all average their parameters (local SGD).

    w_i <- w_i - lr * g_i, and every H-th step w_i <- mean_j w_j. Between averages nothing is sent.
    `period=auto` chooses H from `shortest` to `longest` after each average, so that averaging takes
    at most the share `overhead` of the time for steps: H = ceil(averaging / (overhead * step)). Both are
    medians of what was measured last, so that a pause between two steps changes nothing.

    >>> import polyrhythm as pr
    >>> pr.parse("local:16").period
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
            raise UsageError("shortest, longest and overhead are for period=auto")
        if not 1 <= self.shortest <= self.longest:
            raise UsageError("shortest must be 1 or more, and longest no less than it")
        if not 0 < self.overhead < math.inf:
            raise UsageError(
                "overhead must be a finite number above 0: it is the share of time that averaging may take"
            )

    def start(self, node: Node, replica: Replica) -> None:
        super().start(node, replica)
        replica.notes["since"] = node.now()

    def due(self, node: Node, replica: Replica) -> bool:
        if self.period != "auto":
            return super().due(node, replica)
        now, since = node.now(), replica.notes["since"]  # a step has ended here
        replica.notes.setdefault("took", []).append(now - since)
        replica.notes["since"] = now
        return self.alone(replica) >= int(replica.notes.get("period", self.shortest))

    def exchange(self, node: Node, replica: Replica) -> None:
        if self.period == "auto":
            replica.notes["figures"] = self._figures(node, replica)
        super().exchange(node, replica)
        if self.period == "auto":
            self._choose(node, replica, replica.notes.pop("figures"))
            replica.notes["since"] = node.now()

    def mean(self, node: Node, replica: Replica, vectors: Sequence[Tensor], *flags: Tensor) -> None:
        if "figures" not in replica.notes:
            return super().mean(node, replica, vectors, *flags)
        begun = node.now()
        super().mean(node, replica, vectors, *flags, replica.notes["figures"])
        replica.notes["communication"] = node.now() - begun

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        begun = node.now()
        shown = super().consensus(node, replica)
        replica.notes["since"] += node.now() - begun  # it is no part of a step
        return shown

    def _figures(self, node: Node, replica: Replica) -> Tensor:
        """What this worker has measured, at its place among all: they travel with the average itself.

        So what the average before took, for this one is not over yet, and what the steps of this round took:
        their median, for the script may have paused in one of them to evaluate or to save.
        """
        figures = numbers(*[0.0] * (2 * len(node.workers)))
        figures[2 * node.rank] = replica.notes.get("communication", 0.0)
        figures[2 * node.rank + 1] = statistics.median(replica.notes.pop("took"))
        return figures

    def _choose(self, node: Node, replica: Replica, figures: Tensor) -> None:
        """From what all have measured, in the mean of which each has an N-th of its own."""
        told = (figures * len(node.workers)).tolist()
        averages, steps = (replica.notes.setdefault(name, []) for name in ("averages", "rounds"))
        if steps:  # at the first average nobody has measured one yet
            # The last to come has waited for nobody: the least time is what the averaging itself takes.
            averages.append(min(told[::2]))
        steps.append(max(told[1::2]))
        del averages[:-ROUNDS], steps[:-ROUNDS]
        if not averages:
            return
        communication, step = statistics.median_low(averages), statistics.median_low(steps)
        wanted = communication / (self.overhead * step) if step > 0 else math.inf
        # A difference of two clock readings is a little off, and ceil would make a whole step of it.
        period = math.ceil(min(max(wanted - 1e-6, self.shortest), self.longest))
        if period != replica.notes.get("period"):
            node.log("period", period=period, communication_s=communication, step_s=step)
        replica.notes["period"] = period


@dataclass(frozen=True)
class Average(Averaging):
    """Every worker trains on its share; every `period` batches all take the mean weighted by examples.

    w <- sum_i n_i w_i / sum_i n_i, with n_i the examples that worker i trained on since the last average.

    >>> import polyrhythm as pr
    >>> pr.parse("average:5,momentum=average").period
    5
    """

    name: ClassVar[str] = "average"
    paper: ClassVar[str] = (
        "McDonald, Hall, Mann 2010, Distributed Training Strategies for the Structured Perceptron"
    )
    weighs: ClassVar[bool] = True

    period: int = 8

    def start(self, node: Node, replica: Replica) -> None:
        super().start(node, replica)
        copied(replica.parameters, replica.buffer("base"))

    def exchange(self, node: Node, replica: Replica) -> None:
        super().exchange(node, replica)
        replica.notes["averaged"] = replica.samples
        copied(replica.parameters, replica.buffer("base"))

    def mean(self, node: Node, replica: Replica, vectors: Sequence[Tensor], *flags: Tensor) -> None:
        mine = replica.samples - replica.notes.get("averaged", 0)
        workers = range(len(node.workers))
        counts = agree(node, *(mine if rank == node.rank else 0.0 for rank in workers), op="sum")
        if min(counts) == max(counts):
            return super().mean(node, replica, vectors, *flags)
        # Weighed is how far each came, so that what nobody has moved stays where it is, to the last bit.
        weight, base = mine * len(counts) / sum(counts), replica.buffer("base")
        for vector, common in zip_longest(vectors, base):
            vector.mul_(weight) if common is None else vector.sub_(common).mul_(weight)
        super().mean(node, replica, vectors, *flags)
        for vector, common in zip(vectors, base, strict=False):
            vector.add_(common)


@dataclass(frozen=True)
class PostLocal(Averaging):
    """All average their gradients until the learning rate first falls, from then on it is local SGD.

    With `after` the change comes after so many steps instead. Until then it is `allreduce`, and then
    `local:period`. The first to see a lower learning rate tells the others with its next gradient, so
    that all change after the same step.

    >>> import polyrhythm as pr
    >>> pr.parse("postlocal:16,after=1000").after
    1000
    """

    name: ClassVar[str] = "postlocal"
    paper: ClassVar[str] = "Lin, Stich, Patel, Jaggi 2020, Don't Use Large Mini-Batches, Use Local SGD"

    overlaps: ClassVar[bool] = True

    period: int = 8
    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after < 0:
            raise UsageError("after must be a number of steps, or 0: until the learning rate first falls")

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        if not self.after and not all("lr" in group for group in groups):
            raise UsageError(f"{self} waits until lr falls, and this optimizer has none; say after=STEPS")

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        if replica.steps < (self.after or replica.notes.get("fell", math.inf)):
            flags = (replica.present, self._falls(replica)) if last else ()
            begin_part(node, replica, None, gradient, *flags)

    def ready(self, node: Node, replica: Replica) -> None:
        if join_parts(replica):
            step = replica.steps + 1  # for which this gradient is; another batch may still be added to it
            replica.notes["together"] = step
            if replica.notes["falls"].item():
                replica.notes["fell"] = step

    def _falls(self, replica: Replica) -> Tensor:
        """A flag: whether the learning rate is lower than before."""
        rates = [float(group.get("lr", 0.0)) for group in replica.optimizer.param_groups]
        before = replica.notes.get("rates", rates)
        flag = numbers(not self.after and any(now < then for now, then in zip(rates, before, strict=True)))
        replica.notes["rates"], replica.notes["falls"] = rates, flag
        return flag
