"""Frozen parameters that the script computes itself, such as those of a momentum encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.programs import Examples
from tests.support.runs import WORLDS, run_in

Update = Callable[[nn.Parameter, nn.Parameter], None]


class Encoders(nn.Module):
    """An encoder that is trained, and one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        width = Examples(1).tensors[0].shape[1]
        self.query, self.key = nn.Linear(width, 2), nn.Linear(width, 2).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return (self.query(x.float()) - self.key(x.float())).square().mean()


def in_place(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def replaced(key: nn.Parameter, query: nn.Parameter) -> None:
    key.data = 0.9 * key.data + 0.1 * query.data


def untouched(key: nn.Parameter, query: nn.Parameter) -> None:
    pass


def train(update: Update, left_out: bool, agree: bool = True) -> None:
    session, model = pr.init(), Encoders()
    trained = model.query if left_out else model
    optimizer: Any = torch.optim.SGD(trained.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(Examples(48), batch_size=4))
    for x, _ in loader:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
            update(key, query)
    if agree:
        session.consensus()


def said(capfd: pytest.CaptureFixture[str], world: str, strategy: str, update: Update, **how: Any) -> int:
    run_in(world, lambda: train(update, left_out=True, **how), strategy=strategy, workers=2)
    return capfd.readouterr().err.count("no optimizer trains key.weight, and the script changes it: ")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("update", "agree"), [(in_place, True), (replaced, False)])
def test_parameters_that_differ_between_workers_are_noted_once(
    world: str, update: Update, agree: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(capfd, world, "async", update, agree=agree) == 1


@pytest.mark.parametrize(
    ("strategy", "update"),
    [("async", untouched), ("local:4", untouched), ("allreduce", in_place), ("sync", in_place)],
)
def test_parameters_that_are_equal_on_all_workers_are_not_noted(
    strategy: str, update: Update, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(capfd, "simulated", strategy, update) == 0


@pytest.mark.parametrize("update", [in_place, replaced])
def test_where_a_step_would_overwrite_them_they_belong_out_of_the_optimizer(update: Update) -> None:
    """Local strategies average them with the others, and servers cannot."""
    run_in("simulated", lambda: train(update, left_out=False), strategy="local:4", workers=2)
    with pytest.raises(
        pr.UsageError, match=r"key.weight.*leave parameters that the script computes itself out"
    ):
        run_in("simulated", lambda: train(update, left_out=False), strategy="async", workers=2)
