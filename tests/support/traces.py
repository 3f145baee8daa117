"""Scripts that keep what every worker has seen, step by step, and the arithmetic to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import polyrhythm as pr
from tests.support.programs import (
    SGD,
)

# A cluster in which an exchange takes longer than a step.
SLOW = '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "8 kB/s"\n'


def drift(rank: int, x: Tensor) -> Tensor:
    """A gradient that differs with the worker, the element and the place."""
    return (0.3 + rank) * x - torch.linspace(-1, 2, len(x), dtype=x.dtype) * (1 + rank)


class Numbers(nn.Module):
    """A few numbers to begin with."""

    def __init__(self, begin: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(begin.clone())


@dataclass
class Trace:
    """Takes steps on a few numbers, without data, and keeps what each worker saw after each of them."""

    count: int
    slope: Callable[[int, Tensor], Tensor] = drift
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    begin: Tensor = field(default_factory=lambda: torch.ones(12, dtype=torch.float64))
    look: bool = False  # at the consensus, after each step
    before: Callable[[int, int, torch.optim.Optimizer], None] = lambda rank, step, optimizer: None
    x: dict[int, list[Tensor]] = field(default_factory=dict)
    state: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)
    sent: dict[int, list[int]] = field(default_factory=dict)
    shown: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        numbers = Numbers(self.begin)
        numbers, optimizer = here.prepare(numbers, self.optimizer(numbers.parameters()))
        mine = here.rank
        for kept in (self.x, self.state, self.sent, self.shown):
            kept[mine] = []
        for step in range(1, self.count + 1):
            self.before(mine, step, optimizer)
            numbers.x.grad = self.slope(mine, numbers.x.detach())
            optimizer.step()
            self.x[mine].append(numbers.x.detach().clone())
            self.state[mine].append(
                {k: torch.as_tensor(v).clone() for k, v in optimizer.state[numbers.x].items()}
            )
            self.sent[mine].append(getattr(here._node, "bytes_sent", 0))
            if self.look:
                self.shown[mine].append(here.consensus().x.detach().clone())

    def sent_by_step(self) -> list[int]:
        """What all workers sent in each step but the first, which cannot be told from the start."""
        totals = [sum(each) for each in zip(*self.sent.values(), strict=True)]
        return [now - then for then, now in pairwise(totals)]


def mean(vectors: list[Tensor]) -> Tensor:
    """In rank order, one rounding per operation."""
    total = vectors[0]
    for each in vectors[1:]:
        total = total + each
    return total / len(vectors)


def close(one: Tensor, other: Tensor, to: float = 1e-12) -> bool:
    return bool((one - other).abs().max() <= to * other.abs().max())
