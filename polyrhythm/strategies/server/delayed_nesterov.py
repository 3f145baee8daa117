"""Asynchronous DiLoCo: local steps, and an outer optimizer on the server that waits for no worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import LocalStepsChosen
from polyrhythm.model.vectors import cloned, copied, difference
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import ServerLoop
from polyrhythm.strategies.server.updates import PushRequest
from polyrhythm.strategies.server.worker import ParameterServerWorker

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Field, Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.worker import Server, State, Worker
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.updates import Settings


@dataclass(frozen=True)
class DelayedNesterov(ParameterServer):
    r"""Asynchronous DiLoCo: the server applies each displacement as it arrives, and momentum every N-th time.

    $$
    d_i &= w_{\text{pulled}} - w_i \quad \text{after } H \text{ local steps} \\
    w &\leftarrow w - \frac{\gamma}{N} d_i && \text{at each push} \\
    m &\leftarrow \beta m + \bar{d}, \qquad w \leftarrow w - \gamma \beta m
    && \text{at each } N\text{-th push}
    $$

    Here $\bar{d}$ is the mean of the last $N$ displacements. $N$ pushes from one $w$ are one step of
    Nesterov's momentum. Local steps are those of the script's own optimizer.

    With `dynamic` worker $i$ takes $\max(1, \lfloor H v_i / \max_j v_j \rfloor)$ steps, where $v$ is a
    worker's speed in steps per second, measured from push to push without the time that it waits. So all push
    about equally often, and no push is much staler than another (DyLU, of the same paper). The first push of
    a worker comes after `period` steps, because its speed is not known before.

    - `period`: local steps between two pushes
    - `lr`: the outer learning rate $\gamma$
    - `beta`: the outer momentum
    - `dynamic`: slower workers take fewer local steps

    >>> import polyrhythm as pr
    >>> pr.parse("delayed-nesterov:50,dynamic=yes").period
    50
    """

    name: ClassVar[str] = "delayed-nesterov"
    main: ClassVar[str | None] = "period"
    shows_main: ClassVar[bool] = True
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"
    paper: ClassVar[str] = "Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling"

    free: ClassVar[tuple[str, ...]] = ("max_staleness", "weight", "damping", "discard")

    period: int = 8
    lr: float = 0.7
    beta: float = 0.9
    dynamic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise UsageError("period must be 1 or more")
        if not 0 < self.lr < float("inf") or not 0 <= self.beta < 1:
            raise UsageError("lr must be a finite number above 0, and beta at least 0 and below 1")
        if self.max_staleness == 0:
            raise UsageError("each push is a step of its own here; use a max_staleness of 1 or more")

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return DelayedNesterovWorker(self, node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return DelayedNesterovServer(self, node, shard)


class DelayedNesterovWorker(ParameterServerWorker):
    """Takes local steps, then pushes the displacement."""

    strategy: DelayedNesterov

    def __init__(self, strategy: DelayedNesterov, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.pulled = replica.buffer()  # the parameters that the local steps began with
        self.local_steps = 0  # since then
        self.period = strategy.period  # local steps until the next push
        self.since = 0.0  # when the local steps began, later by all waits since
        self._displacement = replica.buffer()

    def start(self) -> None:
        super().start()
        copied(self.replica.parameters, self.pulled)
        self.since = self.node.now()

    def step(self) -> None:
        self.replica.apply()
        self.local_steps += 1
        if self.local_steps >= self.period:
            self.choose_period(self.exchange())

    def finish(self) -> None:
        if self.local_steps:
            self.exchange()
        super().finish()

    def consensus(self, final: bool = False) -> Vectors:
        before = self.node.now()
        consensus = super().consensus(final)
        self.since += self.node.now() - before  # waiting is not working
        return consensus

    def exchange(self) -> float:
        """Pushes and pulls. Returns this worker's speed, as a share of the fastest one's."""
        dynamic, parameters = self.strategy.dynamic, self.replica.parameters
        d = difference(self.pulled, parameters, into=self._displacement)
        # In simulation steps may take no time.
        speed = self.local_steps / max(self.node.now() - self.since, 1e-9)
        extras: dict[str, Field] = {"speed": speed} if dynamic else {}
        replies = self.servers.push(PushRequest(d, extras=extras))
        copied(parameters, self.pulled)
        self.local_steps, self.since = 0, self.node.now()
        return speed / max(reply["fastest"] for reply in replies) if dynamic else 1.0

    def choose_period(self, share: float) -> None:
        """Chooses the number of local steps until the next push."""
        # Clocks round: the same speed, measured twice, may differ in its last digits.
        steps = max(1, math.floor(self.strategy.period * share + 1e-6))
        if steps != self.period:
            self.period = steps
            self.node.log(LocalStepsChosen(self.replica.steps, steps, share))

    def state_dict(self) -> State:
        before = self.node.now()
        state = super().state_dict()
        self.since += self.node.now() - before
        return state

    def own_state(self) -> State:
        elapsed = self.node.now() - self.since
        own = {"pulled": cloned(self.pulled), "local_steps": self.local_steps, "period": self.period}
        return {**super().own_state(), **own, "elapsed": elapsed}

    def load_own_state(self, state: State) -> None:
        super().load_own_state(state)
        copied(state["pulled"], self.pulled)
        self.local_steps, self.period = state["local_steps"], state["period"]
        self.since = self.node.now() - state["elapsed"]


class DelayedNesterovServer(ServerLoop):
    """Applies each displacement, and every N-th time the momentum of the last N."""

    strategy: DelayedNesterov

    def __init__(self, strategy: DelayedNesterov, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.momentum, self.total = shard.zeros(), shard.zeros()  # m, and the sum of d in this round
        self.speeds: dict[int, float] = {}  # of the workers

    def update(self, update: Vectors, absent: Sequence[int], settings: Settings) -> None:
        lr, beta, count = self.strategy.lr, self.strategy.beta, self.started
        self.shard.shift(update, -lr / count)
        for place, part in zip(self.total, update, strict=True):
            place.add_(part)
        if self.shard.version % count:
            return
        for part, momentum, place in zip(self.shard.parameters, self.momentum, self.total, strict=True):
            momentum.mul_(beta).add_(place, alpha=1 / count)
            part.add_(momentum, alpha=-lr * beta)
            place.zero_()

    def on_request(self, message: Message) -> None:
        if message.kind == "pull":  # it starts, and its speed is not known yet
            self.speeds.pop(message.sender.rank, None)
        elif "speed" in message.fields:
            self.speeds[message.sender.rank] = message["speed"]

    def extras(self, reader: Message) -> dict[str, Field]:
        if "speed" not in reader.fields:
            return {}
        # Its own too: it may have pushed before the server was told that it has joined.
        return {"fastest": max([reader["speed"], *self.speeds.values()])}

    def forget(self, worker: int) -> None:
        self.speeds.pop(worker, None)

    def state_dict(self) -> State:
        own = {"momentum": list(self.momentum), "total": list(self.total), "speeds": dict(self.speeds)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copied(state["momentum"], self.momentum)
        copied(state["total"], self.total)
        self.speeds = dict(state["speeds"])
