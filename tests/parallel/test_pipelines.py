"""A pipeline computes what the whole model computes, under every strategy and in both worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.programs import trained
from tests.support.runs import run_in

ROWS, BATCH = 44, 8  # the last batch is smaller


class Skipping(nn.Module):
    """Layers with a connection over two cuts, and weights that the first and the last layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(6, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = self.first(x)
        h = begin
        for layer in self.inner:
            h = torch.tanh(layer(h))
        return (h + begin) @ self.last.weight


def chain() -> nn.Module:
    return nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(6, 6), nn.Tanh())))


class Training:
    """Trains a model for an epoch, and keeps the losses that each worker has seen."""

    def __init__(self, make: Callable[[], nn.Module], clip: float = 0.0, momentum: float = 0.0) -> None:
        self.make, self.clip, self.momentum = make, clip, momentum

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        model = self.make().double()
        data = TensorDataset(torch.randn(ROWS, 6).double(), torch.randn(ROWS, 6).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
        loader = DataLoader(data, BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            losses.append(loss.item())
        session.log(first=losses[0] if losses else 0.0, last=losses[-1] if losses else 0.0)


def final(
    world: str, program: Any, strategy: str, workers: int, runs: Path, **options: Any
) -> dict[str, torch.Tensor]:
    return trained(run_in(world, program, strategy=strategy, workers=workers, runs=runs, **options))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("make", [chain, Skipping])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_trains_like_the_whole_model(
    make: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    program = Training(make, momentum=0.9)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    for micro_batches in (1, 3, 8):
        strategy = f"pipeline:{stages},micro_batches={micro_batches}"
        assert distance(final("simulated", program, strategy, stages, tmp_path), whole) < 1e-12


@pytest.mark.parametrize("strategy", ["allreduce", "local:2", "gossip", "diloco:2"])
def test_a_strategy_in_lockstep_trains_pipelines_like_whole_models(strategy: str, tmp_path: Path) -> None:
    program = Training(chain)
    whole = final("simulated", program, strategy, 2, tmp_path)
    assert distance(final("simulated", program, f"{strategy}@pipeline:2", 4, tmp_path), whole) < 1e-12


def test_clipping_uses_the_norm_of_the_whole_model(tmp_path: Path) -> None:
    program = Training(Skipping, clip=0.05)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    assert distance(final("simulated", program, "pipeline:2", 2, tmp_path), whole) < 1e-12
    assert distance(final("simulated", Training(Skipping), "allreduce", 1, tmp_path), whole) > 1e-3


@pytest.mark.parametrize(
    "strategy", ["async", "ssp:1", "sync", "async+topk:0.5", "easgd:2", "adpsgd", "hogwild"]
)
def test_strategies_with_servers_and_without_lockstep_train_pipelines(strategy: str, tmp_path: Path) -> None:
    summary = run_in(
        "simulated", Training(chain), strategy=f"{strategy}@pipeline:2", workers=4, runs=tmp_path
    )
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


class Dropping:
    """Trains a model with dropout in two stages, and draws numbers in the script."""

    def __call__(self) -> None:
        torch.manual_seed(1)
        session = pr.init()
        layers = [nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)]
        for layer in layers[::2]:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.ones(8, 64), torch.ones(8, 64)), 8)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x, y in loader:
            noise = torch.rand(3)
            output = model(x)
            F.mse_loss(output + noise.sum(), y).backward()
            optimizer.step()
            kept = (output > 0).float().mean().item()  # by both layers
            assert 0.15 < kept < 0.35, kept  # one half, if both drew the same
            with torch.no_grad():
                assert torch.equal(model.eval()(x), x)  # evaluation drops nothing
                assert not torch.equal(model.train()(x), model(x))
        session.log(number=torch.rand(1).item())


def test_stages_draw_their_own_numbers_and_the_script_draws_the_same(tmp_path: Path) -> None:
    run_in("simulated", Dropping(), strategy="pipeline:2,split_at=2", workers=2, runs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["allreduce@pipeline:2", "local:2@pipeline:2", "allreduce+bf16@pipeline:2"]
)
def test_real_processes_compute_the_bits_of_the_simulation(strategy: str, tmp_path: Path) -> None:
    program = Training(Skipping, clip=0.5)
    simulated = final("simulated", program, strategy, 4, tmp_path)
    assert distance(final("real", program, strategy, 4, tmp_path), simulated) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "gossip", "adpsgd", "hogwild", "async+topk:0.5"])
def test_real_processes_train_pipelines(strategy: str, tmp_path: Path) -> None:
    summary = run_in("real", Training(chain), strategy=f"{strategy}@pipeline:2", workers=4, runs=tmp_path)
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())
