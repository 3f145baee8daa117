"""Two strategies at once: one inside each site, where links are fast, another between the sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polyrhythm.core import grammar
from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group, Task
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import OPERATORS
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import OnBucket, OnGradient, State, Worker
from polyrhythm.strategies.reduce_ops import agree

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Coding, Use
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class TwoLevel(Strategy):
    """One strategy inside each site; between sites each site is one worker of another strategy.

    `allreduce / diloco:50`: the workers of a site average every gradient, so they are equal after every
    step. To DiLoCo they are one worker, whose optimizer step is theirs: every 50 steps the first worker of
    each site exchanges with those of the other sites and broadcasts the result inside its own. All workers of
    a site compute the same outer step from it. Between rounds nothing passes between sites.

    `local:5 / diloco:50` (hierarchical local SGD, Lin et al. 2018): the workers of a site are equal after
    every fifth step only. They have to be when sites exchange, so one period must be a multiple of the other.
    In between, `consensus()` uses the mean of each site.

    In the outer mean all sites have the same weight, however many workers each has: in the papers one replica
    is one vote. To weight sites by their examples, use `average` between them.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+bf16/diloco:50+int4"))
    allreduce+bf16 / diloco:50+int4
    """

    within: Strategy
    across: Strategy

    def __post_init__(self) -> None:
        if not self.within.traits.inside_sites:
            raise UsageError(f"inside a site use {able('inside_sites')}, not {self.within}")
        if not self.across.traits.between_sites:
            raise UsageError(f"between sites use {able('between_sites')}, not {self.across}")
        self._check_periods()

    def _check_periods(self) -> None:
        """The workers of a site must be equal whenever sites exchange: then a site is one worker."""
        inside, between = self.within.traits, self.across.traits
        if between.averages_optimizers and not inside.identical_optimizers:
            raise UsageError(
                "momentum=average between sites needs equal optimizer states inside a site, and under "
                f"{self.within} each worker has its own; use local, average or slowmo with momentum=average"
            )
        if inside.sync_period == 1:
            return
        if inside.sync_period is None or between.sync_period is None:
            raise UsageError(
                "workers of a site must be synchronized when sites exchange: neither period can be auto"
            )
        if over := between.sync_period % inside.sync_period:
            below = between.sync_period - over
            above = below + inside.sync_period
            raise UsageError(
                f"workers of a site must be synchronized when sites exchange: the outer period must be a "
                f"multiple of the inner one, {inside.sync_period}, and is {between.sync_period}; use "
                f"{f'{below} or ' if below else ''}{above}"
            )
        if between.sync_delay % inside.sync_period:
            raise UsageError(
                f"overlap must be a multiple of the inner period, {inside.sync_period}, and is "
                f"{between.sync_delay}"
            )

    def __str__(self) -> str:
        return f"{self.within} / {self.across}"

    @property
    def parts(self) -> tuple[Strategy, ...]:
        return self.within, self.across

    @property
    def traits(self) -> Traits:
        weighted = any(part.traits.weighted_by_examples for part in self.parts)
        return Traits(sync_period=self.within.traits.sync_period, weighted_by_examples=weighted)

    def check(self, plan: Plan) -> None:
        for part in self.parts:
            part.check(plan)
        if not plan.sites:
            raise UsageError(
                f"{self} needs the site of each worker: give a cluster file (--cluster) in which every "
                'group of hosts has its site = "name"'
            )
        empty = [name for name, ranks in plan.sites.items() if not ranks]
        if empty:
            raise UsageError(
                f"{self}: the site {empty[0]} has no worker: workers are assigned to the groups of hosts in "
                "order; use more workers, or lower the counts"
            )
        if len(plan.sites) == 1:
            raise UsageError(
                f"{self}: there is only one site, {next(iter(plan.sites))}; use {self.within}, or name two"
            )

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        inside = node.group("data")
        within = self.within.worker(node, replica, inside)
        cls = TwoLevelInBuckets if isinstance(within, OnBucket) else TwoLevelWorker
        return cls(self, node, replica, SiteGroup(node, inside), within)


class TwoLevelWorker(Worker):
    """The worker of the strategy inside a site; its step is what the outer strategy's worker applies."""

    def __init__(
        self, strategy: TwoLevel, node: Node, replica: Replica, group: SiteGroup, within: Worker
    ) -> None:
        from polyrhythm.model.nested import NestedReplica

        super().__init__(strategy, node, replica, group)
        self.within = within

        def site_sum(count: int) -> int:
            return int(agree(group.inside, count, op="sum")[0])

        self._site = NestedReplica(replica, within.step, site_sum)
        self.across = strategy.across.worker(node, self._site, group)

    def start(self) -> None:
        self.across.start()

    def on_gradient(self) -> None:
        for worker in (self.within, self.across):
            if isinstance(worker, OnGradient):
                worker.on_gradient()

    def step(self) -> None:
        self.across.step()

    def finish(self) -> None:
        self.within.finish()
        self.across.finish()

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        with self._site.at(self.within.consensus(final)):
            return self.across.consensus(final)

    @property
    def replicas_equal(self) -> bool:
        return self.within.replicas_equal and self.across.replicas_equal

    def state_dict(self) -> State:
        return {"within": self.within.state_dict(), "across": self.across.state_dict()}

    def load_state_dict(self, state: State) -> None:
        # The outer worker first: in the middle of a round the inner one knows the parameters of this worker.
        self.across.load_state_dict(state["across"])
        self.within.load_state_dict(state["within"])


class TwoLevelInBuckets(TwoLevelWorker):
    """Exchanges buckets inside the site while backward runs."""

    def on_bucket(self, gradient: Sequence[Tensor], last: bool) -> None:
        assert isinstance(self.within, OnBucket)
        self.within.on_bucket(gradient, last)


class SiteGroup(Group):
    """The sites as a group, as one worker of a site sees it.

    All workers of a site call its collectives, with the same numbers, when they are equal. The first worker
    of each site takes part in the collective with those of the others, then broadcasts the result inside.
    """

    def __init__(self, node: Node, inside: Group) -> None:
        first = inside.members[0]
        self.members = [Peer("worker", rank) for rank in node.mesh.ranks(first.rank, "site")]
        self.rank = self.members.index(first)
        self.inside = inside
        self._firsts = node.group("site") if inside.rank == 0 else None

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        if self._firsts is not None:
            self._firsts.all_reduce(*tensors, op=op)
        self.spread(tensors)

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        begun = None if self._firsts is None else self._firsts.begin_all_reduce(*tensors, op=op)
        return _Spread(self, begun, tensors)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        if self._firsts is not None:
            begun: Task | None = self._firsts.begin_coded_mean(coding, vectors, *flags)
        else:
            coding.send(vectors)  # to nobody: the residual must be the same in the whole site
            begun = None
        return _Spread(self, begun, [*coding.codable(vectors), *flags])

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        if self._firsts is not None:
            self._firsts.broadcast(*tensors, root=root)
        self.spread(tensors)

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        raise UsageError("sites can average and broadcast, but not exchange tensors one by one")

    def split(self, members: Sequence[Peer], name: str = "") -> Group:
        raise UsageError("a group of sites cannot be split")

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Broadcasts from the first worker of the site to the others."""
        self.inside.broadcast(*(each.detach().view(-1) for each in tensors if each.numel()))


class _Spread(Task):
    """A collective of the first workers, whose result is broadcast inside the sites when it is joined."""

    def __init__(self, group: SiteGroup, begun: Task | None, tensors: Sequence[Tensor]) -> None:
        self._group, self._begun, self._tensors = group, begun, tensors

    def join(self) -> None:
        if self._begun is not None:
            self._begun.join()
        self._group.spread(self._tensors)


def able(where: Literal["inside_sites", "between_sites"]) -> str:
    """The strategies that can be there, in words."""
    names = [
        name
        for name, cls in sorted(Strategy.registry.items())
        if not any(option.required for option in grammar.options(cls)) and getattr(cls().traits, where)
    ]
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


OPERATORS["/"] = TwoLevel
