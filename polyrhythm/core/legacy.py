"""Strategies that are still written as stateless functions of (node, replica)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Server, State, Worker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class Legacy(Strategy):
    servers: ClassVar[bool] = False
    optimizers: ClassVar[str] = "any"
    remembers: ClassVar[tuple[str, ...]] = ()
    stays: ClassVar[bool] = False

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def survives(self) -> bool:
        return not self.lockstep

    @property
    def traits(self) -> Traits:
        return Traits(
            lockstep=self.lockstep,
            survives_loss=self.survives,
            uses_servers=self.servers,
            parameters_held_by_peers=self.stays,
            optimizer=self.optimizers,
        )

    def check(self, plan: Plan) -> None:
        self.check_counts(plan.workers, plan.servers)

    def check_counts(self, workers: int, servers: int) -> None: ...

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None: ...

    def start(self, node: Node, replica: Replica) -> None:
        node.group().broadcast(*replica.parameters)

    def ready(self, node: Node, replica: Replica) -> None: ...

    def step(self, node: Node, replica: Replica) -> None:
        raise NotImplementedError

    def finish(self, node: Node, replica: Replica) -> None: ...

    def serve(self, node: Node, shard: Shard) -> None:
        raise UsageError(f"{self.name} has no servers")

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return replica.parameters

    def restore(self, node: Node, replica: Replica) -> None: ...

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        return {}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None: ...

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return replica.parameters

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        self.check_groups(replica.optimizer.param_groups)
        return LegacyWorker(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        self.check_groups(shard.optimizer.param_groups)
        return LegacyServer(self, node, shard)


class LegacyWorker(Worker):
    strategy: Legacy

    def start(self) -> None:
        self.strategy.start(self.node, self.replica)

    def on_gradient(self) -> None:
        self.strategy.ready(self.node, self.replica)

    def step(self) -> None:
        self.strategy.step(self.node, self.replica)

    def finish(self) -> None:
        self.strategy.finish(self.node, self.replica)

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        find = self.strategy.collect if final else self.strategy.consensus
        return find(self.node, self.replica)

    def fetch_optimizer_state(self) -> None:
        self.strategy.restore(self.node, self.replica)

    def state_dict(self) -> State:
        kept = self.strategy.keep(self.node, self.replica)
        return {"memory": self.replica.memory(self.strategy.remembers), "kept": kept}

    def load_state_dict(self, state: State) -> None:
        self.replica.remember(state["memory"])
        self.strategy.resume(self.node, self.replica, state.get("kept", {}))


class LegacyServer(Server):
    def __init__(self, strategy: Legacy, node: Node, shard: Shard) -> None:
        self.strategy, self.node, self.shard = strategy, node, shard

    def serve(self) -> None:
        self.strategy.serve(self.node, self.shard)
