"""Asynchronous DiLoCo: local steps, and an outer optimizer on the server that does not wait for anybody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import LocalStepsChosen
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.server.parameter_server import ParameterServer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Field, Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.strategies.server.server_loop import Settings


@dataclass(frozen=True)
class DelayedNesterov(ParameterServer):
    """Asynchronous DiLoCo: workers push how far `period` steps alone led; every N-th push adds momentum.

    d = w_pulled - w_i after local steps by the script's own optimizer. Each push: w <- w - lr d/N; every
    N-th: m <- beta m + mean d, w <- w - lr beta m. N pushes from one w are one step of Nesterov's momentum.

    With `dynamic`, worker i takes max(1, floor(period v_i / max_j v_j)) steps, where v is a worker's speed in
    steps per second, measured from push to push without the time that it waits. So all push about as often,
    and nobody's push is much staler than another's (DyLU, of the same paper). Its first push comes after
    `period` steps, for until then its speed is not known.

    >>> import polyrhythm as pr
    >>> pr.parse("delayed-nesterov:50,dynamic=yes").period
    50
    """

    name: ClassVar[str] = "delayed-nesterov"
    main: ClassVar[str | None] = "period"
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

    def start(self, node: Node, replica: Replica) -> None:
        super().start(node, replica)
        copied(replica.parameters, replica.buffer("pulled"))
        replica.notes.update(alone=0, steps=self.period, since=node.now())

    def step(self, node: Node, replica: Replica) -> None:
        replica.apply()
        replica.notes["alone"] += 1
        if replica.notes["alone"] >= replica.notes["steps"]:
            self._choose(node, replica, self._exchange(node, replica))

    def finish(self, node: Node, replica: Replica) -> None:
        if replica.notes["alone"]:
            self._exchange(node, replica)
        super().finish(node, replica)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        before = node.now()
        shown = super().consensus(node, replica)
        replica.notes["since"] += node.now() - before  # waiting is not working
        return shown

    def restore(self, node: Node, replica: Replica) -> None:
        """The optimizer works here."""

    def _exchange(self, node: Node, replica: Replica) -> float:
        """Pushes and pulls. Returns this worker's speed, as a share of the fastest one's."""
        pulled, difference, notes = replica.buffer("pulled"), replica.buffer("difference"), replica.notes
        for place, old, new in zip(difference, pulled, replica.parameters, strict=True):
            place.copy_(old).sub_(new)
        speed = notes["alone"] / max(node.now() - notes["since"], 1e-9)  # where steps seem to take no time
        answers = self._push(node, replica, difference, **({"speed": speed} if self.dynamic else {}))
        copied(replica.parameters, pulled)
        notes.update(alone=0, since=node.now())
        return speed / max(answer["fastest"] for answer in answers) if self.dynamic else 1.0

    def _choose(self, node: Node, replica: Replica, share: float) -> None:
        """How many steps this worker takes until its next push."""
        # Clocks round: the same speed, measured twice, may differ in its last digits.
        steps = max(1, math.floor(self.period * share + 1e-6))
        if steps != replica.notes["steps"]:
            replica.notes["steps"] = steps
            node.log(LocalStepsChosen(replica.steps, steps, share))

    def hear(self, shard: Shard, message: Message) -> None:
        speeds = shard.notes.setdefault("speeds", {})
        if message.kind == "pull":  # it begins, or begins anew
            speeds.pop(message.sender.rank, None)
        elif "speed" in message.fields:
            speeds[message.sender.rank] = message["speed"]

    def tell(self, shard: Shard, reader: Message) -> dict[str, Field]:
        if "speed" not in reader.fields:
            return {}
        # Its own too: it may have pushed before the server heard that it has joined.
        return {"fastest": max([reader["speed"], *shard.notes["speeds"].values()])}

    def forget(self, shard: Shard, worker: int) -> None:
        shard.notes.get("speeds", {}).pop(worker, None)

    def serve(self, node: Node, shard: Shard) -> None:
        shard.notes["round"] = len(node.members.workers)
        super().serve(node, shard)

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        count, total, momenta = shard.notes["round"], shard.buffer("round"), shard.buffer("momentum")
        shard.shift(update, -self.lr / count)
        for place, part in zip(total, update, strict=True):
            place.add_(part)
        if shard.version % count:
            return
        for part, momentum, place in zip(shard.parameters, momenta, total, strict=True):
            momentum.mul_(self.beta).add_(place, alpha=1 / count)
            part.add_(momentum, alpha=-self.lr * self.beta)
            place.zero_()
