"""What a run says before training begins: momentum that stale gradients would spoil, hooks of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.core.registry import describe
from tests.support.programs import Examples, mlp
from tests.support.runs import WORLDS, run_in

# As measured by `python -m benchmarks staleness`: one buffer for all fails, also with delay compensation.
SPOILED = {"async", "ssp", "softsync", "dc-asgd"}


def said(capfd: pytest.CaptureFixture[str], strategy: str, world: str = "simulated", **how: Any) -> int:
    workers, momentum = how.get("workers", 2), how.get("momentum", 0.9)

    def main() -> None:
        session, model = pr.init(), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        session.prepare(model, optimizer, torch.utils.data.DataLoader(Examples(8), batch_size=4))

    run_in(world, main, strategy=strategy, workers=workers)
    return capfd.readouterr().err.count(f"under {strategy} one momentum buffer on the server takes in")


def test_the_strategies_with_one_momentum_for_stale_gradients_are_known() -> None:
    named = {each.name for each in describe() if pr.parse(each.name).traits.stale_momentum}
    assert named == SPOILED


@pytest.mark.parametrize("world", WORLDS)
def test_momentum_under_stale_gradients_is_noted_once(world: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, "async", world) == 1


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("async", {"momentum": 0}),
        ("async", {"workers": 1}),
        ("async:weight=1/tau", {}),
        ("dana-slim", {}),
        ("sync", {}),
        ("ssp:0", {}),
        ("easgd", {}),
    ],
)
def test_momentum_that_is_safe_is_not_noted(
    strategy: str, how: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(capfd, strategy, **how) == 0


@pytest.mark.parametrize(("strategy", "count"), [("allreduce", 1), ("sync", 1), ("async", 0), ("local:4", 0)])
def test_a_hook_that_sees_the_gradient_of_one_worker_is_noted_where_it_is_averaged(
    strategy: str, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        session, model = pr.init(), mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run_in("simulated", main, strategy=strategy, workers=2)
    assert capfd.readouterr().err.count("0.weight has a hook (register_hook), which sees") == count
