"""Hooks that a script registers on its optimizer run on its worker, once in each step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value
from tests.support.programs import same, trained
from tests.support.rows import DEFAULTS, Row
from tests.support.runs import WORLDS, run_in

STEPS = 5


def values(model: nn.Module) -> list[float]:
    return [float(each) for parameter in model.parameters() for each in parameter.detach().reshape(-1)]


class Hooked:
    """Registers hooks before and after `prepare`, and writes what they saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        torch.manual_seed(0)
        session = pr.init()
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        seen: list[Any] = []
        mine = f"{type(session).__name__}-{getattr(session, 'rank', 0)}"

        def note(kind: str) -> Callable[..., None]:
            def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
                assert args[0] is optimizer and torch.is_grad_enabled()
                seen.append((kind, values(model)))

            return hook

        optimizer.register_step_pre_hook(note("early pre"))
        optimizer.register_step_post_hook(note("early post"))
        model, optimizer = session.prepare(model, optimizer)
        optimizer.register_step_pre_hook(note("late pre"))
        removed = optimizer.register_step_pre_hook(note("removed"))
        removed.remove()
        optimizer.register_step_post_hook(note("late post"))
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 3), step + session.rank + 1.0)).sum().backward()
            before = values(model)
            optimizer.step()
            assert [each for each, _ in seen] == ["early pre", "late pre", "early post", "late post"]
            assert [each for _, each in seen] == [before, before, values(model), values(model)]
            seen.clear()
        (self.folder / mine).write_text(json.dumps(values(model)))


@pytest.mark.parametrize("row", [*DEFAULTS, Row("allreduce / diloco:2"), Row("async:prefetch=yes")], ids=str)
def test_hooks_run_once_around_every_step_of_a_worker(row: Row, tmp_path: Path) -> None:
    """Pre-hooks see the parameters before the step, post-hooks those after it; servers run none."""
    workers = 4 if row.cluster else 2
    run_in(
        "simulated", Hooked(tmp_path), strategy=row.strategy, servers=row.servers, workers=workers,
        cluster=row.cluster,
    )  # fmt: skip
    assert len(list(tmp_path.iterdir())) == workers


@pytest.mark.parametrize("strategy", ["async", "allreduce", "broadcast"])
def test_hooks_run_on_real_workers(strategy: str, tmp_path: Path) -> None:
    run_in("real", Hooked(tmp_path), strategy=strategy, workers=2)
    assert len(list(tmp_path.iterdir())) == 2


class Halved:
    """Halves each gradient in a hook, in place or by another tensor, or the learning rate."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self) -> None:
        torch.manual_seed(0)
        session = pr.init()
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0625 if self.how == "rate" else 0.125)

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                if self.how == "in place":
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 0.5

        if self.how != "rate":
            optimizer.register_step_pre_hook(halve)
        model, optimizer = session.prepare(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 3), step + session.rank + 1.0)).square().mean().backward()
            optimizer.step()


@each_value(("strategy", ["sync", "allreduce", "local:2", "gossip"]), ("world", WORLDS))
def test_a_hook_that_changes_the_gradient_changes_it_once(world: str, strategy: str, tmp_path: Path) -> None:
    """Half the gradient is half the learning rate, to the last bit."""
    rate, *hooks = [
        trained(run_in(world, Halved(how), strategy=strategy, workers=2, runs=tmp_path))
        for how in ("rate", "in place", "replaced")
    ]
    assert all(same(rate, each) for each in hooks)


@each_value(
    ("world, strategy", [("real", "async"), ("simulated", "async"), ("simulated", "allreduce")]),
    ("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]),
    ("late", [False, True]),
)
def test_hooks_of_all_optimizers_of_a_process_are_refused(
    world: str, strategy: str, register: Callable[..., Any], late: bool
) -> None:
    """Where a process takes steps of other nodes; also if they are registered after `prepare`."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(1, 1)
        handle = None if late else register(lambda *_: None)
        try:
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            handle = handle or register(lambda *_: None)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        finally:
            if handle is not None:
                handle.remove()

    with pytest.raises(
        UsageError, match=r"register the hook on your optimizer, as in optimizer\.register_step"
    ):
        run_in(world, main, strategy=strategy, workers=2)


def test_a_hook_may_not_replace_the_arguments_of_a_step() -> None:
    def main() -> None:
        session = pr.init()
        model = nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"must return None; pass the arguments to optimizer\.step\(\)"):
        run_in("simulated", main, strategy="allreduce", workers=2)
