"""Steps down a plane: gradients do not depend on where a worker is, so what is left out can be counted.

Every worker's gradient is a function of its rank and its step, the same in every run. So all runs send the
same, whatever is made of it on its way, and must arrive at the same place but for what was not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.compress.sender import CompressedSender
from polyrhythm.core.codec import Reduction
from polyrhythm.core.compose import gradients_only
from polyrhythm.core.registry import describe, parse_codec
from polyrhythm.core.worker import Worker
from polyrhythm.model.replica import Replica
from tests.support.programs import Half, Mixed

# As they are by default, unless that would hardly send anything of a model as small as the one here.
SMALL = {"topk": "topk:0.1", "randomk": "randomk:0.2", "dgc": "dgc:0.1", "threshold": "threshold:0.25"}
CODECS = [SMALL.get(row.name, row.name) for row in describe("codec")]
# What momentum makes of what waits is another law: here without.
LINEAR = [{"dgc:0.1": "dgc:0.1,momentum=0"}.get(codec, codec) for codec in CODECS]
FEEDBACK = [codec for codec in LINEAR if parse_codec(codec).feedback]
HOPS = [codec for codec in CODECS if parse_codec(codec).reduction is Reduction.HOPS]

SGD = partial(torch.optim.SGD, lr=0.5)


def ways(codecs: Sequence[str]) -> list[str]:
    """Those that can send more than gradients."""
    return [codec for codec in codecs if not gradients_only(parse_codec(codec))]


def layers() -> nn.Module:
    """Two layers, of which one has a side longer than the other."""
    return nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 4)).double()


MODELS: dict[str, Callable[[], nn.Module]] = {"double": layers, "mixed": Mixed, "half": Half}


def slopes(rank: int, step: int, like: nn.Module) -> list[Tensor]:
    """The gradient of each parameter of a worker at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        for parameter in like.parameters()
    ]


@dataclass
class Plane:
    """Takes steps down a plane, and keeps what each worker had after each of them."""

    count: int
    model: Callable[[], nn.Module] = layers
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    rate: Callable[[int], float] | None = None  # the learning rate of each step
    batches: int = 1  # backward passes for each step
    groups: bool = False  # the biases learn at a fifth of the rate
    skips: Callable[[int, int, int], bool] = lambda rank, step, index: False  # parameters without a gradient
    look: bool = False  # at the consensus, after each step
    early: bool = False  # it leaves before all data is seen: what waits is then pushed
    x: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    shown: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    replicas: dict[int, Replica] = field(default_factory=dict)
    workers: dict[int, Any] = field(default_factory=dict)  # the strategy's worker of each rank

    def __call__(self) -> None:
        here = pr.init()
        model = self.model()
        loader: Any = DataLoader(range(64))
        model, optimizer, loader = here.prepare(model, self.optimizer(self.divided(model)), loader)
        if self.early:
            next(iter(loader))  # one batch, and no other
        mine = here.rank
        self.replicas[mine], self.workers[mine] = here._replica, here._worker
        self.x[mine], self.shown[mine] = [], []
        for step in range(1, self.count + 1):
            for number, group in enumerate(optimizer.param_groups):
                if self.rate is not None:
                    group["lr"] = self.rate(step) / (1 + 4 * number)
            optimizer.zero_grad()
            for batch in range(self.batches):
                given = slopes(mine, self.batches * step + batch, model)
                parts = zip(model.parameters(), given, strict=True)
                kept = [each for index, each in enumerate(parts) if not self.skips(mine, step, index)]
                sum((parameter * slope).sum().double() for parameter, slope in kept).backward()
            optimizer.step()
            self.x[mine].append(values(model))
            if self.look:
                self.shown[mine].append(values(here.consensus()))
        if self.rate is not None:  # as a schedule does after each step
            for group in optimizer.param_groups:
                group["lr"] = self.rate(self.count + 1)

    def divided(self, model: nn.Module) -> Any:
        if not self.groups:
            return model.parameters()
        parameters = list(model.parameters())
        return [{"params": [p for p in parameters if p.dim() == size]} for size in (2, 1)]

    def residuals(self) -> list[Tensor]:
        """What all workers have not sent, in the mean, as flat vectors."""
        kept = [residual_of(worker) for _, worker in sorted(self.workers.items())]
        parts = [each or self.replicas[0].layout.vectors(_zeros, exact=True) for each in kept]
        return [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]

    def residual(self, rates: Sequence[float]) -> dict[str, Tensor]:
        """The same by name, each parameter times the rate of its group."""
        layout = self.replicas[0].layout
        flat = self.residuals()
        return {piece.name: layout.view(flat, piece) * rates[piece.group] for piece in layout.pieces}


def residual_of(worker: Worker) -> tuple[Tensor, ...]:
    """What a worker has not sent yet through its codec; empty if it keeps nothing."""
    senders = [found for each in vars(worker).values() for found in (each, getattr(each, "sender", None))]
    for sender in senders:
        if isinstance(sender, CompressedSender):
            return sender.state.vectors.get("residual", ())
    return ()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether they have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(one: dict[str, Tensor], other: dict[str, Tensor], to: float = 1e-12) -> bool:
    """Whether two states are the same but for rounding."""
    top = max(value.abs().max().item() for value in other.values())
    return all((one[name] - other[name]).abs().max().item() <= to * top for name in other)


def moved(state: dict[str, Tensor], by: dict[str, Tensor], sign: float = -1.0) -> dict[str, Tensor]:
    return {name: value + sign * by[name] for name, value in state.items()}


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)
