"""TrainingPart: what one prepared optimizer trains, and Parts: all parts of a session.

A part has its own layout, replica, strategy worker and step driver, and its messages carry its number (see
`core.scoped_node`). Its worker does not know that there are other parts. Data, time and BatchNorm belong to
the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.core.errors import UsageError
from polyrhythm.core.group import Group
from polyrhythm.core.node import Node
from polyrhythm.core.scoped_node import ScopedNode
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import OnMeeting, OnMembership, State, Worker
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.replica import Replica
from polyrhythm.session.context import WorldContext
from polyrhythm.session.loading import LoadedParameters
from polyrhythm.session.meter import Meter
from polyrhythm.session.own_parameters import OwnParameters
from polyrhythm.session.step import StepDriver


class TrainingPart:
    """What one optimizer trains on this worker."""

    worker: Worker
    driver: StepDriver

    def __init__(
        self, strategy: Strategy, node: Node, model: nn.Module, optimizer: Optimizer, runner: OptimizerRunner
    ) -> None:
        traits, memory = strategy.traits, node.memory
        self.node, self.optimizer = node, optimizer
        self.replica = Replica(
            model, optimizer, memory.empty, traits.sparse_gradients, memory.temporary, runner, traits.closures
        )
        self.replica.layout.check_servers(len(node.members.servers))


class Parts:
    """The parts of a session, in the order of their optimizers."""

    own: OwnParameters  # those that no part has

    def __init__(
        self,
        strategy: Strategy,
        node: Node,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        runner: OptimizerRunner,
    ) -> None:
        self._strategy = strategy
        self.models: Sequence[nn.Module] = ()
        self._loads: LoadedParameters | None = None
        self._parts = [
            TrainingPart(strategy, each, model, optimizer, runner)
            for each, optimizer in zip(scoped(node, len(optimizers)), optimizers, strict=True)
        ]
        self.replicas, self.optimizers = [part.replica for part in self._parts], list(optimizers)

    def __iter__(self) -> Iterator[TrainingPart]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def attach(self, context: WorldContext, models: Sequence[nn.Module], peers: Group) -> None:
        """Makes the workers of the strategy and has them called by the script's training loop."""
        self.models = models
        meter, group = Meter(context.node, self.replicas), context.node.everyone
        if not self._strategy.traits.settable:
            self._loads = LoadedParameters(models, lambda: self.steps > 0)
        for part in self:
            part.worker = self._strategy.worker(part.node, part.replica, group)
            part.driver = StepDriver(context, part.worker, part.replica, peers, meter, len(self) == 1)
            part.driver.attach(models, part.optimizer)
            part.driver.loads = self._loads
        owned = [each for replica in self.replicas for each in replica.layout.parameters]
        self.own = OwnParameters(self._strategy, models, owned)

    @property
    def first(self) -> TrainingPart:
        return self._parts[0]

    @property
    def layout(self) -> str:
        """The hash of all layouts."""
        return joined_hash([replica.layout.hash for replica in self.replicas])

    @property
    def steps(self) -> int:
        """The steps of all optimizers so far."""
        return sum(replica.steps for replica in self.replicas)

    @property
    def exchanges(self) -> int:
        """The exchanges of all parts so far; see `StepDriver.exchanges`."""
        return sum(part.driver.exchanges for part in self)

    @property
    def samples(self) -> int:
        """The examples that this worker has trained on. All parts are trained on the same ones."""
        return self.first.replica.samples

    def on_batch(self, samples: int) -> None:
        """The script has got a batch of so many examples."""
        for replica in self.replicas:
            replica.samples += samples

    def weigh(self, weight: float) -> None:
        """New gradients have this weight."""
        for replica in self.replicas:
            replica.gradients.scale(weight)

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        for part in self:
            if isinstance(part.worker, OnMembership):
                part.worker.on_membership(ranks, number)

    def exchange_in_consensus(self, buffers: bool) -> bool:
        """True if workers wait for each other in `consensus`, all at the same step, or for `buffers`."""
        traits = self._strategy.traits
        differ = not traits.uses_servers and not all(part.worker.replicas_equal for part in self)
        return traits.lockstep and (differ or buffers)

    def on_meeting(self) -> None:
        """Called before this worker waits for all others."""
        for part in self:
            if isinstance(part.worker, OnMeeting):
                part.worker.on_meeting()

    def reattach(self) -> None:
        """Takes in parameters that the script has replaced since the last step."""
        for part in self:
            part.driver.reattach()

    def consensus(self) -> list[Sequence[Tensor]]:
        """The parameters that the workers agree on, of each part."""
        try:
            return [part.worker.consensus() for part in self]
        except BaseException:
            for replica in self.replicas:
                replica.abandon_consensus()
            raise

    def check_writes(self) -> None:
        """Raises UsageError if the script has changed parameters that the next step would overwrite."""
        if self._loads is not None:
            self._loads.check()
        for part in self:
            if part.driver.writes is not None:
                part.driver.writes.check()

    def last_change(self) -> str | None:
        """A note on parameters that the script has changed after the last step, if these changes are lost."""
        checks = [self._loads, *(part.driver.writes for part in self)]
        for name in (each.changed() for each in checks if each is not None):
            if name is not None:
                return (
                    f"the script changed {name} after the last step: the result of the run has the values "
                    f"from before, because under {self._strategy} a worker's parameters are copies; save "
                    "the new ones by session.save()"
                )
        return None

    def state_dict(self) -> State:
        """The states of all workers of strategies: the first by itself, if there is only one."""
        if len(self) == 1:
            return {"worker": self.first.driver.state_dict()}
        self.on_meeting()  # before the first one waits for all workers
        return {"parts": [part.driver.state_dict() for part in self]}

    def load_state_dict(self, state: State) -> None:
        saved = [state["worker"]] if len(self) == 1 else state["parts"]
        for part, each in zip(self, saved, strict=True):
            part.worker.load_state_dict(each)
            if part.driver.writes is not None:
                part.driver.writes.written()


def scoped(node: Node, count: int) -> list[Node]:
    """The node as each of `count` parts sees it."""
    return [node] if count == 1 else [ScopedNode(node, part) for part in range(count)]


def joined_hash(hashes: Sequence[str]) -> str:
    """One hash of the layouts of several parts."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]


def check_optimizers(strategy: Strategy, optimizers: Sequence[Optimizer]) -> None:
    """Some strategies replace a part of one optimizer, and would be wrong with another."""
    import torch

    if len(optimizers) > 1 and strategy.traits.one_optimizer:
        raise UsageError(
            f"{strategy} trains with one optimizer, and this script has {len(optimizers)}: workers could "
            f"wait for each other forever; use {strategy.name} with its default fields"
        )
    wanted = strategy.traits.optimizer
    for optimizer in optimizers:
        if wanted != "any" and type(optimizer) is not getattr(torch.optim, wanted):
            raise UsageError(
                f"{strategy} needs torch.optim.{wanted}, but this script uses {type(optimizer).__name__}"
            )
        if getattr(optimizer, "own_gradients", False) and not strategy.traits.steps_in_place:
            raise UsageError(
                f"{strategy} exchanges gradients, but {type(optimizer).__name__} computes its own, row by "
                "row: use hogwild, or torch.optim.SGD with backward()"
            )
