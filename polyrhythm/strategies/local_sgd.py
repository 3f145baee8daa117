"""Workers that take local steps and average their parameters now and then."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.reduce_ops import MeanReducer, agree, in_buckets, numbers

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


WINDOW = 5  # rounds whose median decides a period, so that one slow round does not


@dataclass(frozen=True)
class Rounds(Strategy):
    """Workers take `period` local steps, then synchronize."""

    main: ClassVar[str | None] = "period"
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"

    period: Literal["auto"] | int = 8

    def __post_init__(self) -> None:
        if self.period != "auto" and self.period < 1:
            raise UsageError("period must be 1 or more")

    @property
    def traits(self) -> Traits:
        period = None if self.period == "auto" else self.period
        return Traits(sync_period=period, inside_sites=True, between_sites=True)


class RoundsWorker(Worker):
    """Takes local steps and synchronizes at the end of each round."""

    strategy: Rounds

    def __init__(self, strategy: Rounds, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.reducer = MeanReducer(strategy.codec, node, replica, group)
        self.local_steps = 0  # since the last synchronization

    def step(self) -> None:
        self.replica.apply()
        self.local_steps += 1
        if self.due():
            self.synchronize()

    def finish(self) -> None:
        if self.local_steps:
            self.synchronize(full=True)

    def due(self) -> bool:
        """True if the step that has just been taken is the last of its round."""
        assert self.strategy.period != "auto"
        return self.local_steps >= self.strategy.period

    def synchronize(self, full: bool = False) -> None:
        """Makes all workers equal; `full`: for good, so the codec may not leave anything out."""
        self.local_steps = 0

    def state_dict(self) -> State:
        # In the middle of a round each worker has parameters of its own, and a run starts with the first's.
        own = cloned(self.replica.parameters) if self.local_steps else []
        return {"local_steps": self.local_steps, "parameters": own, "reducer": self.reducer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.local_steps = state["local_steps"]
        if self.local_steps:
            copied(state["parameters"], self.replica.parameters)
        self.reducer.load_state_dict(state["reducer"])


@dataclass(frozen=True)
class Averaging(Rounds):
    """At the end of a round all workers take the mean of their parameters.

    `momentum` stands for all that the optimizer keeps for each element, Adam's two moments too: each worker
    keeps its own, or all take the average, or every optimizer is reset to its initial state.

    Through a codec go the updates: how far each worker has come since the last synchronization. What the
    codec leaves out is sent with later rounds. The last synchronization of a run, and a look at the
    consensus, go without the codec.
    """

    codecs: ClassVar[bool] = True

    momentum: Literal["keep", "average", "reset"] = "keep"

    @property
    def traits(self) -> Traits:
        period = None if self.period == "auto" else self.period
        return Traits(
            sync_period=period,
            inside_sites=True,
            between_sites=True,
            identical_optimizers=self.momentum != "keep",
            averages_optimizers=self.momentum == "average",
        )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return AveragingWorker(self, node, replica, group)


class AveragingWorker(RoundsWorker):
    """Averages parameters, and the state of the optimizers if asked to."""

    strategy: Averaging

    def __init__(self, strategy: Averaging, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        # Updates count from here: the parameters at the last synchronization.
        self.base = replica.buffer() if self.sends_updates else ()
        self._moments: list[str] = []  # what all optimizers keep for each element

    @property
    def sends_updates(self) -> bool:
        """False if the parameters themselves are averaged."""
        return self.strategy.codec is not None

    def on_gradient(self) -> None:
        if self.sends_updates and self.local_steps == 0:
            copied(self.replica.parameters, self.base)

    def synchronize(self, full: bool = False) -> None:
        replica, momentum = self.replica, self.strategy.momentum
        names = self._moment_names() if momentum == "average" else []
        if names:
            moments, held = replica.optimizer_state.flat(names)
            self.mean([*replica.parameters, *moments], held, full=full)
            replica.optimizer_state.adopt(names)
        else:
            self.mean(replica.parameters, full=full)
        if momentum == "reset":
            replica.optimizer_state.forget()
        super().synchronize(full)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        if not self.local_steps:
            return self.replica.parameters
        average = cloned(self.replica.parameters)
        self.mean(average, full=True)
        return average

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        """Replaces each vector, the parameters and what follows them, by its mean over the workers."""
        if not self.sends_updates:
            return self.reducer.mean(vectors, *flags)
        own, others = vectors[: len(self.base)], vectors[len(self.base) :]
        self.reducer.check_update()
        # A mean of updates leaves what nobody has moved where it is, to the last bit.
        for part, base in zip(own, self.base, strict=True):
            part.sub_(base)
        weight = self.weight()
        if weight is not None:
            for part in vectors:
                part.mul_(weight)
        self.reducer.mean(own, *others, *flags, full=full)
        for part, base in zip(own, self.base, strict=True):
            part.add_(base)

    def weight(self) -> float | None:
        """How much this worker counts in the mean; None on all workers if all count alike."""
        return None

    def _moment_names(self) -> list[str]:
        """What all optimizers keep for each element. Agreed once all have taken a step."""
        if not self._moments:
            mine = self.replica.optimizer_state.names()
            number = float(zlib.crc32(" ".join(mine).encode())) if mine else 0.0
            least, most = agree(self.group, number, -number, op="min")
            if least == 0:
                return []  # some optimizer has nothing to average yet
            if least != -most:
                raise PolyrhythmError(
                    f"{self.strategy}: {self.node.me}'s optimizer keeps {', '.join(mine)}, and another's "
                    "something else"
                )
            self._moments = mine
        return self._moments

    def state_dict(self) -> State:
        base = cloned(self.base) if self.local_steps else []
        return {**super().state_dict(), "base": base, "moments": list(self._moments)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state["base"]:
            copied(state["base"], self.base)
        self._moments = list(state["moments"])


@dataclass(frozen=True)
class LocalSGD(Averaging):
    """Every worker takes local steps; every `period` steps all average their parameters (local SGD).

    w_i <- w_i - lr * g_i, and every H-th step w_i <- mean_j w_j. Between averages nothing is sent.
    `period=auto` chooses H from `shortest` to `longest` after each average, so that averaging takes
    at most the share `overhead` of the time for steps: H = ceil(averaging / (overhead * step)). Both are
    medians of the last rounds, so a pause between two steps changes nothing.

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
        shown = super().consensus(final)
        self._since += self.node.now() - begun  # it is not part of a step
        return shown

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
            # The last worker to arrive waits for nobody: the least time is what the averaging itself takes.
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
            self.node.log("period", period=period, communication_s=communication, step_s=step)
        self.period = period

    def state_dict(self) -> State:
        timing = (self.period, list(self.averages), list(self.steps), list(self._took), self._communication)
        return {**super().state_dict(), "timing": timing}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.period, averages, steps, took, self._communication = state["timing"]
        self.averages, self.steps, self._took = list(averages), list(steps), list(took)


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
    def traits(self) -> Traits:
        return replace(super().traits, weighted_by_examples=True)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return WeightedWorker(self, node, replica, group)


class WeightedWorker(AveragingWorker):
    """Averages parameters weighted by the examples of each worker."""

    def __init__(self, strategy: Average, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.averaged = 0  # examples at the last average
        self._weight: float | None = None

    @property
    def sends_updates(self) -> bool:
        return True

    def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
        self._weight = self._share()
        if self._weight is None and self.strategy.codec is None:
            return self.reducer.mean(vectors, *flags)
        super().mean(vectors, *flags, full=full)

    def weight(self) -> float | None:
        return self._weight

    def _share(self) -> float | None:
        mine = self.replica.samples - self.averaged
        places = range(self.group.size)
        counts = agree(self.group, *(mine if rank == self.group.rank else 0.0 for rank in places), op="sum")
        return None if min(counts) == max(counts) else mine * len(counts) / sum(counts)

    def synchronize(self, full: bool = False) -> None:
        super().synchronize(full)
        self.averaged = self.replica.samples

    def state_dict(self) -> State:
        return {**super().state_dict(), "examples": self.replica.samples - self.averaged}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.averaged = self.replica.samples - state["examples"]


@dataclass(frozen=True)
class PostLocal(Averaging):
    """All average their gradients until the learning rate first falls; from then on it is local SGD.

    With `after` the change comes after so many steps instead. Before the change it is `allreduce`, after it
    `local:period`. The first worker to see a lower learning rate tells the others with its next gradient, so
    that all change after the same step.

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
            raise UsageError(f"{self} waits until lr falls, and this optimizer has none; say after=STEPS")
        return (PostLocalInBuckets if in_buckets(self.codec) else PostLocalWorker)(self, node, replica, group)


class PostLocalWorker(AveragingWorker):
    """Averages gradients at first, then parameters."""

    strategy: PostLocal

    def __init__(self, strategy: PostLocal, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.steps = 0
        self.local = False  # the change has come
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
