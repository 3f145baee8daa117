"""A learning rate that the script sets itself is noted where workers take different numbers of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.programs import Examples, mlp
from tests.support.runs import WORLDS, run_in

Rate = Callable[[int, int], float]  # of the epoch, and of the batches so far


class UserScheduler(LambdaLR):
    """A scheduler with a step of its own."""

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**self.last_epoch


def noted(
    capfd: pytest.CaptureFixture[str],
    rate: Rate,
    strategy: str = "async",
    world: str = "simulated",
    scheduler: Any = None,
    tensor: bool = False,
) -> int:
    def main() -> None:
        session, model = pr.init(), mlp()
        optimizer: Any = torch.optim.SGD(
            model.parameters(), lr=torch.tensor(0.1) if tensor else 0.1, foreach=False
        )
        made = [] if scheduler is None else [scheduler(optimizer, lambda step: 0.9**step)]
        loader = DataLoader(Examples(32), batch_size=4)
        model, optimizer, loader, *made = session.prepare(model, optimizer, loader, *made)
        step = 0
        for epoch in range(3):
            for x, y in loader:
                for group in optimizer.param_groups if not made else ():
                    if tensor:
                        group["lr"].fill_(rate(epoch, step))
                    else:
                        group["lr"] = rate(epoch, step)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                step += 1
                for each in made:
                    each.step()

    run_in(world, main, strategy=strategy, workers=2)
    return capfd.readouterr().err.count("the script sets the learning rate itself between batches")


def by_step(epoch: int, step: int) -> float:
    return 0.1 * 0.9**step


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_set_by_hand_in_each_step_is_noted_once(
    world: str, tensor: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert noted(capfd, by_step, world=world, tensor=tensor) == 1


def test_a_rate_set_by_hand_in_each_step_is_fine_in_lockstep(capfd: pytest.CaptureFixture[str]) -> None:
    """All workers count the same steps."""
    assert noted(capfd, by_step, "allreduce") == 0


@pytest.mark.parametrize("rate", [lambda epoch, step: 0.1, lambda epoch, step: 0.1 * 0.5**epoch])
def test_a_rate_set_by_hand_in_each_epoch_is_not_noted(rate: Rate, capfd: pytest.CaptureFixture[str]) -> None:
    assert noted(capfd, rate) == 0


@pytest.mark.parametrize("scheduler", [LambdaLR, UserScheduler])
def test_the_rate_of_a_prepared_scheduler_is_not_noted(
    scheduler: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert noted(capfd, by_step, scheduler=scheduler) == 0
