"""Strategies that are still written as stateless functions of (node, replica)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.model.replica import Replica


@dataclass(frozen=True)
class Legacy(Strategy):
    optimizers: ClassVar[str] = "any"
    remembers: ClassVar[tuple[str, ...]] = ()
    stays: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    lease: ClassVar[int] = 8
    one_host: ClassVar[bool] = False

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def survives(self) -> bool:
        return not self.lockstep

    @property
    def watches_forward(self) -> bool:
        return False

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=self.lockstep,
            survives_loss=self.survives,
            parameters_held_by_peers=self.stays,
            optimizer=self.optimizers,
            sparse_gradients=self.sparse,
            steps_in_place=self.in_place,
            one_host=self.one_host,
            max_lease=self.lease,
        )

    def check(self, plan: Plan) -> None:
        self.check_counts(plan.workers, plan.servers)

    def check_counts(self, workers: int, servers: int) -> None: ...

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None: ...

    def start(self, node: Node, replica: Replica) -> None:
        node.group().broadcast(*replica.parameters)

    def enter(self, node: Node, replica: Replica) -> None: ...

    def before_forward(self, node: Node, replica: Replica) -> None: ...

    def ready(self, node: Node, replica: Replica) -> None: ...

    def step(self, node: Node, replica: Replica) -> None:
        raise NotImplementedError

    def finish(self, node: Node, replica: Replica) -> None: ...

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return replica.parameters

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        return {}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None: ...

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return replica.parameters

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        self.check_groups(replica.optimizer.param_groups)
        cls = LegacyForward if self.watches_forward else LegacyWorker
        return cls(self, node, replica, group)


class LegacyWorker(Worker):
    strategy: Legacy

    def start(self) -> None:
        self.strategy.start(self.node, self.replica)
        self.strategy.enter(self.node, self.replica)

    def on_gradient(self) -> None:
        self.strategy.ready(self.node, self.replica)

    def step(self) -> None:
        self.strategy.step(self.node, self.replica)

    def finish(self) -> None:
        self.strategy.finish(self.node, self.replica)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        find = self.strategy.collect if final else self.strategy.consensus
        return find(self.node, self.replica)

    def state_dict(self) -> State:
        kept = self.strategy.keep(self.node, self.replica)
        return {"memory": self.replica.memory(self.strategy.remembers), "kept": kept}

    def load_state_dict(self, state: State) -> None:
        self.replica.remember(state["memory"])
        self.strategy.resume(self.node, self.replica, state.get("kept", {}))


class LegacyForward(LegacyWorker):
    def before_forward(self) -> None:
        self.strategy.before_forward(self.node, self.replica)
