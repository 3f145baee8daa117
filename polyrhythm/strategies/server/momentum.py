"""Momentum under asynchrony: instead of the one buffer of a server, into which gradients of all ages fall.

These take momentum, weight decay and learning rate from the script's `torch.optim.SGD`. Weight decay is added
by the worker, to the parameters that it computed the gradient on, and so exactly once; the server then runs
SGD without momentum and without decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.server.parameter_server import ParameterServer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.strategies.server.server_loop import Push, Settings


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
        return _decayed(replica), replica.settings()

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
    remembers: ClassVar[tuple[str, ...]] = ("momentum",)
    paper: ClassVar[str] = DANA

    # What the server made of a push the worker's momentum would not know.
    free: ClassVar[tuple[str, ...]] = ("max_staleness", "prefetch")

    def outgoing(self, replica: Replica) -> tuple[Sequence[Tensor], Settings]:
        direction, momenta = _decayed(replica), replica.buffer("momentum")
        for span in replica.spans():
            mu, momentum, place = span.settings["momentum"], span.of(momenta), span.of(direction)
            momentum.mul_(mu).add_(place)
            place.add_(momentum, alpha=mu)
        return direction, replica.settings()


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
        shard.notes["round"] = len(node.members.workers)
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
