"""Small training scripts as values: a test chooses what is special about each.

A `Script` is called like a user's `main()`. Called outside a run it trains alone, in plain PyTorch, with the
very same lines: that is what the tests compare with.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.record.reader import read_rows
from polyrhythm.session.seeds import mix

FEATURES, CLASSES = 5, 3

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
ADAM = partial(torch.optim.Adam, lr=0.01)


# How fast workers are, as the text of a cluster.toml.
SPEEDS = {
    "constant": '[[hosts]]\nstep_time = "10 ms"',
    "exponential": '[[hosts]]\nstep_time = { exponential = "10 ms" }',
    "heterogeneous": '[[hosts]]\ncount = 1\nspeed = 0.05\nstep_time = { lognormal = "10 ms", sigma = 0.5 }\n'
    '[[hosts]]\ncount = 2\nspeed = 3.0\n[[hosts]]\nstep_time = { uniform = ["5 ms", "30 ms"] }',
}


class Examples(TensorDataset):
    """A small classification problem; `seen` is a file that gets the index of every example that is read."""

    def __init__(self, size: int, seen: Path | None = None) -> None:
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
        rule = torch.randn(FEATURES, CLASSES, dtype=torch.float64, generator=generator)
        super().__init__(x, (x @ rule).argmax(1))
        self.seen = seen

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.seen is not None:
            with self.seen.open("a") as file:
                file.write(f"{index}\n")
        return super().__getitem__(index)


class Mixed(nn.Module):
    """Layers of two dtypes, taking turns."""

    def __init__(self, other: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8, dtype=torch.float64)
        self.middle = nn.Linear(8, 8, dtype=other)
        self.last = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).to(self.middle.weight.dtype)
        return self.last(torch.tanh(self.middle(hidden)).double())


# Only on one server is it the same bits as alone: PyTorch rounds `x.add_(y, alpha=a)` of bfloat16 differently
# at the end of a tensor than in its middle, so a tensor that is cut between servers differs.
Half = partial(Mixed, torch.bfloat16)


class Odd(nn.Module):
    """Unused, frozen and tied parameters, and a buffer that counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.middle = nn.Linear(8, 8)
        self.tied = self.middle
        self.unused = nn.Linear(2, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.frozen(self.tied(torch.tanh(self.middle(self.first(x))))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def odd() -> nn.Module:
    return Odd().double()


DEAD = -1


@dataclass
class Script:
    """One training script and all that may be special about it."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    size: int = 48
    batch: int = 4
    epochs: int = 2
    shuffle: bool = False
    groups: bool = False  # the biases have a group of their own, with another learning rate
    accumulate: int = 1
    clip: float = 0.0
    schedule: bool = False
    closure: bool = False
    set_to_none: bool = True
    loaders: int = 0  # processes that load data
    seen: Path | None = None
    kills: dict[int, int] = field(default_factory=dict)  # the step in whose midst a worker kills itself, once
    pause: float = 0.0  # seconds that a step takes at least

    def __call__(self) -> nn.Module:
        session = pr.init()
        examples = Examples(self.size, self.seen)
        model = self.model()
        optimizer = self.optimizer(self.divided(model))
        loader = DataLoader(
            examples, batch_size=self.batch, shuffle=self.shuffle, num_workers=self.loaders,
        )  # fmt: skip
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9) if self.schedule else None
        session.log(before=self.loss(session.consensus(), examples))

        steps = itertools.count(1)

        def step(batch: Iterable[Tensor] | None) -> None:
            time.sleep(self.pause)
            if self.kills:
                self.die_or_wait(session, next(steps))
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step(partial(self.backward, model, optimizer, batch) if batch else None)
            optimizer.zero_grad(set_to_none=self.set_to_none)
            if scheduler is not None:
                scheduler.step()

        for _ in range(self.epochs):
            number = 0
            for number, batch in enumerate(loader, 1):
                if self.closure:
                    step(batch)
                    continue
                self.backward(model, None, batch)
                if number % self.accumulate == 0:
                    step(None)
            if number % self.accumulate:
                step(None)
        session.log(after=self.loss(session.consensus(), examples))
        return model

    def __post_init__(self) -> None:
        # Shared with the processes of a run, by rank: 0, the process of a worker that has begun, or DEAD.
        self.processes = memoryview(mmap.mmap(-1, 256)).cast("i")

    def die_or_wait(self, session: Any, step: int) -> None:
        """Dies if it is time to; else waits for those that die in this step or before.

        Where no worker waits for another, the survivors would otherwise take all the data before the death.
        One that waits for a survivor cannot come to its end by itself, and is killed where it waits.
        """
        if session.rank in self.kills and not session._node.incarnation:  # not its replacement
            self.processes[session.rank] = os.getpid()
            if self.kills[session.rank] == step:
                self.kill(session.rank)
        for rank in [rank for rank, at in self.kills.items() if at <= step and rank != session.rank]:
            while not self.processes[rank]:
                time.sleep(0.001)
            patience = time.monotonic() + 1
            while self.processes[rank] != DEAD and time.monotonic() < patience:
                time.sleep(0.001)
            self.kill(rank)

    def kill(self, rank: int) -> None:
        process, self.processes[rank] = self.processes[rank], DEAD
        with suppress(ProcessLookupError):  # two survivors may do this at the same time
            if process != DEAD:
                os.kill(process, signal.SIGKILL)

    def backward(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> Tensor:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = F.cross_entropy(model(batch[0]), batch[1]) / self.accumulate
        loss.backward()
        return loss

    def divided(self, model: nn.Module) -> Any:
        if not self.groups:
            return model.parameters()
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return [{"params": weights}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]

    @staticmethod
    def loss(model: nn.Module, examples: Examples) -> float:
        training, calls = model.training, getattr(model, "calls", None)
        before = None if calls is None else calls.clone()
        with torch.no_grad():
            loss = F.cross_entropy(model.eval()(examples.tensors[0]), examples.tensors[1]).item()
        model.train(training)
        if calls is not None:
            calls.copy_(before)
        return loss


class Point(nn.Module):
    """A few numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))


@dataclass
class Steps:
    """Takes `count` steps of SGD on a few numbers, without data; `slope(rank, x)` is the gradient."""

    count: int
    slope: Callable[[int, Tensor], Tensor] = lambda rank, x: torch.ones_like(x)
    lr: float = 1.0
    size: int = 1

    def __call__(self) -> None:
        session = pr.init()
        point = Point(self.size)
        point, optimizer = session.prepare(point, torch.optim.SGD(point.parameters(), lr=self.lr))
        for _ in range(self.count):
            point.x.grad = self.slope(session.rank, point.x.detach())
            optimizer.step()


@dataclass
class Walk:
    """Steps of SGD on f = h x^2 / 2 from x = 1, or on whatever `slope(rank, x)` says; keeps what was seen."""

    count: int
    lr: float = 0.1
    momentum: float = 0.0
    size: int = 1
    nesterov: bool = False
    decay: float = 0.0
    slope: Callable[[int, Tensor], Tensor] = lambda rank, x: x.clone()
    seen: list[tuple[int, Tensor]] = field(default_factory=list)
    points: dict[int, Point] = field(default_factory=dict)  # each worker's own, as the run has left it

    def __call__(self) -> None:
        session = pr.init()
        point = Point(self.size)
        with torch.no_grad():
            point.x.fill_(1.0)
        optimizer: Any = torch.optim.SGD(
            point.parameters(), self.lr, self.momentum, nesterov=self.nesterov, weight_decay=self.decay
        )
        point, optimizer = session.prepare(point, optimizer)
        self.points[session.rank] = point
        for _ in range(self.count):
            self.seen.append((session.rank, point.x.detach().clone()))
            point.x.grad = self.slope(session.rank, point.x.detach())
            optimizer.step()
        self.seen.append((session.rank, point.x.detach().clone()))

    @property
    def grows(self) -> bool:
        """Whether the largest |x| in the last fifth is larger than in the second."""
        fifth = len(self.seen) // 5
        size = [x.abs().max().item() for _, x in self.seen]
        return max(size[-fifth:]) > max(size[fifth : 2 * fifth])


def pushes(summary: dict[str, Any], server: int = 0) -> list[dict[str, Any]]:
    """What a server did with pushes, in order."""
    return [line for line in events(summary, "apply", "drop") if line["node"] == f"server {server}"]


def alone(script: Script, seed: int = 0) -> dict[str, Tensor]:
    """What the script trains in plain PyTorch, from the model that a run with this seed begins with."""
    torch.manual_seed(mix("model", seed))
    return dict(script().state_dict())


def trained(summary: dict[str, Any]) -> dict[str, Tensor]:
    """The final parameters and buffers of a run."""
    return safetensors.torch.load_file(Path(summary["folder"]) / "consensus.safetensors")


def events(summary: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """The event log of a run, in order; only these kinds, if any are named."""
    return list(read_rows(summary["folder"], *kinds))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states, relative to the largest number."""
    assert one.keys() == other.keys()
    top = max(value.double().abs().max().item() for value in one.values())
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one) / top
