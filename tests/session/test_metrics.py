"""Metrics: one value for all workers in the summary, the values of each in the run folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.coordination.metrics import ReducedMetrics
from polyrhythm.core.message import Scalar
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import LogMetrics
from polyrhythm.record.reader import read_metrics
from tests.support.runs import WORLDS, run_in


def logging() -> None:
    """Seven examples: workers 0 and 1 train on 4 and 3 in lockstep."""
    session = pr.init()
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    loader: Any = DataLoader(TensorDataset(torch.ones(7, 1)), batch_size=2)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(2):
        seen = 0
        for (x,) in loader:
            seen += len(x)
            model(x).mean().backward()
            optimizer.step()
        rank = session.rank
        session.log(epoch=epoch, loss=float(rank), seen=seen, name=f"worker {rank}", same=0.1)
        session.log(least=rank, reduce="min")
        session.log(most=rank, reduce="max")
        session.log(first=rank + 0.5, reduce="rank0")


@pytest.mark.parametrize("world", WORLDS)
def test_the_summary_has_one_value_for_all_workers(world: str, tmp_path: Path) -> None:
    summary = run_in(world, logging, workers=2, runs=tmp_path)
    lines = read_metrics(summary["folder"])
    seen = {line["node"]: line["seen"] for line in lines if "seen" in line}
    assert sorted(seen.values()) == [3, 4]
    assert summary["metrics"] == {
        "epoch": 1, "loss": round(seen["worker 1"] / 7, 6), "seen": round(25 / 7, 6), "name": "worker 0",
        "same": 0.1, "least": 0, "most": 1, "first": 0.5,
    }  # fmt: skip
    assert sorted(line["loss"] for line in lines if "loss" in line) == [0.0, 0.0, 1.0, 1.0]


def reduced(*logged: tuple[int, Scalar, int], reduce: str = "mean", dead: Any = ()) -> Scalar:
    metrics = ReducedMetrics([(Peer("worker", rank), 0) for rank in dead])
    for rank, value, samples in logged:
        metrics.add((Peer("worker", rank), 0), LogMetrics(0.0, 0, {"x": value}, reduce, samples))
    return metrics.reduced()["x"]


def test_a_mean_is_of_the_latest_values_by_the_examples_since_the_ones_before() -> None:
    assert reduced((0, 1.0, 10), (1, 4.0, 20)) == 3.0
    assert reduced((0, 9.0, 90), (0, 1.0, 100), (1, 4.0, 20)) == 3.0
    assert reduced((0, 1.0, 0), (1, 4.0, 0)) == 2.5, "logged before any step"
    assert reduced((0, math.inf, 0), (1, 4.0, 5)) == 4.0, "worker 0 has trained on nothing"
    assert reduced((1, 4, 5), (0, 4, 7)) == 4 and isinstance(reduced((1, 4, 5), (0, 4, 7)), int)


def test_a_dead_worker_counts_only_if_no_other_has_logged() -> None:
    assert reduced((0, 1.0, 10), (1, 4.0, 20), dead=[1]) == 1.0
    assert reduced((1, 4.0, 20), dead=[1]) == 4.0


@pytest.mark.parametrize("reduce", ["mean", "min", "max"])
def test_nan_is_not_hidden(reduce: str) -> None:
    for values in ((math.nan, 1.0), (1.0, math.nan)):
        found = reduced(*((rank, value, 1) for rank, value in enumerate(values)), reduce=reduce)
        assert isinstance(found, float) and math.isnan(found)


@pytest.mark.parametrize("reduce", ["mean", "min", "max", "rank0"])
def test_what_is_no_number_is_that_of_the_first_worker(reduce: str) -> None:
    assert reduced((1, "b", 1), (0, "a", 1), reduce=reduce) == "a"
    assert reduced((1, False, 1), (0, True, 1), reduce=reduce) is True
    assert reduced((1, 1.0, 1), (0, None, 1), reduce=reduce) is None


@pytest.mark.parametrize("world", WORLDS)
def test_servers_log_nothing(world: str, tmp_path: Path) -> None:
    """They run the script to `prepare`, and what it logs before is that of workers."""

    def main() -> None:
        session = pr.init()
        session.log(before=0.5)
        model: Any = nn.Linear(1, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        session.log(before=float(session.rank))

    summary = run_in(world, main, strategy="async", servers=2, workers=2, runs=tmp_path)
    assert summary["metrics"] == {"before": 0.5}
    assert {row["node"] for row in read_metrics(Path(summary["folder"]))} == {"worker 0", "worker 1"}
