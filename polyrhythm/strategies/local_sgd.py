"""Workers that step alone and average their parameters now and then."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.strategies.reduce_ops import (
    agree,
    begin_part,
    check_way,
    in_buckets,
    join_parts,
    mean,
    mean_gradient,
    numbers,
    rates_of_residuals,
)
from polyrhythm.strategies.server.server_loop import copied

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


ROUNDS = 5  # from the median of so many a period is chosen, so that one that took long does not decide


@dataclass(frozen=True)
class Rounds(Strategy):
    """Workers step alone for a round of `period` steps, then exchange. What they exchange is up to each."""

    main: ClassVar[str | None] = "period"
    sends: ClassVar[Literal["gradients", "ways"]] = "ways"
    inside: ClassVar[bool] = True
    between: ClassVar[bool] = True

    period: Literal["auto"] | int = 8

    def __post_init__(self) -> None:
        if self.period != "auto" and self.period < 1:
            raise UsageError("period must be 1 or more")

    @property
    def beat(self) -> int | None:
        return None if self.period == "auto" else self.period

    def check_inside(self, within: Strategy) -> None:
        # A site is one worker only when its own are together.
        if within.beat == 1:
            return
        if within.beat is None or self.beat is None:
            raise UsageError(
                "the workers of a site must be together whenever sites exchange: neither period can be auto"
            )
        if over := self.beat % within.beat:
            below, above = self.beat - over, self.beat - over + within.beat
            raise UsageError(
                f"the workers of a site must be together whenever sites exchange: every {within.beat} steps "
                f"and every {self.beat} do not fit; {f'{below} or ' if below else ''}{above} would, in place "
                f"of {self.beat}"
            )

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
        if self.due(node, replica):
            self.exchange(node, replica)

    def finish(self, node: Node, replica: Replica) -> None:
        if self.alone(replica) > 0:
            self.exchange(node, replica, full=True)

    def alone(self, replica: Replica) -> int:
        """How many steps this worker has taken since all were together."""
        return replica.steps - int(replica.notes.get("together", 0))

    def due(self, node: Node, replica: Replica) -> bool:
        """Whether the step that has just been taken is the last of its round."""
        assert self.period != "auto"
        return self.alone(replica) >= self.period

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        """Brings all workers together; `full`: for good, so that no codec may leave anything out."""
        replica.notes["together"] = replica.steps


@dataclass(frozen=True)
class Averaging(Rounds):
    """At the end of a round all take the mean of their parameters, and decide what becomes of momentum.

    `momentum` stands for all that the optimizer keeps for each element, Adam's two moments too. Each worker
    keeps its own, or all take the average, or it is reset: each optimizer goes on as a new one.

    Through a codec goes how far each has come since all were together. What it leaves out is sent with later
    rounds. An exchange for good, at the end, and one only to look at the consensus go without the codec.
    """

    codecs: ClassVar[bool] = True

    momentum: Literal["keep", "average", "reset"] = "keep"

    @property
    def same_state(self) -> bool:
        return self.momentum != "keep"

    def check_inside(self, within: Strategy) -> None:
        super().check_inside(within)
        if self.momentum == "average" and not within.same_state:
            raise UsageError(
                "momentum=average between sites needs workers of a site to have the same, and under "
                f"{within} each has its own; inside, local, average and slowmo have momentum=average too"
            )

    def ready(self, node: Node, replica: Replica) -> None:
        if (self.codec is not None or self.weighs) and self.alone(replica) == 0:  # a round begins
            copied(replica.parameters, replica.buffer("base"))

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        names = self._moment_names(node, replica) if self.momentum == "average" else []
        if names:
            moments, held = replica.moments.flat(names)
            self.mean(node, replica, [*replica.parameters, *moments], held, full=full)
            replica.moments.adopt(names)
        else:
            self.mean(node, replica, replica.parameters, full=full)
        if self.momentum == "reset":
            replica.moments.forget()
        super().exchange(node, replica, full)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        if self.alone(replica) <= 0:
            return replica.parameters
        average = copied(replica.parameters, replica.buffer("average"))
        self.mean(node, replica, average, full=True)
        return average

    def mean(
        self,
        node: Node,
        replica: Replica,
        vectors: Sequence[Tensor],
        *flags: Tensor,
        full: bool = False,
    ) -> None:
        """Replaces each vector, the parameters and whatever follows, by its mean over all workers.

        `full`: without the codec.
        """
        weight = self.weight(node, replica)
        if weight is None and self.codec is None:
            return mean(node, replica, None, vectors, *flags)
        base = replica.buffer("base")
        # What counts is how far each came, so that what nobody has moved stays where it is, to the last bit.
        own, others = vectors[: len(base)], vectors[len(base) :]
        check_way(node, replica, self.codec)
        for part, common in zip(own, base, strict=True):
            part.sub_(common)
        if weight is not None:
            for part in vectors:
                part.mul_(weight)
        mean(node, replica, None if full else self.codec, own, *others, *flags)
        for part, common in zip(own, base, strict=True):
            part.add_(common)

    def weight(self, node: Node, replica: Replica) -> float | None:
        """How much this worker counts in the mean; None if all count alike, which all must know."""
        return None

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

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        if self.period == "auto":
            replica.notes["figures"] = self._figures(node, replica)
        super().exchange(node, replica, full)
        if self.period == "auto":
            self._choose(node, replica, replica.notes.pop("figures"))
            replica.notes["since"] = node.now()

    def mean(
        self,
        node: Node,
        replica: Replica,
        vectors: Sequence[Tensor],
        *flags: Tensor,
        full: bool = False,
    ) -> None:
        if "figures" not in replica.notes:
            return super().mean(node, replica, vectors, *flags, full=full)
        begun = node.now()
        super().mean(node, replica, vectors, *flags, replica.notes["figures"], full=full)
        replica.notes["communication"] = node.now() - begun

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        begun = node.now()
        shown = super().consensus(node, replica)
        if self.period == "auto":
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

    period: int = 8

    @property
    def weighs(self) -> bool:
        return True

    def peers(self, node: Node) -> Node:
        return node.among([node.me])

    def exchange(self, node: Node, replica: Replica, full: bool = False) -> None:
        super().exchange(node, replica, full)
        replica.notes["averaged"] = replica.samples

    def weight(self, node: Node, replica: Replica) -> float | None:
        mine = replica.samples - replica.notes.get("averaged", 0)
        workers = range(len(node.workers))
        counts = agree(node, *(mine if rank == node.rank else 0.0 for rank in workers), op="sum")
        return None if min(counts) == max(counts) else mine * len(counts) / sum(counts)


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
    inside: ClassVar[bool] = False  # at first it has no rounds
    between: ClassVar[bool] = False
    remembers: ClassVar[tuple[str, ...]] = ("turned",)
    paper: ClassVar[str] = "Lin, Stich, Patel, Jaggi 2020, Don't Use Large Mini-Batches, Use Local SGD"

    period: int = 8
    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after < 0:
            raise UsageError("after must be a number of steps, or 0: until the learning rate first falls")

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        if not self.after and not all("lr" in group for group in groups):
            raise UsageError(f"{self} waits until lr falls, and this optimizer has none; say after=STEPS")

    @property
    def overlaps(self) -> bool:
        return in_buckets(self.codec)

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        if self._together(replica):
            flags = (replica.present, self._falls(replica)) if last else ()
            begin_part(node, replica, self.codec, gradient, *flags)

    def ready(self, node: Node, replica: Replica) -> None:
        if not self._together(replica):
            self._turn(replica)
            super().ready(node, replica)
        else:
            if not join_parts(replica):
                mean_gradient(node, replica, self.codec, replica.present, self._falls(replica))
            step = replica.steps + 1  # for which this gradient is; another batch may still be added to it
            replica.notes["together"] = step
            if replica.notes["falls"].item():
                replica.notes["fell"] = step

    def _turn(self, replica: Replica) -> None:
        """What was not sent of gradients is from here on a way that was not told."""
        import torch

        if replica.notes.get("turned"):
            return
        replica.notes["turned"] = True
        if self.codec is None or not self.codec.feedback:
            return
        # Only of SGD is it known how far a gradient leads: by others what is owed is forgotten.
        known = isinstance(replica.optimizer, torch.optim.SGD)
        rates = rates_of_residuals(replica)  # the present ones may have changed since
        for span in replica.spans(whole=True):
            uphill = span.settings.get("maximize", False)
            rate = (rates[span.group] if uphill else -rates[span.group]) if known else 0.0
            span.of(replica.owed).mul_(rate)

    def _together(self, replica: Replica) -> bool:
        after = self.after or replica.notes.get("fell", math.inf)
        return not replica.notes.get("turned") and replica.steps < after

    def _falls(self, replica: Replica) -> Tensor:
        """A flag: whether the learning rate is lower than before."""
        rates = [float(group.get("lr", 0.0)) for group in replica.optimizer.param_groups]
        before = replica.notes.get("rates", rates)
        flag = numbers(not self.after and any(now < then for now, then in zip(rates, before, strict=True)))
        replica.notes["rates"], replica.notes["falls"] = rates, flag
        return flag
