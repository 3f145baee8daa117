"""Momentum under asynchrony: instead of the one buffer of a server, into which gradients of all ages fall.

These take momentum, weight decay and learning rate from the script's `torch.optim.SGD`. Weight decay is added
by the worker, to the parameters that it computed the gradient on, and so exactly once; the server then runs
SGD without momentum and without decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.errors import UsageError
from polyrhythm.strategies.desk import copied
from polyrhythm.strategies.server import ParameterServer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Field, Message, Node
    from polyrhythm.replica import Replica
    from polyrhythm.shard import Shard
    from polyrhythm.strategies.desk import Push, Settings


DANA = "Hakimi, Barkai, Gabel, Schuster 2019, Taming Momentum in a Distributed Environment"


@dataclass(frozen=True)
class _WithMomentum(ParameterServer):
    """What the strategies of this module have in common."""

    optimizers: ClassVar[str] = "SGD"
    free: ClassVar[tuple[str, ...]] = ("max_staleness", "weight", "damping", "discard", "clip", "prefetch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness == 0:
            raise UsageError("each push is a step of its own here; use a max_staleness of 1 or more")

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        if any(group["dampening"] for group in groups):
            raise UsageError(f"{self} has no dampening; leave it out of torch.optim.SGD")

    def outgoing(self, replica: Replica) -> tuple[Sequence[Tensor], Settings]:
        return _decayed(replica), replica.hyper_parameters()

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        shard.apply(update, absent, _plain(groups))


def _decayed(replica: Replica) -> Sequence[Tensor]:
    """The gradient as SGD takes it: downhill, with weight decay."""
    direction = copied(replica.gradient, replica.buffer("direction"))
    for span in replica.spans():
        place = span.of(direction)
        if span.settings["maximize"]:
            place.neg_()
        if decay := span.settings["weight_decay"]:
            place.add_(span.of(replica.parameters), alpha=decay)
    return direction


def _plain(groups: Settings) -> list[dict[str, Any]]:
    """The settings of SGD without what is done elsewhere."""
    done: dict[str, Any] = {"momentum": 0, "nesterov": False, "weight_decay": 0, "maximize": False}
    return [{**group, **done} for group in groups]


@dataclass(frozen=True)
class DanaZero(_WithMomentum):
    """Asynchronous; the server keeps a momentum for each worker, and shows where all of them will lead.

    v_i <- mu v_i + g, w <- w - lr v_i, and worker i gets w - lr mu sum_j v_j: an estimate of where the
    parameters will be when its gradient comes. One worker: Nesterov's momentum.

    >>> import polyrhythm as pr
    >>> print(pr.parse("dana-zero"))
    dana-zero
    """

    name: ClassVar[str] = "dana-zero"
    paper: ClassVar[str] = DANA

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        mine, total = shard.buffer(f"momentum of {push.worker}"), shard.buffer("sum of momenta")
        shard.notes["groups"] = push["groups"]
        for span in shard.spans(push["groups"], push["absent"]):
            momentum, everyone = span.of(mine), span.of(total)
            everyone.sub_(momentum)
            momentum.mul_(span.settings["momentum"]).add_(span.of(push.update))
            everyone.add_(momentum)
        return mine

    def view(self, shard: Shard, reader: Message) -> Sequence[Tensor]:
        if "groups" not in shard.notes:
            return shard.parameters
        ahead, total = copied(shard.parameters, shard.buffer("ahead")), shard.buffer("sum of momenta")
        for span in shard.spans(shard.notes["groups"]):
            span.of(ahead).add_(span.of(total), alpha=-span.settings["lr"] * span.settings["momentum"])
        return ahead

    def forget(self, shard: Shard, worker: int) -> None:
        mine = shard.buffers.pop(f"momentum of {worker}", ())
        for total, momentum in zip(shard.buffer("sum of momenta"), mine, strict=False):
            total.sub_(momentum)


@dataclass(frozen=True)
class DanaSlim(_WithMomentum):
    """Asynchronous; each worker keeps its own momentum and pushes Nesterov's direction, not its gradient.

    v_i <- mu v_i + g, and w <- w - lr (g + mu v_i): the same as `dana-zero` while the learning rate is
    constant, without its state on the server. One worker: Nesterov's momentum, bit for bit.

    >>> import polyrhythm as pr
    >>> print(pr.parse("dana-slim"))
    dana-slim
    """

    name: ClassVar[str] = "dana-slim"
    paper: ClassVar[str] = DANA

    # What the server made of a push the worker's momentum would not know.
    free: ClassVar[tuple[str, ...]] = ("max_staleness", "prefetch")

    def outgoing(self, replica: Replica) -> tuple[Sequence[Tensor], Settings]:
        direction, momenta = _decayed(replica), replica.buffer("momentum")
        for span in replica.spans():
            mu, momentum, place = span.settings["momentum"], span.of(momenta), span.of(direction)
            momentum.mul_(mu).add_(place)
            place.add_(momentum, alpha=mu)
        return direction, replica.hyper_parameters()


@dataclass(frozen=True)
class OrderedMomentum(_WithMomentum):
    """Asynchronous; a late gradient enters the momentum where it would be, had it come in time (OrMo).

    Versions are counted in rounds of N. A round begins with u <- mu u, w <- w - lr u. A gradient that was
    computed d rounds ago then adds mu^d g to u and takes (1 + mu + ... + mu^d) g from w, so that when all
    have come the momentum is that of N workers in step, whatever their order.

    >>> import polyrhythm as pr
    >>> print(pr.parse("ormo"))
    ormo
    """

    name: ClassVar[str] = "ormo"
    paper: ClassVar[str] = "Shi, Yang, Li 2024, Ordered Momentum for Asynchronous SGD"

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        super().check_groups(groups)
        if any(group["nesterov"] for group in groups):
            raise UsageError(f"{self} orders plain momentum; leave out nesterov, or use dana-slim")

    def serve(self, node: Node, shard: Shard) -> None:
        shard.notes["round"] = len(node.workers)
        super().serve(node, shard)

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        rounds = shard.version // shard.notes["round"]
        late = rounds - push["version"] // shard.notes["round"]
        begins = rounds > shard.notes.get("rounds", 0)
        shard.notes["rounds"] = rounds
        momenta, direction = shard.buffer("momentum"), shard.buffer("direction")
        for span in shard.spans(push["groups"]):
            mu, momentum, place = span.settings["momentum"], span.of(momenta), span.of(direction)
            if begins:
                place.copy_(momentum.mul_(mu))
            else:
                place.zero_()
            gradient = span.of(push.update)
            momentum.add_(gradient, alpha=mu**late)
            place.add_(gradient, alpha=sum(mu**power for power in range(late + 1)))
        return direction

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        super().update(shard, update, (), groups)  # who has no gradient now still has momentum


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
            raise UsageError("lr must be above 0, and beta at least 0 and below 1")
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
            node.log("local steps", step=replica.steps, steps=steps, share=share)

    def hear(self, shard: Shard, message: Message) -> None:
        speeds = shard.notes.setdefault("speeds", {})
        if message.kind == "pull":  # it begins, or begins anew
            speeds.pop(message.sender.rank, None)
        elif self.dynamic:
            speeds[message.sender.rank] = message["speed"]

    def tell(self, shard: Shard, reader: Message) -> dict[str, Field]:
        if "speed" not in reader.fields:
            return {}
        # Its own too: it may have pushed before the server heard that it has joined.
        return {"fastest": max([reader["speed"], *shard.notes["speeds"].values()])}

    def forget(self, shard: Shard, worker: int) -> None:
        shard.notes.get("speeds", {}).pop(worker, None)

    def serve(self, node: Node, shard: Shard) -> None:
        shard.notes["round"] = len(node.workers)
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
