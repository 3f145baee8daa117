"""The script that the laws run, and what is known of a run of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.strategy import Strategy
from tests.support.programs import events, trained

ROWS, COLUMNS = 4, 5
SIZE = ROWS * (COLUMNS + 1)  # 24 numbers: for 2 and 3 servers, and for 2, 3 and 4 fragments, equal ranges


class Flat(nn.Module):
    """A plane: its gradient is whatever slope it is given, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(ROWS, dtype=torch.float64))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight.view(-1) * slope[:-ROWS]).sum() + (self.bias * slope[-ROWS:]).sum()

    def flat(self) -> Tensor:
        return torch.cat([self.weight.detach().reshape(-1), self.bias.detach()])


@dataclass
class Descent:
    """A script: goes down planes with SGD and keeps where each worker was; the bias has a rate of its own."""

    gradients: Tensor  # by rank, step and element
    rate: Callable[[int], float] = lambda step: 0.1
    momentum: float = 0.0
    decay: float = 0.0
    examples: Tensor | None = None  # the size of each batch, by rank and step; None: there is no data
    begin: Tensor = field(default_factory=lambda: torch.empty(0))
    seen: dict[int, list[Tensor]] = field(default_factory=dict)  # after `prepare`, and after each step

    def __call__(self) -> None:
        here = pr.init()
        model = Flat()
        self.begin = model.flat()
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        optimizer: Any = torch.optim.SGD(groups, 0.1, self.momentum, weight_decay=self.decay)
        turns: Any = range(self.gradients.shape[1])
        if self.examples is None:
            model, optimizer = here.prepare(model, optimizer)
        else:
            model, optimizer, turns = here.prepare(model, optimizer, self.loader())
        seen = self.seen[here.rank] = [model.flat()]
        for step, _ in enumerate(turns, 1):
            for group, rate in zip(optimizer.param_groups, self.rates(step)[[0, -1]], strict=True):
                group["lr"] = float(rate)
            optimizer.zero_grad()
            model(self.gradients[here.rank, step - 1]).backward()
            optimizer.step()
            seen.append(model.flat())

    def rates(self, step: int) -> Tensor:
        """The learning rate of each element."""
        return self.rate(step) * torch.tensor([1.0] * (SIZE - ROWS) + [0.25] * ROWS, dtype=torch.float64)

    def sgd(self, x: Tensor, b: Tensor, g: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """One step of the optimizer: the parameters and the momentum after it."""
        b = self.momentum * b + g + self.decay * x
        return x - self.rates(step) * b, b

    def loader(self) -> Any:
        """One batch per worker and round, each as large as it is said to be."""
        assert self.examples is not None
        stops = self.examples.T.flatten().cumsum(0).tolist()
        batches = [range(start, stop) for start, stop in itertools.pairwise([0, *stops])]
        return DataLoader(range(stops[-1]), batch_sampler=batches)  # type: ignore[arg-type]


@dataclass
class Run:
    """What a run was given, and what it has logged and brought home."""

    strategy: Strategy
    descent: Descent
    summary: dict[str, Any]
    sites: list[list[int]]

    @property
    def workers(self) -> int:
        return len(self.descent.gradients)

    @property
    def count(self) -> int:
        return self.descent.gradients.shape[1]

    @property
    def ranks(self) -> range:
        return range(self.workers)

    @property
    def begin(self) -> Tensor:
        return self.descent.begin

    @cached_property
    def result(self) -> Tensor:
        state = trained(self.summary)
        return torch.cat([state["weight"].reshape(-1), state["bias"]])

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return events(self.summary)

    def rate(self, step: int) -> Tensor:
        return self.descent.rates(step)

    def sgd(self, x: Tensor, b: Tensor, g: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return self.descent.sgd(x, b, g, step)

    def gradient(self, rank: int, step: int) -> Tensor:
        """What a worker's batch counts for: g_i, times its share of the examples if they are unequal."""
        return self.descent.gradients[rank, step - 1] * self._share(rank, step)

    def _share(self, rank: int, step: int) -> float:
        names = [level.name for level in self.strategy.parts]
        if self.descent.examples is None or names[0] == "average":  # it weighs parameters instead
            return 1.0
        peers = list(self.ranks)
        if "average" in names:
            peers = next(site for site in self.sites if rank in site)
        sizes = self.descent.examples[:, step - 1].double()
        return float(sizes[rank] * len(peers) / sizes[peers].sum())

    def trained_on(self, ranks: Sequence[int], after: int, until: int) -> float:
        """How many examples some workers have trained on between two steps."""
        if self.descent.examples is None:
            return float(len(ranks))
        return float(self.descent.examples[list(ranks), after:until].sum())


@dataclass
class Outcome:
    """Where a rule says that every worker is after every step, and what it says that the run brings home."""

    result: Tensor
    seen: list[list[Tensor]]


Reference = Callable[[Run], Outcome]


def mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(0)


def zero() -> Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)
