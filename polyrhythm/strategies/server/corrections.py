"""Corrections of a stale gradient by how far the parameters have moved since its worker pulled them.

Both keep, for each worker, the parameters that it pulled last: a vector of the model's size per worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import cloned, copied
from polyrhythm.strategies.server.parameter_server import ParameterServer
from polyrhythm.strategies.server.server_loop import ServerLoop
from polyrhythm.strategies.server.worker_vectors import WorkerVectors

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.strategy import Traits
    from polyrhythm.core.worker import Server, State
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.updates import PushedUpdate


@dataclass(frozen=True)
class StalenessCorrection(ParameterServer):
    """A server that corrects a gradient by the parameters that its worker has pulled."""

    free: ClassVar[tuple[str, ...]] = (
        "wait_for", "max_staleness", "weight", "damping", "discard", "pull", "reduce", "clip",
    )  # fmt: skip


class CorrectingServer(ServerLoop):
    """Knows the parameters that each worker has pulled."""

    def __init__(self, strategy: StalenessCorrection, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        # Where replies are in code, these are known anyway.
        self.pulled = WorkerVectors(shard) if self.coded is None else self.coded.known

    def view(self, reader: Message) -> Vectors:
        if self.coded is None:
            copied(self.shard.parameters, self.pulled[reader.sender.rank])
        return self.shard.parameters

    def forget(self, worker: int) -> None:
        self.pulled.pop(worker, None)

    def state_dict(self) -> State:
        pulled = self.pulled.state_dict() if self.coded is None else None
        return {**super().state_dict(), "pulled": pulled}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if self.coded is None:
            self.pulled.load_state_dict(state["pulled"])


@dataclass(frozen=True)
class DelayCompensated(StalenessCorrection):
    r"""Asynchronous; corrects each gradient to first order for the updates that it missed (DC-ASGD).

    $$
    w_{t+1} = \operatorname{Opt}\big(w_t, g + \lambda g \odot g \odot (w_t - w_i)\big)
    $$

    Worker $i$ has pulled $w_i$ and computed $g$ there; $g \odot g$ approximates the curvature. With
    `adaptive`, $\lambda$ is divided by $\sqrt{v + 10^{-7}}$ per parameter, where
    $v \leftarrow d v + (1 - d) g \odot g$ and $d$ is `decay`; it is then larger, such as 2. Without delay, or
    with $\lambda = 0$, it is `async` bit for bit.

    - `lam`: the strength $\lambda$ of the correction
    - `adaptive`: divide the correction by the root of the mean squared gradient
    - `decay`: the decay $d$ of that mean

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
            raise UsageError("decay needs adaptive=yes")

    def server(self, node: Node, shard: Shard) -> Server:
        if not self.lam:
            return super().server(node, shard)
        return DelayCompensatedServer(self, node, shard)


class DelayCompensatedServer(CorrectingServer):
    """Adds lam g*g*(w - w_i) to the gradient of worker i."""

    strategy: DelayCompensated

    def __init__(self, strategy: DelayCompensated, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.mean_square = shard.zeros(exact=True) if strategy.adaptive else ()

    def transform(self, push: PushedUpdate) -> Vectors:
        lam, decay = self.strategy.lam, self.strategy.decay
        if self.strategy.adaptive:
            for mean, gradient in zip(self.mean_square, push.update, strict=True):
                mean.mul_(decay).add_(gradient.to(mean.dtype).square(), alpha=1 - decay)
        if not push.staleness:
            return push.update
        pulled, update = self.pulled[push.worker], cloned(push.update)
        for span in self.shard.spans(push.settings):
            gradient = span.of(update)
            missed = gradient.square().mul_(span.of(self.shard.parameters) - span.of(pulled))
            if self.strategy.adaptive:
                missed.div_((span.of(self.mean_square) + 1e-7).sqrt_())
            gradient.add_(missed, alpha=-lam if span.settings.get("maximize") else lam)
        return update

    def state_dict(self) -> State:
        return {**super().state_dict(), "mean_square": list(self.mean_square)}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        copied(state["mean_square"], self.mean_square)


@dataclass(frozen=True)
class GapAware(StalenessCorrection):
    r"""Asynchronous; divides each element of a gradient by how far its parameter has moved since the pull.

    However stale, a gradient whose parameters did not move counts fully.

    $$
    C &= \eta_{\max} (\sqrt{\hat{v}} + 10^{-8}), \qquad v \leftarrow 0.999 v + 0.001 b \odot b \\
    P &= 1 + \frac{\lvert w - w_i \rvert}{C} \\
    w &\leftarrow \operatorname{SGD}(w, g / P)
    $$

    Worker $i$ has pulled $w_i$. $C$ is the length of a usual step: $b$ is the momentum buffer, $\hat{v}$ is
    $v$ without the bias of its start at 0, and $\eta_{\max}$ is the largest learning rate so far. Weight
    decay is divided by $P$ too.

    >>> import polyrhythm as pr
    >>> pr.parse("gap-aware").traits.optimizer
    'SGD'
    """

    name: ClassVar[str] = "gap-aware"
    paper: ClassVar[str] = "Barkai, Hakimi, Schuster 2020, Gap-Aware Mitigation of Gradient Staleness"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, optimizer="SGD", stale_momentum=False)

    def server(self, node: Node, shard: Shard) -> Server:
        return GapAwareServer(self, node, shard)


class GapAwareServer(CorrectingServer):
    """Divides the gradient of worker i by P = 1 + |w - w_i| / C."""

    def __init__(self, strategy: GapAware, node: Node, shard: Shard) -> None:
        super().__init__(strategy, node, shard)
        self.count = 0  # of the steps in the running mean
        self.mean_square = shard.zeros(exact=True)
        self.highest: dict[int, float] = {}  # the largest learning rate so far, by parameter group
        self._momentum = shard.zeros()

    def transform(self, push: PushedUpdate) -> Vectors:
        self.count += 1
        steps = self._momentum if self.shard.momentum(into=self._momentum) else push.update
        for mean, step in zip(self.mean_square, steps, strict=True):
            mean.mul_(0.999).add_(step.to(mean.dtype).square(), alpha=0.001)
        for group, settings in enumerate(push.settings):
            self.highest[group] = max(self.highest.get(group, 0.0), settings["lr"])
        if not push.staleness:
            return push.update
        pulled, update = self.pulled[push.worker], cloned(push.update)
        for span in self.shard.spans(push.settings, push.absent):
            now, gradient = span.of(self.shard.parameters), span.of(update)
            root = (span.of(self.mean_square) / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
            usual = root.mul_(self.highest[span.group])
            usual.clamp_(min=1e-30)  # where nothing moves yet, because the rate is still 0
            penalty = (now - span.of(pulled)).abs_().div(usual).add_(1)
            gradient.div_(penalty)
            if decay := span.settings["weight_decay"]:  # the optimizer adds decay * w: less of it, here
                sign = -1 if span.settings["maximize"] else 1
                gradient.add_((now / penalty - now) * (sign * decay))
        return update

    def state_dict(self) -> State:
        own = {"count": self.count, "mean_square": list(self.mean_square), "highest": dict(self.highest)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.count, self.highest = state["count"], dict(state["highest"])
        copied(state["mean_square"], self.mean_square)
