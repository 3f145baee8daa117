"""The parameter server: one server with a few independent knobs.

Workers push updates and pull parameters, in one round trip. The strategies that people know by name are
points in one space (see `presets`), and corrections of stale updates are small transforms of one push (see
`corrections`, `momentum`, `elastic`):

    on PULL(i):  wait until i may read; reply with VIEW(i)
    on PUSH(i):  drop it if it was seen before, or if it is too stale
                 collect TRANSFORM(update); once there are enough: w <- UPDATE(w, reduce(group)), version += 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.strategies.server.server_loop import ServerLoop
from polyrhythm.strategies.server.worker import GradientWorker

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.worker import Server, Worker
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class ParameterServer(Strategy):
    r"""The design space. Each strategy has those of its knobs that make sense with it: its `free` ones.

    - `wait_for`: how many pushes the server collects before it applies them (0: one of every worker)
    - `max_staleness`: how many steps a worker may be ahead of the slowest before it has to wait. With 0 no
      worker is ahead, so the pushes of one step are withheld and applied as one.
    - `weight`: how much an update of staleness $\tau$ counts: 1, $1/\tau$ (at most 1) or
      $\operatorname{exp}(-\text{damping} \cdot \tau)$
    - `damping`: the rate at which `weight=exp` decays
    - `discard`: an update this stale is dropped, and its worker continues from the present parameters
    - `pull`: whether a push that is not applied yet gets its reply at once, or with the next version
    - `reduce`: whether a group is applied as its mean or as its sum
    - `clip`: the largest norm, over all servers, of the gradient that is applied
    - `prefetch`: wait for the reply to a push after the next batch only; costs a step of staleness
    """

    codecs: ClassVar[bool] = True
    free: ClassVar[tuple[str, ...]] = ()

    wait_for: int = 1
    max_staleness: float = math.inf
    weight: Literal["1", "1/tau", "exp"] = "1"
    damping: float = 0.1
    discard: float = math.inf
    pull: Literal["at-once", "next-version"] = "at-once"
    reduce: Literal["mean", "sum"] = "mean"
    clip: float = math.inf
    prefetch: bool = False

    def __post_init__(self) -> None:
        for knob in fields(ParameterServer):
            mine = type(self).__dataclass_fields__[knob.name].default
            if knob.name not in ("codec", self.main, *self.free) and getattr(self, knob.name) != mine:
                raise UsageError(
                    f"{knob.name} cannot be set here; {self.name} has: {', '.join(self.choices())}"
                )
        for name in ("max_staleness", "discard"):
            value = getattr(self, name)
            if value != math.inf and not (value >= 0 and value == int(value)):
                raise UsageError(f"{name} must be a whole number, 0 or more, or inf")
        if self.wait_for < 0:
            raise UsageError("wait_for must be 0 (every worker) or more")
        if self.damping != 0.1 and self.weight != "exp":
            raise UsageError("damping needs weight=exp")
        if not 0 <= self.damping < math.inf:
            raise UsageError("damping must be 0 or more")
        if not self.discard >= 1:
            raise UsageError("discard must be 1 or more: a fresh update has staleness 0")
        if not self.clip > 0:
            raise UsageError("clip must be above 0")
        if self.pull == "next-version" and 0 < self.max_staleness < math.inf and self.wait_for != 1:
            # Workers that are ahead would wait for the slowest, and the slowest for them to fill its group.
            raise UsageError("pull=next-version and a max_staleness would wait for each other; leave one out")

    @classmethod
    def choices(cls) -> list[str]:
        """The names of the fields that can be set."""
        knobs = {knob.name for knob in fields(ParameterServer)}
        return [
            each.name for each in fields(cls) if each.name not in knobs or each.name in (cls.main, *cls.free)
        ]

    @property
    def together(self) -> bool:
        """True if a group is one push of every worker."""
        return self.wait_for == 0 or (self.wait_for == 1 and self.max_staleness == 0)

    @property
    def single(self) -> bool:
        """True if each push is applied by itself. Its worker then knows its norm over all servers."""
        return self.wait_for == 1 and not self.together

    @property
    def traits(self) -> Traits:
        stale = not self.together and self.weight == "1" and self.exchanges == "gradients"
        lockstep = self.together and self.max_staleness == 0
        return Traits(lockstep=lockstep, uses_servers=True, stale_momentum=stale)

    @property
    def feedback(self) -> bool:
        """True if workers keep the residual of an update, to send it later."""
        return self.codec is not None and self.codec.feedback

    @property
    def replies_in_code(self) -> bool:
        """True if servers reply with the code of a change, and not with parameters."""
        return self.codec is not None and self.codec.pull == "coded"

    def check(self, plan: Plan) -> None:
        if self.wait_for > plan.workers:
            raise UsageError(
                f"{self}: wait_for is {self.wait_for} but there are {plan.workers} workers; use at most "
                f"{plan.workers}"
            )
        torn = not self.traits.lockstep and self.wait_for != 1 and self.pull == "at-once"
        if self.clip < math.inf and torn and (plan.servers or 1) > 1:
            raise UsageError(
                f"{self}: each server makes its own groups, so an update has no norm over all of them; "
                "leave out clip, add pull=next-version, or use one server"
            )

    def quorum(self, workers: int, started: int) -> int:
        """How many pushes make a group, with this many workers now and this many at the start."""
        return workers if self.together else self.wait_for

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return GradientWorker(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return ServerLoop(self, node, shard)
