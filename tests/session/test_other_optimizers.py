"""Optimizers and schedulers that were not passed to `prepare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.runs import WORLDS, run_in

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, as Lookahead and SAM do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(list(parameters), lr=lr)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def train(
    world: str, strategy: str, make: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> None:  # fmt: skip
    """Trains with a function that is called after each step; `make` makes it after `prepare`."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(3, 3)
        model, mine, loader = session.prepare(
            model, optimizer(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(32, 3)), 4)
        )
        after = make(model, mine)
        for (x,) in loader:
            model(x).mean().backward()
            mine.step()
            after()

    run_in(world, main, strategy=strategy, workers=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_another_optimizer_of_the_same_parameters_is_refused(world: str, strategy: str) -> None:
    with pytest.raises(UsageError, match=r"Adam steps parameters of a prepared optimizer.*line \d+\)$"):
        train(world, strategy, lambda model, _: torch.optim.Adam(model.parameters()).step)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_an_optimizer_that_trains_something_else_is_noted_once(
    world: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(*_: object) -> Callable[[], object]:
        return torch.optim.Adam(nn.Linear(3, 1).parameters()).step

    train(world, strategy, make)
    assert capfd.readouterr().err.count("Adam was not passed to session.prepare(): what it trains") == 1


@pytest.mark.parametrize("strategy", ["allreduce", "local:2", "gossip"])
def test_an_optimizer_inside_a_prepared_one_is_a_part_of_it(
    strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train("simulated", strategy, lambda *_: lambda: None, Wrapping)
    assert "was not passed" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "cls", [lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.StepLR], ids=lambda cls: cls.__name__
)
def test_a_scheduler_per_batch_is_noted_though_it_has_a_step_of_its_own(
    cls: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    train("simulated", "allreduce", lambda _, optimizer: cls(optimizer, 10).step)
    assert capfd.readouterr().err.count(f"{cls.__name__} is stepped once per batch") == 1


def test_a_plateau_by_the_value_of_one_worker_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    def make(_: object, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
        return lambda: scheduler.step(1.0)

    train("simulated", "async", make)
    assert capfd.readouterr().err.count("each worker steps its own ReduceLROnPlateau") == 1
