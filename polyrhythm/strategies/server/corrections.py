"""Corrections of stale gradients: what the parameters did since the gradient's worker pulled them counts.

Both keep, for each worker, the parameters that it pulled last: a vector of the model's size per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import known_to

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.model.shard import Shard
    from polyrhythm.strategies.server.server_loop import Push


@dataclass(frozen=True)
class _Remembering(ParameterServer):
    """A server that knows what each worker has pulled."""

    free: ClassVar[tuple[str, ...]] = (
        "wait_for", "max_staleness", "weight", "damping", "discard", "pull", "reduce", "clip",
    )  # fmt: skip

    def view(self, shard: Shard, reader: Message) -> Sequence[Tensor]:
        if not self.answers_in_code:
            copied(shard.parameters, self.pulled(shard, reader.sender.rank))
        return shard.parameters

    def pulled(self, shard: Shard, worker: int) -> Sequence[Tensor]:
        """What a worker computes its gradient on."""
        return shard.buffer(known_to(worker) if self.answers_in_code else f"pulled by {worker}")

    def forget(self, shard: Shard, worker: int) -> None:
        shard.buffers.pop(f"pulled by {worker}", None)


@dataclass(frozen=True)
class DelayCompensated(_Remembering):
    """Asynchronous, with each gradient corrected to first order for what it missed (DC-ASGD).

    g <- g + lam g*g*(w - w_i), where w_i is what worker i pulled and g*g stands for the curvature. With
    `adaptive` lam is divided by sqrt(ms + 1e-7) per parameter, ms <- decay ms + (1 - decay) g*g; lam is then
    larger, such as 2. Without delay, or with lam = 0, it is `async` bit for bit.

    >>> import polyrhythm as pr
    >>> pr.parse("dc-asgd:2,adaptive=yes").lam
    2.0
    """

    name: ClassVar[str] = "dc-asgd"
    main: ClassVar[str | None] = "lam"
    paper: ClassVar[str] = "Zheng et al. 2017, Asynchronous SGD with Delay Compensation"

    lam: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lam < float("inf"):
            raise UsageError("lam must be 0 or more")
        if not 0 <= self.decay < 1:
            raise UsageError("decay must be at least 0 and below 1")
        if self.decay != 0.95 and not self.adaptive:
            raise UsageError("decay is for adaptive=yes")

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        if not self.lam:
            return push.update
        if self.adaptive:
            for mean, gradient in zip(shard.buffer("mean square", exact=True), push.update, strict=True):
                mean.mul_(self.decay).add_(gradient.to(mean.dtype).square(), alpha=1 - self.decay)
        if not push.staleness:
            return push.update
        pulled, update = self.pulled(shard, push.worker), tuple(part.clone() for part in push.update)
        for span in shard.spans(push["groups"]):
            gradient = span.of(update)
            missed = gradient.square().mul_(span.of(shard.parameters) - span.of(pulled))
            if self.adaptive:
                missed.div_((span.of(shard.buffer("mean square")) + 1e-7).sqrt_())
            gradient.add_(missed, alpha=-self.lam if span.settings.get("maximize") else self.lam)
        return update


@dataclass(frozen=True)
class GapAware(_Remembering):
    """Asynchronous, with each element of a gradient divided by how far its parameter moved meanwhile.

    P = 1 + |w - w_i| / C and g <- g / P, weight decay included; C is the length of a usual step, the largest
    learning rate times the root of a running mean (0.999) of the squared momentum. However stale, a gradient
    whose parameters did not move counts fully.

    >>> import polyrhythm as pr
    >>> print(pr.parse("gap-aware"))
    gap-aware
    """

    name: ClassVar[str] = "gap-aware"
    paper: ClassVar[str] = "Barkai, Hakimi, Schuster 2020, Gap-Aware Mitigation of Gradient Staleness"
    optimizers: ClassVar[str] = "SGD"

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        counts = shard.notes["steps measured"] = shard.notes.get("steps measured", 0) + 1
        means, steps = shard.buffer("mean square", exact=True), shard.momentum() or push.update
        for mean, step in zip(means, steps, strict=True):
            mean.mul_(0.999).add_(step.to(mean.dtype).square(), alpha=0.001)
        highest = shard.notes.setdefault("highest rates", {})
        for group, settings in enumerate(push["groups"]):
            highest[group] = max(highest.get(group, 0.0), settings["lr"])
        if not push.staleness:
            return push.update
        pulled, update = self.pulled(shard, push.worker), tuple(part.clone() for part in push.update)
        for span in shard.spans(push["groups"], push["absent"]):
            now, gradient = span.of(shard.parameters), span.of(update)
            usual = (span.of(means) / (1 - 0.999**counts)).sqrt_().add_(1e-8).mul_(highest[span.group])
            usual.clamp_(min=1e-30)  # where nothing moves yet, because the rate is still 0
            penalty = (now - span.of(pulled)).abs_().div(usual).add_(1)
            gradient.div_(penalty)
            if decay := span.settings["weight_decay"]:  # the optimizer adds decay * w: less of it, here
                sign = -1 if span.settings["maximize"] else 1
                gradient.add_((now / penalty - now) * (sign * decay))
        return update
