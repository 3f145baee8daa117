"""The script's own seeds count, before and after `init()`; those of the run are for scripts without."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.record.reader import read_metrics
from tests.support.runs import WORLDS, run_in

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SEEDS: dict[str, Callable[[int], Any]] = {
    "torch": torch.manual_seed,
    "numpy": np.random.seed,
    "random": random.seed,
    "generator": lambda seed: None,
}


@dataclass
class Seeding:
    """Seeds one generator, by rank if asked to, and logs what each worker then draws."""

    what: str = ""
    seed: int = 0
    before: bool = True  # `init()`
    by_rank: bool = False
    buffers: bool = False

    def __call__(self) -> None:
        if self.what and self.before:
            SEEDS[self.what](self.seed)
        session = pr.init()
        if self.what and not self.before:
            SEEDS[self.what](self.seed + self.by_rank * session.rank)
        model: Any = nn.Linear(1, 1)
        if self.buffers:
            model.register_buffer("noise", torch.rand(1))
        weight = model.weight.item()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        generator = torch.Generator().manual_seed(self.seed) if self.what == "generator" else None
        data = TensorDataset(torch.arange(12).float()[:, None])
        loader: Any = DataLoader(data, 2, shuffle=True, generator=generator)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        order = []
        for (x,) in loader:
            order += x.flatten().tolist()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        started = session.consensus().weight.item()  # the learning rate is 0
        drawn = {"torch": torch.rand(()).item(), "numpy": np.random.random(), "random": random.random()}
        session.log(**drawn, weight=weight, started=started, order=str(order))


def logged(world: str, folder: Path, script: Seeding, **options: Any) -> list[dict[str, Any]]:
    """What the two workers have logged."""
    summary = run_in(world, script, workers=2, runs=folder, **options)
    lines = sorted(read_metrics(summary["folder"]), key=lambda line: str(line["node"]))
    return [
        {name: value for name, value in line.items() if name not in ("t", "node", "step")} for line in lines
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_a_study_over_the_seeds_of_a_script_has_variance(world: str) -> None:
    """`-- --seed 1` and `-- --seed 2` give different models, each of them again and again."""

    def digest(own: int, run: int = 0) -> str:
        arguments = ["--epochs", "1", "--seed", str(own)]
        return str(run_in(world, DIGITS, workers=2, arguments=arguments, seed=run)["digest"])

    first = digest(1)
    assert digest(2) != first
    assert digest(1, run=5) == first, "--seed is for scripts that do not seed"


@pytest.mark.parametrize("before", [True, False])
def test_each_seed_changes_its_own_generator_only(tmp_path: Path, before: bool) -> None:
    """Seeding torch changes the model, the order of the data and torch's draws; the others only theirs."""
    unseeded = logged("simulated", tmp_path, Seeding())
    changes = {
        "torch": {"torch", "weight", "started", "order"}, "numpy": {"numpy"}, "random": {"random"},
        "generator": {"order"},
    }  # fmt: skip
    for what, expected in changes.items():
        one, other = (logged("simulated", tmp_path, Seeding(what, seed, before)) for seed in (1, 2))
        for worker in range(2):
            assert {name for name in one[0] if one[worker][name] != other[worker][name]} == expected
            assert {name for name in one[0] if one[worker][name] != unseeded[worker][name]} == expected
        assert all(one[0][name] != one[1][name] for name in ("torch", "numpy", "random", "order"))
        assert logged("simulated", tmp_path, Seeding(what, 1, before)) == one
        elsewhere = logged("simulated", tmp_path, Seeding(what, 1, before), seed=7)
        assert {name for name in one[0] if elsewhere[0][name] == one[0][name]} == expected


def test_real_workers_draw_what_simulated_ones_draw(tmp_path: Path) -> None:
    for what in ("", "torch", "numpy"):
        script = Seeding(what, 3, before=False)
        assert logged("real", tmp_path, script) == logged("simulated", tmp_path, script)


@pytest.mark.parametrize("world", WORLDS)
def test_workers_that_seed_by_rank_share_the_model_and_the_order_of_worker_0(
    world: str, tmp_path: Path
) -> None:
    """`manual_seed(seed + rank)` is common: the data is still divided, and all start from one model."""
    alike = logged(world, tmp_path, Seeding("torch", 1, before=False))
    apart = logged(world, tmp_path, Seeding("torch", 1, before=False, by_rank=True))
    assert apart[0] == alike[0]
    assert apart[1]["weight"] != apart[0]["weight"] and apart[1]["started"] == apart[0]["started"]
    assert apart[1]["order"] == alike[1]["order"] and apart[1]["torch"] != alike[1]["torch"]


def test_buffers_from_different_seeds_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from polyrhythm.launch.console import Console

    for buffers in (False, True):
        script = Seeding("torch", 1, before=False, by_rank=True, buffers=buffers)
        run_in("simulated", script, workers=2, runs=tmp_path, console=Console())
        assert ("seeded torch differently" in capsys.readouterr().err) == buffers
