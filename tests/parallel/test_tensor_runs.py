"""Workers that divide the layers of a model train it like one worker, by any strategy, in both worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.parallel.tensor_models import MODELS, WIDTH, encoder, mlp
from tests.support.programs import trained
from tests.support.runs import run_in

ROWS, BATCH = 60, 8  # eight steps, the last of fewer rows


class Training:
    """Trains a model for an epoch, and keeps the losses that each worker has seen."""

    def __init__(self, model: str, clip: float = 0.0, adam: bool = False) -> None:
        self.model, self.clip, self.adam = model, clip, adam
        self.losses: list[list[float]] = []

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        make, inputs = MODELS[self.model]
        model = make().double()
        x = inputs(ROWS)
        y = torch.randn_like(model(x).detach())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        if self.adam:
            # Biases of keys have no gradient but rounding, which a smaller eps would make a step of.
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
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
        with torch.no_grad():
            losses.append(float(F.mse_loss(model.eval()(x), y)))
        self.losses.append(losses)


def final(
    program: Any, strategy: str, workers: int, runs: Path, world: str = "simulated"
) -> dict[str, Tensor]:
    return trained(run_in(world, program, strategy=strategy, workers=workers, runs=runs))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("mlp", "tensor:2", 2),
    ("mlp", "tensor:2@pipeline:2,micro_batches=3,recompute=yes", 4),
    slow("encoder", "tensor:4", 4),
    slow("gpt", "pipeline:2@tensor:2", 4),
    slow("mlp", "tensor:4", 4),
    slow("mlp", "pipeline:2@tensor:2", 4),
    slow("encoder", "tensor:2", 2),
    slow("gpt", "tensor:2", 2),
    slow("gpt, written out", "tensor:2", 2),
]


@pytest.mark.parametrize(("model", "strategy", "workers"), CASES)
def test_divided_layers_train_like_the_whole_model(
    model: str, strategy: str, workers: int, tmp_path: Path
) -> None:
    alone, divided = Training(model, adam=True), Training(model, adam=True)
    whole = final(alone, "allreduce", 1, tmp_path)
    assert distance(final(divided, strategy, workers, tmp_path), whole) < 1e-12
    assert len(divided.losses) == workers
    for each in divided.losses:
        assert each == divided.losses[0]  # bit for bit
        assert max(abs(a - b) for a, b in zip(each, alone.losses[0], strict=True)) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "split", "workers"),
    [
        ("local:8", "tensor:2", 4),
        slow("allreduce", "pipeline:2@tensor:2", 8),
        slow("allreduce+fp16", "tensor:2", 4),
    ],
)
def test_strategies_in_lockstep_train_divided_layers_like_whole_models(
    strategy: str, split: str, workers: int, tmp_path: Path
) -> None:
    program = Training("mlp", clip=0.05)
    whole = final(program, strategy, 2, tmp_path)
    assert distance(final(program, f"{strategy}@{split}", workers, tmp_path), whole) < (
        1e-3 if "fp16" in strategy else 1e-12
    )


class Uneven(nn.Module):
    """Its second half has no layers that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        for layer in self.layers:
            x = layer(x).softmax(-1)
        return x


def test_workers_of_a_stage_without_divided_layers_share_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "uneven", (Uneven, MODELS["mlp"][1]))
    program = Training("uneven", clip=0.05)
    whole = final(program, "allreduce", 1, tmp_path)
    split = "pipeline:2,split_at=layers.0@tensor:2"
    assert distance(final(program, split, 4, tmp_path), whole) < 1e-12


def test_clipping_counts_whole_parameters_once(tmp_path: Path) -> None:
    program = Training("gpt", clip=0.05)
    whole = final(program, "allreduce", 1, tmp_path)
    assert distance(final(program, "tensor:2", 2, tmp_path), whole) < 1e-12
    assert distance(final(Training("gpt"), "allreduce", 1, tmp_path), whole) > 1e-3


@pytest.mark.parametrize("strategy", ["ssp:1", slow("async"), slow("async+topk:0.5"), slow("adpsgd")])
def test_strategies_with_servers_and_without_lockstep_train_divided_layers(
    strategy: str, tmp_path: Path
) -> None:
    summary = run_in("simulated", Training("mlp"), strategy=f"{strategy}@tensor:2", workers=4, runs=tmp_path)
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


def test_a_server_holds_the_parts_of_each_worker(tmp_path: Path) -> None:
    whole = final(Training("mlp"), "sync", 2, tmp_path)
    assert distance(final(Training("mlp"), "sync@tensor:2", 4, tmp_path), whole) < 1e-12


@pytest.mark.parametrize("strategy", ["tensor:2", slow("pipeline:2@tensor:2")])
def test_processes_compute_the_bits_of_the_simulator(strategy: str, tmp_path: Path) -> None:
    workers = 2 if strategy == "tensor:2" else 4
    program = Training("gpt", adam=True)
    simulated = final(program, strategy, workers, tmp_path)
    assert distance(final(program, strategy, workers, tmp_path, "real"), simulated) == 0


class Dropping:
    """Draws the masks of dropout in a divided region and in a whole one."""

    def __init__(self, seen: list[Tensor]) -> None:
        self.seen = seen

    def __call__(self) -> None:
        session = pr.init()
        model = nn.Sequential(
            nn.Linear(4, 64, bias=False), nn.Dropout(), nn.Linear(64, 64, bias=False), nn.Dropout()
        )
        with torch.no_grad():
            model[0].weight.fill_(0.25)
            model[2].weight.copy_(torch.eye(64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer, example=(torch.ones(8, 4),))
        self.seen.append(model(torch.ones(8, 4)).detach())
        self.seen.append(torch.rand(4))


def test_dropout_differs_in_divided_regions_and_agrees_in_whole_ones(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    run_in("simulated", Dropping(seen), strategy="tensor:2", workers=2, runs=tmp_path)
    first, script, second, script_too = seen if len(seen[1]) == 4 else [seen[0], seen[2], seen[1], seen[3]]
    assert torch.equal(first, second) and torch.equal(script, script_too)
    # Both halves have passed another mask of their own, and one mask for the whole output.
    assert set(first.unique().tolist()) == {0.0, 4.0}
    assert not torch.equal(first[:, :32], first[:, 32:])


def test_the_result_loads_into_the_plain_model(tmp_path: Path) -> None:
    summary = run_in("simulated", Training("encoder"), strategy="tensor:2", workers=2, runs=tmp_path)
    model = encoder().double()
    model.load_state_dict(load_file(Path(summary["folder"]) / "consensus.safetensors"))


class Wrong:
    """Prepares a model with an optimizer, which is refused."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.make = make

    def __call__(self) -> None:
        session = pr.init()
        model = mlp()
        session.prepare(model, self.make(model), example=(torch.ones(8, 4, WIDTH),))


def test_optimizers_of_whole_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pr.PolyrhythmError, match="Adafactor may need whole tensors, and tensor:2 divides 0"):
        run_in(
            "simulated", Wrong(lambda model: torch.optim.Adafactor(model.parameters())), strategy="tensor:2",
            workers=2, runs=tmp_path,
        )  # fmt: skip


def test_a_plan_in_python_is_used(tmp_path: Path) -> None:
    plan = {"h.0.fc": "column", "h.0.proj": "row"}
    strategy = pr.parse("allreduce") @ pr.TensorParallel(2, plan=plan)
    whole = final(Training("gpt"), "allreduce", 1, tmp_path)
    assert distance(final(Training("gpt"), str(strategy), 2, tmp_path), whole) < 1e-12
