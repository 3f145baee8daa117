"""Momentum under asynchrony, instead of one buffer on the server into which gradients of all ages fall.

These take momentum, weight decay and learning rate from the script's `torch.optim.SGD`. The worker adds
weight decay, with the parameters that it computed the gradient on, so it is added exactly once; the server
then runs SGD without momentum and without decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import ServerLoop
from polyrhythm.strategies.server.worker import GradientWorker
from polyrhythm.strategies.server.worker_vectors import WorkerVectors

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.strategy import Traits
    from polyrhythm.core.worker import Server, State, Worker
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.updates import PushedUpdate, Settings


DANA = "Hakimi, Barkai, Gabel, Schuster 2019, Taming Momentum in a Distributed Environment"


@dataclass(frozen=True)
class AsynchronousMomentum(ParameterServer):
    """The strategies of this module: the worker adds weight decay, the server runs plain SGD."""

    free: ClassVar[tuple[str, ...]] = ("max_staleness", "weight", "damping", "discard", "clip", "prefetch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness == 0:
            raise UsageError("each push is a step of its own here; use a max_staleness of 1 or more")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, optimizer="SGD", stale_momentum=False)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return DecayingWorker(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return PlainSGDServer(self, node, shard)


class DecayingWorker(GradientWorker):
    """Pushes the gradient as SGD takes it: downhill, with weight decay."""

    def __init__(self, strategy: AsynchronousMomentum, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        if any(settings["dampening"] for settings in replica.optimizer.param_groups):
            raise UsageError(f"{strategy} has no dampening; leave it out of torch.optim.SGD")
        self._direction = replica.buffer()

    def outgoing(self) -> Vectors:
        direction = copied(self.replica.gradient, self._direction)
        for span in self.replica.spans():
            place = span.of(direction)
            if span.settings["maximize"]:
                place.neg_()
            if decay := span.settings["weight_decay"]:
                place.add_(span.of(self.replica.parameters), alpha=decay)
        return direction


class PlainSGDServer(ServerLoop):
    """Runs SGD without the momentum and weight decay that are applied elsewhere."""

    def update(self, update: Vectors, absent: Sequence[int], settings: Settings) -> None:
        done: dict[str, Any] = {"momentum": 0, "nesterov": False, "weight_decay": 0, "maximize": False}
        self.shard.apply(update, absent, [{**group, **done} for group in settings])


@dataclass(frozen=True)
class DanaZero(AsynchronousMomentum):
    r"""Asynchronous; the server keeps a momentum per worker and sends predicted parameters (DANA-Zero).

    $$
    v_i &\leftarrow \mu v_i + g_i(\hat{w}_i) \\
    w &\leftarrow w - \eta v_i \\
    \hat{w}_i &= w - \eta \mu \sum_j v_j
    $$

    $v_i$ is the momentum of worker $i$, $\eta$ the learning rate and $\mu$ the momentum factor of the
    script's SGD. Worker $i$ gets $\hat{w}_i$, an estimate of the parameters at the time when its gradient
    will arrive. With one worker it is Nesterov's momentum.

    >>> import polyrhythm as pr
    >>> pr.parse("dana-zero").traits.optimizer
    'SGD'
    """

    name: ClassVar[str] = "dana-zero"
    paper: ClassVar[str] = DANA

    def server(self, node: Node, shard: Shard) -> Server:
        return DanaZeroServer(self, node, shard)


class DanaZeroServer(PlainSGDServer):
    """Keeps v_j of each worker and their sum."""

    def __init__(self, strategy: DanaZero, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.momentum = WorkerVectors(shard)
        self.total = shard.zeros()
        self.settings: Settings = ()  # of the last push
        self._ahead = shard.zeros()

    def transform(self, push: PushedUpdate) -> Vectors:
        mine, self.settings = self.momentum[push.worker], push.settings
        for span in self.shard.spans(push.settings, push.absent):
            momentum, everyone = span.of(mine), span.of(self.total)
            everyone.sub_(momentum)
            momentum.mul_(span.settings["momentum"]).add_(span.of(push.update))
            everyone.add_(momentum)
        return mine

    def view(self, reader: Message) -> Vectors:
        if not self.settings:
            return self.shard.parameters
        ahead = copied(self.shard.parameters, self._ahead)
        for span in self.shard.spans(self.settings):
            rate = span.settings["lr"] * span.settings["momentum"]
            span.of(ahead).add_(span.of(self.total), alpha=-rate)
        return ahead

    def forget(self, worker: int) -> None:
        mine = self.momentum.pop(worker, ())
        for total, momentum in zip(self.total, mine, strict=False):
            total.sub_(momentum)

    def state_dict(self) -> State:
        own = {"momentum": self.momentum.state_dict(), "total": list(self.total)}
        return {**super().state_dict(), **own, "settings": list(self.settings)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.momentum.load_state_dict(state["momentum"])
        copied(state["total"], self.total)
        self.settings = state["settings"]


@dataclass(frozen=True)
class DanaSlim(AsynchronousMomentum):
    r"""Asynchronous; each worker keeps its own momentum and pushes Nesterov's direction (DANA-Slim).

    $$
    v_i &\leftarrow \mu v_i + g_i(w) \\
    w &\leftarrow w - \eta (g_i(w) + \mu v_i)
    $$

    It is the same as `dana-zero` while the learning rate is constant, without its state on the server. With
    one worker it is Nesterov's momentum, bit for bit.

    >>> import polyrhythm as pr
    >>> pr.parse("dana-slim").traits.optimizer
    'SGD'
    """

    name: ClassVar[str] = "dana-slim"
    paper: ClassVar[str] = DANA

    # The worker's momentum would not know that the server weighted, clipped or dropped a push.
    free: ClassVar[tuple[str, ...]] = ("max_staleness", "prefetch")

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return DanaSlimWorker(self, node, replica, group)


class DanaSlimWorker(DecayingWorker):
    """Keeps v_i and pushes g + mu v_i."""

    def __init__(self, strategy: DanaSlim, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.momentum = replica.buffer()

    def outgoing(self) -> Vectors:
        direction = super().outgoing()
        for span in self.replica.spans():
            mu, momentum, place = span.settings["momentum"], span.of(self.momentum), span.of(direction)
            momentum.mul_(mu).add_(place)
            place.add_(momentum, alpha=mu)
        return direction

    def own_state(self) -> State:
        return {**super().own_state(), "momentum": cloned(self.momentum)}

    def load_own_state(self, state: State) -> None:
        super().load_own_state(state)
        copied(state["momentum"], self.momentum)


@dataclass(frozen=True)
class OrderedMomentum(AsynchronousMomentum):
    r"""Asynchronous; a late gradient enters the momentum as if it had arrived in time (OrMo).

    Versions are counted in rounds of $N$.

    $$
    u &\leftarrow \mu u, \qquad w \leftarrow w - \eta u && \text{when a round begins} \\
    u &\leftarrow u + \mu^d g, \qquad w \leftarrow w - \eta \sum_{k=0}^{d} \mu^k g && \text{for each gradient}
    $$

    Here $d$ is the number of rounds since the gradient's parameters were pulled. Once all gradients have
    arrived, the momentum is that of $N$ synchronous workers, whatever their order.

    >>> import polyrhythm as pr
    >>> pr.parse("ormo").traits.optimizer
    'SGD'
    """

    name: ClassVar[str] = "ormo"
    paper: ClassVar[str] = "Shi, Yang, Li 2024, Ordered Momentum for Asynchronous SGD"

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        if any(settings["nesterov"] for settings in replica.optimizer.param_groups):
            raise UsageError(f"{self} supports plain momentum only; leave out nesterov, or use dana-slim")
        return super().worker(node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return OrderedMomentumServer(self, node, shard)


class OrderedMomentumServer(PlainSGDServer):
    """Keeps u, and puts each gradient into the round that it was computed in."""

    def __init__(self, strategy: OrderedMomentum, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.rounds = 0  # that have begun
        self.momentum = shard.zeros()
        self._direction = shard.zeros()

    def transform(self, push: PushedUpdate) -> Vectors:
        rounds = self.shard.version // self.started
        late = rounds - push.version // self.started
        begins, self.rounds = rounds > self.rounds, rounds
        for span in self.shard.spans(push.settings):
            mu, momentum, place = span.settings["momentum"], span.of(self.momentum), span.of(self._direction)
            if begins:
                place.copy_(momentum.mul_(mu))
            else:
                place.zero_()
            gradient = span.of(push.update)
            momentum.add_(gradient, alpha=mu**late)
            place.add_(gradient, alpha=sum(mu**power for power in range(late + 1)))
        return self._direction

    def update(self, update: Vectors, absent: Sequence[int], settings: Settings) -> None:
        super().update(update, (), settings)  # parameters without a gradient still have momentum

    def state_dict(self) -> State:
        return {**super().state_dict(), "rounds": self.rounds, "momentum": list(self.momentum)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.rounds = state["rounds"]
        copied(state["momentum"], self.momentum)
