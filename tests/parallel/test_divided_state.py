"""What a script saves of divided models is what it saves of whole ones, and a run resumes from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.combine import few
from tests.support.runs import run_in

STEPS, STOP = 11, 7


class Branching(nn.Module):
    """Layers to divide in any way, two of them with one weight, and buffers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.drop, self.again = nn.Linear(6, 6), nn.Dropout(dropout), nn.Linear(6, 6)
        self.again.weight = self.last.weight
        self.norm = nn.BatchNorm1d(6) if not dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.second(torch.tanh(self.first(x))))
        h = self.norm(torch.tanh(self.left(h)) + torch.tanh(self.right(h)))
        return self.again(torch.tanh(self.last(h)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, neither of which is on one worker only."""
    weights = [each for name, each in model.named_parameters() if name.endswith("weight")]
    biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
    return torch.optim.Adam([{"params": biases, "lr": 0.02}, {"params": weights}], lr=0.01)


@dataclass
class Saving:
    """Trains by steps, and saves after one of them; with `begin` it continues from there."""

    folder: Path
    begin: int = 0
    scheduled: bool = False
    forgets: bool = False  # that workers of one model have one rank

    def __call__(self) -> None:
        torch.manual_seed(4)
        here = pr.init()
        model = Branching().double()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        data = TensorDataset(torch.randn(40, 6).double(), torch.randn(40, 6).double())
        loader = DataLoader(data, 4, shuffle=True)
        path = self.folder / f"{here.rank if self.forgets and self.begin else here.worker}.pt"
        saved = torch.load(path, weights_only=True) if self.begin else None
        if saved:
            for thing, state in zip((model, optimizer, scheduler), saved["states"], strict=True):
                thing.load_state_dict(state)
        model, optimizer, loader = here.prepare(model, optimizer, loader, loss=F.mse_loss)
        if saved:
            here.load_state_dict(saved["session"])
        step = self.begin
        while step < STEPS:
            for x, y in loader:
                optimizer.zero_grad()
                noise = x + 0.01 * torch.randn_like(x)
                if self.scheduled:
                    here.backward(noise, y)
                else:
                    F.mse_loss(model(noise), y).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step == STOP and not self.begin:
                    states = [each.state_dict() for each in (model, optimizer, scheduler)]
                    torch.save({"states": states, "session": here.state_dict()}, path)
                if step == STEPS:
                    break
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))  # to save again


COLUMN = "column=first,row=second"


def resumes(world: str, strategy: str, workers: int, folder: Path, scheduled: bool = False) -> bool:
    def digest(begin: int) -> str:
        script = Saving(folder, begin, scheduled)
        return str(run_in(world, script, strategy=strategy, workers=workers)["digest"])

    return digest(0) == digest(STOP)


@few(
    "strategy, workers",
    [
        ("pipeline:2", 2),
        ("allreduce+topk:0.3@pipeline:2", 4),
        (f"allreduce@tensor:2,{COLUMN}", 4),
        ("allreduce@branches:2,modules=left/right", 4),
        (f"diloco:3@pipeline:2@tensor:2,{COLUMN}", 8),
        (f"ssp:1+topk:0.4@tensor:2,{COLUMN}", 4),
        ("async@branches:2,modules=left/right", 4),
    ],
    quick=1,
)
def test_a_divided_model_resumes_to_the_same_bits(strategy: str, workers: int, tmp_path: Path) -> None:
    """The random numbers of dropout go on, too."""
    assert resumes("simulated", strategy, workers, tmp_path)


@few("schedule", ["pipedream", "1f1b", "2bw"], quick=1)
def test_schedules_resume_to_the_same_bits(schedule: str, tmp_path: Path) -> None:
    """The batches in the pipeline are trained on before the first state is saved."""
    strategy = f"pipeline:3,schedule={schedule},micro_batches=1"
    assert resumes("simulated", strategy, 3, tmp_path, scheduled=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce@pipeline:2", f"local:3@tensor:2,{COLUMN}"])
def test_a_divided_model_resumes_to_the_same_bits_on_real_processes(strategy: str, tmp_path: Path) -> None:
    assert resumes("real", strategy, 4, tmp_path)


def test_a_worker_that_loads_the_session_of_another_one_is_refused(tmp_path: Path) -> None:
    run_in("simulated", Saving(tmp_path), strategy="pipeline:2", workers=2)
    with pytest.raises(pr.UsageError, match=r"worker 0 of a model, .* use session\.worker in the names"):
        run_in("simulated", Saving(tmp_path, STOP, forgets=True), strategy="pipeline:2", workers=2)


@dataclass
class States:
    """The states of model and optimizer after a few steps, and again after they were changed and loaded."""

    make: Callable[[], nn.Module]
    seen: list[Any] = field(default_factory=list)

    def __call__(self) -> None:
        torch.manual_seed(4)
        here = pr.init()
        model = self.make().double()
        optimizer = adam(model)
        x, y = torch.randn(6, 6).double(), torch.randn(6, 6).double()
        model, optimizer = here.prepare(model, optimizer, example=x)

        def steps() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

        steps()
        found = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        part = model.second.state_dict(prefix="there.")
        assert all(torch.equal(part[f"there.{key}"], found[0][f"second.{key}"]) for key in ("weight", "bias"))
        steps()
        after = here.consensus().state_dict()
        assert same(model.state_dict(), after, 0.0) and not same(found[0], after, 1e-3)
        model.load_state_dict(found[0])
        optimizer.load_state_dict(copy.deepcopy(found[1]))
        assert same([model.state_dict(), optimizer.state_dict()], found, 0.0)
        steps()
        assert same(model.state_dict(), after, 0.0)
        self.seen.append(found)


def same(one: Any, other: Any, within: float) -> bool:
    """True if two nested states have the same structure, and numbers that differ by so much at most."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key], within) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(lambda a, b: same(a, b, within), one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and within_of(one, other, within)
    return bool(one == other)


def within_of(one: torch.Tensor, other: torch.Tensor, within: float) -> bool:
    return not one.numel() or float((one - other).abs().max()) <= within


def normed() -> nn.Module:
    return Branching(dropout=0.0)


@few(
    "strategy, workers",
    [
        ("pipeline:2,micro_batches=1", 2),
        (f"tensor:2,{COLUMN}", 2),
        ("branches:2,modules=left/right", 2),
        (f"pipeline:2,micro_batches=1@tensor:2,{COLUMN}", 4),
    ],
    quick=2,
)
def test_every_worker_has_the_states_of_one_process(strategy: str, workers: int) -> None:
    """Names, numbers, shapes and values; and what is loaded after `prepare` is trained further."""
    whole, divided = States(normed), States(normed)
    run_in("simulated", whole, strategy="allreduce", workers=1)
    run_in("simulated", divided, strategy=strategy, workers=workers)
    assert len(divided.seen) == workers
    for found in divided.seen:
        assert same(found, whole.seen[0], 1e-12)
