"""Elastic averaging: workers explore on their own, on a spring that ties them to a center."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import difference
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import ServerLoop
from polyrhythm.strategies.server.updates import PushRequest
from polyrhythm.strategies.server.worker import ParameterServerWorker
from polyrhythm.strategies.server.worker_vectors import WorkerVectors

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import Server, State, Worker
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.updates import PushedUpdate, Settings


@dataclass(frozen=True)
class Elastic(ParameterServer):
    r"""Workers train locally; every `period` steps each worker and a center pull each other closer (EASGD).

    $$
    d &= \alpha (x_i - \tilde{x}) \\
    x_i &\leftarrow x_i - d, \qquad \tilde{x} \leftarrow \tilde{x} + d
    $$

    Each gains what the other loses. In between $x_i$ takes steps of the script's own optimizer; the exchange
    comes before a step, whose gradient is that of the old $x_i$. The result is the center $\tilde{x}$. With
    `max_staleness=0` all exchange together, with the same center: synchronous EASGD. With a codec the worker
    pulls the center first, computes $d$ and sends it through the codec; both take the decoded $d$. What the
    codec leaves out stays in $x_i - \tilde{x}$, and so in the next $d$.

    - `period`: steps between two exchanges
    - `alpha`: the elasticity; none: $0.9 / N$

    >>> import polyrhythm as pr
    >>> pr.parse("easgd:10,alpha=0.1").period
    10
    """

    name: ClassVar[str] = "easgd"
    main: ClassVar[str | None] = "period"
    shows_main: ClassVar[bool] = True
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"
    paper: ClassVar[str] = "Zhang, Choromanska, LeCun 2015, Deep Learning with Elastic Averaging SGD"

    free: ClassVar[tuple[str, ...]] = ("max_staleness",)

    period: int = 4
    alpha: float | None = None
    reduce: Literal["mean", "sum"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise UsageError("period must be 1 or more")
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise UsageError("alpha must be 0 or more")

    @property
    def feedback(self) -> bool:
        return False

    def elasticity(self, node: Node) -> float:
        """alpha, or its default."""
        return 0.9 / len(node.members.workers) if self.alpha is None else self.alpha

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return (ElasticWorker if self.codec is None else CodedElasticWorker)(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return (ElasticServer if self.codec is None else CenterServer)(self, node, shard)


class ElasticWorker(ParameterServerWorker):
    """Pushes x_i and gets d."""

    strategy: Elastic

    def __init__(self, strategy: Elastic, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.steps = 0
        self._difference = replica.buffer()

    def step(self) -> None:
        self.steps += 1
        if self.steps % self.strategy.period == 0:
            self.exchange()  # before the step, whose gradient is that of the old x_i
        self.replica.apply()

    def exchange(self) -> None:
        """x_i <- x_i - d."""
        self.servers.push(PushRequest(self.replica.parameters, into=self._difference))
        for part, change in zip(self.replica.parameters, self._difference, strict=True):
            part.sub_(change)

    def own_state(self) -> State:
        return {**super().own_state(), "steps": self.steps}

    def load_own_state(self, state: State) -> None:
        super().load_own_state(state)
        self.steps = state["steps"]


class CodedElasticWorker(ElasticWorker):
    """Pulls c, computes d and pushes it through the codec."""

    def __init__(self, strategy: Elastic, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self._center, self._decoded = replica.buffer(), replica.buffer(exact=True)

    def exchange(self) -> None:
        self.servers.pull(into=self._center)
        for part in difference(self.replica.parameters, self._center, into=self._difference):
            part.mul_(self.strategy.elasticity(self.node))
        self.servers.push(PushRequest(self._difference, fetch=False, decoded=self._decoded))
        for part, change in zip(self.replica.parameters, self._decoded, strict=True):
            part.sub_(change)


class CenterServer(ServerLoop):
    """Holds c, and adds each d that is pushed."""

    strategy: Elastic

    def update(self, update: Vectors, absent: Sequence[int], settings: Settings) -> None:
        self.shard.shift(update)


class ElasticServer(CenterServer):
    """Computes d once and sends it back: the worker subtracts the bits that the center adds."""

    def __init__(self, strategy: Elastic, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.alpha = strategy.elasticity(node)
        self.differences = WorkerVectors(shard)

    def transform(self, push: PushedUpdate) -> Vectors:
        d = difference(push.update, self.shard.parameters, into=self.differences[push.worker])
        for part in d:
            part.mul_(self.alpha)
        return d

    def view(self, reader: Message) -> Vectors:
        return self.shard.parameters if reader.kind == "pull" else self.differences[reader.sender.rank]

    def forget(self, worker: int) -> None:
        self.differences.pop(worker, None)
