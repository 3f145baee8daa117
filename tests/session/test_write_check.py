"""Parameters that a script changes outside `optimizer.step()`: kept, or refused where they would be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.session.context import session
from tests.support.programs import trained
from tests.support.runs import run_in

LIMIT = 1 / 16  # exact in every dtype


def name(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def clip(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-LIMIT, LIMIT)


def late(model: nn.Module, step: int) -> None:
    if step >= 20:
        clip(model, step)


def once(model: nn.Module, step: int) -> None:
    """In a step after which only some elements are compared."""
    if step == 50:
        clip(model, step)


def init(model: nn.Module, step: int) -> None:
    if step == 0:
        nn.init.constant_(model[0].weight, 0.5)  # type: ignore[index, arg-type]


def one(model: nn.Module, step: int) -> None:
    """One element that is not among those that are compared in each step."""
    if step == 100:
        model[0].weight.data[0, 1].add_(1)  # type: ignore[index, union-attr]


def first(model: nn.Module, step: int) -> None:
    if step == 0:
        clip(model, step)


def swap(model: nn.Module, step: int) -> None:
    """As an evaluation with averaged weights does."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    clip(model, step)
    for parameter, values in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(values)


def load(model: nn.Module, step: int) -> None:
    """As `swap`, by `load_state_dict()`."""
    if step == 0:
        return
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict({key: value + 1 for key, value in kept.items()})
    model.load_state_dict(kept)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-LIMIT, LIMIT)
        return loss


class Writing:
    """Trains, and calls `write(model, step)` after each step."""

    def __init__(
        self, write: Callable[[nn.Module, int], None] | None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.write, self.dtype = write, dtype

    def __call__(self) -> None:
        here = pr.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 4), nn.Linear(4, 1)).to(self.dtype)
        make = torch.optim.SGD if self.write else ClippedSGD
        rows = torch.ones(480, 30, dtype=self.dtype)
        loader = DataLoader(TensorDataset(rows), batch_size=2)
        model, optimizer, loader = here.prepare(model, make(model.parameters(), lr=0.01), loader)
        write = self.write or (lambda model, step: None)
        write(model, 0)
        for step, (x,) in enumerate(loader, 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            write(model, step)


@pytest.mark.parametrize(
    ("world", "strategy", "write", "dtype"),
    [
        ("simulated", "async", clip, torch.float32),
        ("simulated", "async", late, torch.float64),
        ("simulated", "async", first, torch.bfloat16),
        ("simulated", "sync", clip, torch.float32),
        ("simulated", "ssp:1,prefetch=yes", late, torch.float32),
        ("simulated", "dc-asgd", clip, torch.float32),
        ("simulated", "async+topk:0.3", clip, torch.float32),
        ("real", "async", late, torch.float32),
        ("simulated", "async", once, torch.float32),
        ("simulated", "async", one, torch.float32),
        ("simulated", "broadcast", clip, torch.float32),
        ("simulated", "broadcast", once, torch.bfloat16),
        ("simulated", "broadcast", init, torch.float64),
        ("simulated", "broadcast", one, torch.float32),
        ("real", "broadcast", late, torch.float32),
    ],
    ids=name,
)
def test_a_change_that_the_next_step_would_overwrite_is_refused(
    world: str, strategy: str, write: Callable[..., None], dtype: torch.dtype
) -> None:
    message = r"changed 0\.weight outside .* such as allreduce; .* back from a copy( \(\w+\.py, line \d+\))?$"
    with pytest.raises(pr.PolyrhythmError, match=message):
        run_in(world, Writing(write, dtype), strategy=strategy, workers=2)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        ("simulated", "async"), ("real", "async"), ("simulated", "sync"), ("simulated", "broadcast"),
        ("simulated", "delayed-nesterov:2"), ("simulated", "easgd:2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["middle", "frozen"])
def test_parameters_that_are_loaded_and_stay_are_refused(world: str, strategy: str, place: str) -> None:
    """Wherever in a parameter they differ, under all strategies that would overwrite them."""

    def main() -> None:
        here = pr.init()
        model: Any = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1))
        model[1].requires_grad_(False)
        model, optimizer = here.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.01))
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 30)).square().mean().backward()
            optimizer.step()
            if step == 5:
                state = {key: value.clone() for key, value in model.state_dict().items()}
                state["0.weight" if place == "middle" else "1.weight"].view(-1)[17] += 1
                model.load_state_dict(state)

    name = {"middle": r"0\.weight", "frozen": r"1\.weight"}[place]
    with pytest.raises(pr.PolyrhythmError, match=rf"loaded other values into {name}.* load the trained ones"):
        run_in(world, main, strategy=strategy, workers=2)


@pytest.mark.parametrize(
    "strategy",
    ["async", "sync", "ssp:1,prefetch=yes", "easgd", "local:2", "hogwild", "broadcast", "delayed-nesterov:2"],
)
@pytest.mark.parametrize("write", [swap, load])
def test_values_that_are_put_back_are_fine(strategy: str, write: Callable[..., None]) -> None:
    run_in("simulated", Writing(write), strategy=strategy, workers=2)


@pytest.mark.parametrize("strategy", ["async", "broadcast", "allreduce", "adpsgd"])
@pytest.mark.parametrize("loads", [False, True])
def test_changes_after_the_last_step_are_shown_or_told(
    strategy: str, loads: bool, tmp_path: Path, capsys: Any
) -> None:
    """As with averaged weights that are copied back at the end. `consensus()` has them, or is refused."""
    lost = pr.parse(strategy).traits.rebuilds_parameters or pr.parse(strategy).traits.uses_servers

    def main() -> None:
        here = pr.init()
        model = nn.Linear(3, 1)
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        here.consensus()
        if loads:
            model.load_state_dict({**model.state_dict(), "weight": torch.full((1, 3), 0.5)})
        else:
            nn.init.constant_(model.weight, 0.5)
        if lost:
            with pytest.raises(
                pr.PolyrhythmError,
                match=r"changed weight outside optimizer\.step\(\)|loaded other values into weight",
            ):
                here.consensus()
        else:
            assert bool((here.consensus().weight == 0.5).all())

    result = trained(run_in("simulated", main, strategy=strategy, workers=2, runs=tmp_path))
    assert bool((result["weight"] == 0.5).all()) != lost
    note = "the script changed weight after the last step: the result of the run has the values from before"
    assert capsys.readouterr().err.count(note) == lost


@pytest.mark.parametrize("strategy", ["async", "broadcast"])
def test_saving_between_steps_changes_nothing_in_the_check(strategy: str) -> None:
    def save(model: nn.Module, step: int) -> None:
        if step in (1, 2, 30):
            here = session.get()
            assert here is not None
            here.state_dict()

    run_in("simulated", Writing(save), strategy=strategy, workers=2)


@pytest.mark.parametrize(
    ("world", "strategy", "write"),
    [
        ("simulated", "async", None), ("simulated", "sync", None), ("simulated", "allreduce", clip),
        ("simulated", "local:2", clip), ("real", "async", None),
    ],
    ids=name,
)  # fmt: skip
def test_what_the_message_advises_is_right(
    world: str, strategy: str, write: Callable[..., None] | None, tmp_path: Path
) -> None:
    """An optimizer that clips, which servers call, or a strategy without servers."""
    result = trained(run_in(world, Writing(write), strategy=strategy, workers=2, runs=tmp_path))
    assert max(float(each.abs().max()) for each in result.values()) <= LIMIT
