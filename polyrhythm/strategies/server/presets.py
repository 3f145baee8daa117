"""The parameter servers that people know by name: points in the space of `ParameterServer`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.updates import PushRequest
from polyrhythm.strategies.server.worker import GradientWorker

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.strategy import Traits
    from polyrhythm.core.worker import State, Worker
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Synchronous(ParameterServer):
    r"""The server waits for the gradients of all workers and applies their mean (bulk-synchronous).

    $$
    w \leftarrow \operatorname{Opt}\Big(w, \frac{1}{N} \sum_i g_i(w)\Big)
    $$

    Staleness is always 0, and the result has the same bits as `allreduce`. The script clips each worker's own
    gradient; `clip=1` clips the mean.

    >>> import polyrhythm as pr
    >>> pr.parse("sync").traits.lockstep
    True
    """

    name: ClassVar[str] = "sync"
    paper: ClassVar[str] = "Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server"

    free: ClassVar[tuple[str, ...]] = ("clip", "prefetch")

    wait_for: int = 0
    max_staleness: float = 0


@dataclass(frozen=True)
class Backup(ParameterServer):
    r"""Synchronous with spare workers: the server takes the first gradients and drops the last `spare`.

    A few slow workers then do not delay the others.

    $$
    w \leftarrow \operatorname{Opt}\Big(w, \frac{1}{N - b} \sum_{i \in F} g_i(w)\Big)
    $$

    $F$ are the first $N - b$ workers whose gradient at the present version arrives. The others are dropped,
    and their workers continue from the new version. Staleness is always 0. A worker that is always slow never
    counts, and neither do its batches.

    - `spare`: the number of workers $b$ that the server does not wait for

    >>> import polyrhythm as pr
    >>> pr.parse("backup:2").spare
    2
    """

    name: ClassVar[str] = "backup"
    main: ClassVar[str | None] = "spare"
    paper: ClassVar[str] = "Chen et al. 2016, Revisiting Distributed Synchronous SGD"

    free: ClassVar[tuple[str, ...]] = ("clip",)

    spare: int = 1
    wait_for: int = 0
    discard: float = 1
    pull: Literal["at-once", "next-version"] = "next-version"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spare < 0:
            raise UsageError("spare must be 0 or more")
        if (self.wait_for, self.discard, self.pull) != (0, 1, "next-version"):
            raise UsageError(
                "backup waits for all but `spare` workers and drops late gradients: "
                "do not set wait_for, discard or pull"
            )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, lockstep=self.spare == 0)

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if self.spare >= plan.workers:
            raise UsageError(
                f"{self}: {self.spare} of {plan.workers} workers are spare, so no worker is left to wait "
                f"for; use at most {plan.workers - 1}"
            )

    def quorum(self, workers: int, started: int) -> int:
        return started - self.spare


@dataclass(frozen=True)
class Async(ParameterServer):
    r"""The server applies each gradient as it arrives and replies at once; no worker waits (Downpour).

    $$
    w_{t+1} = \operatorname{Opt}\big(w_t, g_i(w_{t - \tau})\big)
    $$

    Here $\tau$ is the staleness: the updates of others since worker $i$ pulled. Its mean is $N - 1$ for any
    mix of speeds, so the learning rate has to shrink as workers are added. With `push_every` or `fetch_every`
    above 1 a worker adds up its gradients between pushes and takes plain local steps,
    $w \leftarrow w - \eta g$; the server steps once per push, by the sum, and so decays weights once per
    push.

    - `push_every`: steps between two pushes
    - `fetch_every`: steps between two pulls

    >>> import polyrhythm as pr
    >>> print(pr.parse("async:weight=1/tau,push_every=4"))
    async:weight=1/tau,push_every=4
    """

    name: ClassVar[str] = "async"
    paper: ClassVar[str] = "Dean et al. 2012, Large Scale Distributed Deep Networks"

    free: ClassVar[tuple[str, ...]] = (
        "wait_for", "max_staleness", "weight", "damping", "discard", "pull", "reduce", "clip", "prefetch",
    )  # fmt: skip

    push_every: int = 1
    fetch_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.push_every < 1 or self.fetch_every < 1:
            raise UsageError("push_every and fetch_every must be 1 or more")
        if self.prefetch and (self.push_every, self.fetch_every) != (1, 1):
            raise UsageError("prefetch fetches at every step; leave out push_every and fetch_every")
        if self.fetch_every > 1 and (self.max_staleness, self.discard) != (math.inf, math.inf):
            raise UsageError(
                "a worker that does not fetch cannot be held to a staleness; leave out fetch_every"
            )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        if (self.push_every, self.fetch_every) == (1, 1):
            return super().worker(node, replica, group)
        if not all("lr" in settings for settings in replica.optimizer.param_groups):
            raise UsageError(f"{self} steps with the optimizer's lr, but this optimizer has none")
        return DownpourWorker(self, node, replica, group)


class DownpourWorker(GradientWorker):
    """Takes plain local steps between its pushes and fetches."""

    strategy: Async

    def __init__(self, strategy: Async, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.accrued = replica.buffer()  # the sum of the gradients since the last push
        self.base: dict[int, int] = {}  # the versions that the first of them was computed on, by server
        self.absent: set[int] = set()  # the parameters without a gradient in all of them
        self.steps = 0

    def step(self) -> None:
        replica = self.replica
        self.steps += 1
        absent = set(replica.gradients.absent)
        if self.base:
            self.absent &= absent
        else:
            self.base, self.absent = dict(self.servers.versions), absent
        for place, part in zip(self.accrued, replica.gradient, strict=True):
            place.add_(part)
        for span in replica.spans():
            rate = span.settings["lr"] if span.settings.get("maximize") else -span.settings["lr"]
            span.of(replica.parameters).add_(span.of(replica.gradient), alpha=rate)
        fetch = self.steps % self.strategy.fetch_every == 0
        if self.steps % self.strategy.push_every == 0:
            self.push_accrued(fetch)
        elif fetch:
            self.servers.pull()

    def finish(self) -> None:
        if self.base:
            self.push_accrued(fetch=False)
        super().finish()

    def push_accrued(self, fetch: bool) -> None:
        """Pushes the sum of the gradients since the last push."""
        self.servers.rescale()
        absent, settings = sorted(self.absent), self.replica.settings()
        self.servers.push(PushRequest(self.accrued, settings, absent, fetch, versions=self.base))
        self.base = {}
        for part in self.accrued:
            part.zero_()

    def own_state(self) -> State:
        accrued = cloned(self.accrued) if self.base else []
        own = {"accrued": accrued, "base": dict(self.base), "absent": sorted(self.absent)}
        return {**super().own_state(), **own, "steps": self.steps}

    def load_own_state(self, state: State) -> None:
        super().load_own_state(state)
        self.base, self.absent, self.steps = dict(state["base"]), set(state["absent"]), state["steps"]
        if self.base:
            copied(state["accrued"], self.accrued)


@dataclass(frozen=True)
class Softsync(ParameterServer):
    r"""The server collects `wait_for` gradients from any workers, then applies their mean (softsync).

    $$
    w_{t+1} = \operatorname{Opt}\Big(w_t, \frac{1}{S} \sum_{l=1}^{S} \alpha(\tau_l) g_l(w_{t - \tau_l})\Big)
    $$

    Here $\alpha$ is the `weight` of an update by its staleness; with `weight=1/tau` this is staleness-aware
    training. A worker that has pushed continues at once, so the mean staleness is $(N - 1) / S$; with
    `pull=next-version` it waits until its push is applied.

    >>> import polyrhythm as pr
    >>> pr.parse("softsync:4,weight=1/tau").wait_for
    4
    """

    name: ClassVar[str] = "softsync"
    main: ClassVar[str | None] = "wait_for"
    paper: ClassVar[str] = "Zhang, Gupta, Lian, Liu 2016, Staleness-aware Async-SGD"

    free: ClassVar[tuple[str, ...]] = (
        "max_staleness", "weight", "damping", "discard", "pull", "reduce", "clip", "prefetch",
    )  # fmt: skip

    wait_for: int = 2


@dataclass(frozen=True)
class StaleSynchronous(ParameterServer):
    r"""Asynchronous, but a worker more than `max_staleness` steps ahead of the slowest waits (SSP).

    $$
    w_{t+1} = \operatorname{Opt}\big(w_t, g_i(w_{t - \tau})\big),
    \qquad \text{worker } i \text{ reads once } c_i - \min_j c_j \le s
    $$

    Here $c_i$ counts the steps that worker $i$ has pushed. A read shows all pushes of the first $c_i - s - 1$
    steps, all of the worker's own, and maybe more. $s = 0$ withholds the pushes of a step until all are there
    and applies their mean, which is `sync`; $s = \infty$ is `async`.

    >>> import polyrhythm as pr
    >>> pr.parse("ssp:3").traits.lockstep, pr.parse("ssp:0").traits.lockstep
    (False, True)
    """

    name: ClassVar[str] = "ssp"
    main: ClassVar[str | None] = "max_staleness"
    paper: ClassVar[str] = (
        "Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"
    )

    free: ClassVar[tuple[str, ...]] = ("weight", "damping", "discard", "clip", "prefetch")

    max_staleness: float = 3
