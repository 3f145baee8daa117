"""Two strategies at once: one inside each site, where links are fast, another between the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Task
from polyrhythm.core.part import Part
from polyrhythm.core.strategy import Strategy
from polyrhythm.strategies.reduce_ops import agree

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Coding, Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class TwoLevel(Strategy):
    """Inside each site workers keep together; between sites each site is one worker of another strategy.

    `allreduce / diloco:50`: the workers of a site average every gradient, so that they are equal after every
    step. For DiLoCo they are one worker, whose optimizer's step is theirs: every 50 steps the first worker of
    each site exchanges with those of the others, and the rest of its site get from it what they agreed on.
    All of a site compute the same outer step from it. Between rounds nothing passes between sites.

    `local:5 / diloco:50` (hierarchical local SGD, Lin et al. 2018): those of a site are equal after every
    fifth step only. When sites exchange they have to be, so the one period is a multiple of the other. A look
    at the consensus in between is that of the sites' means.

    In the outer mean every site counts alike, however many workers it has: so it is in the papers, where one
    replica is one vote, whatever it runs on. Where sites should count by the examples that they have trained
    on, use `average` between them.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+bf16/diloco:50+int4"))
    allreduce+bf16 / diloco:50+int4
    """

    within: Strategy
    across: Strategy

    def __post_init__(self) -> None:
        if not self.within.inside:
            raise UsageError(f"inside a site there can be {able('inside')}, and not {self.within}")
        if not self.across.between:
            raise UsageError(f"between sites there can be {able('between')}, and not {self.across}")
        self.across.check_inside(self.within)

    def __str__(self) -> str:
        return f"{self.within} / {self.across}"

    @property
    def levels(self) -> tuple[Strategy, ...]:
        return self.within, self.across

    @property
    def overlaps(self) -> bool:
        return self.within.overlaps

    @property
    def weighs(self) -> bool:
        return self.within.weighs or self.across.weighs

    @property
    def beat(self) -> int | None:
        return self.within.beat

    def check(self, workers: int, servers: int) -> None:
        for each in self.levels:
            each.check(workers, servers)

    def check_sites(self, sites: Mapping[str, Sequence[int]]) -> None:
        if not sites:
            raise UsageError(
                f"{self} needs to know who is at which site: give a cluster file (--cluster) in which every "
                'group of hosts has its site = "name"'
            )
        empty = [name for name, ranks in sites.items() if not ranks]
        if empty:
            raise UsageError(
                f"{self}: the site {empty[0]} has no worker: they are dealt to the groups of hosts in order; "
                "use more workers, or lower the counts"
            )
        if len(sites) == 1:
            raise UsageError(
                f"{self}: there is one site, {next(iter(sites))}; use {self.within}, or name two"
            )

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for each in self.levels:
            each.check_groups(groups)
            if each.codec is not None:
                each.codec.check_groups(groups)

    def peers(self, node: Node) -> Node:
        return self.within.peers(node.among(_site(node)))

    def start(self, node: Node, replica: Replica) -> None:
        from polyrhythm.model.level import Level

        inside, between = self._nodes(node, replica)
        lower = replica.levels["inside"] = Level(replica, self.within.remembers)
        upper = replica.levels["between"] = Level(
            replica,
            self.across.remembers,
            apply=lambda: self.within.step(inside, lower),
            samples=lambda: int(agree(inside, replica.samples, op="sum")[0]),  # all of a site ask for it
        )
        self.across.start(between, upper)

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        inside, _ = self._nodes(node, replica)
        self.within.part(inside, replica.levels["inside"], gradient, last)

    def ready(self, node: Node, replica: Replica) -> None:
        inside, between = self._nodes(node, replica)
        self.within.ready(inside, replica.levels["inside"])
        self.across.ready(between, replica.levels["between"])

    def step(self, node: Node, replica: Replica) -> None:
        _, between = self._nodes(node, replica)
        self.across.step(between, replica.levels["between"])

    def finish(self, node: Node, replica: Replica) -> None:
        inside, between = self._nodes(node, replica)
        self.within.finish(inside, replica.levels["inside"])
        self.across.finish(between, replica.levels["between"])

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        inside, between = self._nodes(node, replica)
        upper = replica.levels["between"]
        with upper.at(self.within.consensus(inside, replica.levels["inside"])):
            return self.across.consensus(between, upper)

    def _nodes(self, node: Node, replica: Replica) -> tuple[Node, Node]:
        """This worker in its site, and its site among the sites."""
        if "nodes" not in replica.notes:
            replica.notes["nodes"] = node.among(_site(node)), Between(node)
        nodes: tuple[Node, Node] = replica.notes["nodes"]
        return nodes


class Between(Part):
    """A worker's site as one worker among the sites.

    All of a site call what is here, with the same numbers, when they are together. Its first worker takes
    part in the collectives of the sites' first workers, and then the others get from it what came out.
    """

    def __init__(self, whole: Node) -> None:
        firsts = sorted(site[0] for site in whole.sites)
        mine = _site(whole)
        super().__init__(whole, firsts, rank=firsts.index(mine[0]))
        self._inside = whole.among(mine)
        self._firsts = whole.among(firsts) if whole.me in firsts else None

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        if self._firsts is not None:
            self._firsts.all_reduce(*tensors, op=op)
        self._spread(tensors)

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        begun = None if self._firsts is None else self._firsts.begin_all_reduce(*tensors, op=op)
        return _Spread(self, begun, tensors)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        if self._firsts is not None:
            begun: Task | None = self._firsts.begin_coded_mean(coding, vectors, *flags)
        else:
            coding.send(vectors)  # to nobody: what is left to send later is the same in the whole site
            begun = None
        return _Spread(self, begun, [*coding.codable(vectors), *flags])

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        if self._firsts is not None:
            self._firsts.broadcast(*tensors, root=root)
        self._spread(tensors)

    def _spread(self, tensors: Sequence[Tensor]) -> None:
        """From the first worker of a site to the others."""
        self._inside.broadcast(*(each.detach().view(-1) for each in tensors if each.numel()))


class _Spread(Task):
    """A collective of the first workers, whose result goes on to all of their sites when it is joined."""

    def __init__(self, between: Between, begun: Task | None, tensors: Sequence[Tensor]) -> None:
        self._between, self._begun, self._tensors = between, begun, tensors

    def join(self) -> None:
        if self._begun is not None:
            self._begun.join()
        self._between._spread(self._tensors)


def _site(node: Node) -> Sequence[Peer]:
    """The workers of this one's site."""
    return next(site for site in node.sites if node.me in site)


def able(where: Literal["inside", "between"]) -> str:
    """Who can be there, in words."""
    *names, last = sorted(name for name, each in Strategy.registry.items() if getattr(each, where))
    return f"{', '.join(names)} or {last}" if names else last
