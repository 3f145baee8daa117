"""Somebody kills a random worker every few seconds, and the model is as good as without."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.data import digits
from polyrhythm.launch.console import Console
from tests.support.combine import few
from tests.support.logs import check_laws
from tests.support.programs import events, trained

EPOCHS, BATCH, WORKERS = 10, 16, 4


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train_slowly(folder: Path, pause: float) -> None:
    """A step takes `pause` seconds and a little more."""
    session = pr.init()
    if session._context.me.role == "worker":
        (folder / f"worker {session.rank}").write_text(str(os.getpid()))
    train_set, _ = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    (folder / "started").touch()
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(pause)


class Killer(threading.Thread):
    """Kills a random worker that lives, every `period` seconds, until it is told to stop."""

    def __init__(self, folder: Path, period: float, seed: int) -> None:
        super().__init__(name="killer")
        self.folder, self.period, self.random = folder, period, random.Random(seed)
        self.done = threading.Event()
        self.killed: list[int] = []

    def run(self) -> None:
        while not self.done.wait(self.period * self.random.uniform(0.6, 1.4)):
            if not (self.folder / "started").exists():  # until then every worker is needed
                continue
            files = sorted(self.folder.glob("worker *"))
            self.random.shuffle(files)
            alive = {process.pid: process for process in psutil.Process().children(recursive=True)}
            for file in files:
                with contextlib.suppress(ValueError, KeyError, psutil.NoSuchProcess):
                    process = alive[int(file.read_text())]
                    if process.status() != psutil.STATUS_ZOMBIE:
                        process.kill()
                        self.killed.append(process.pid)
                        break


def accuracy(summary: dict[str, Any], test_set: TensorDataset) -> float:
    model = network()
    model.load_state_dict(trained(summary))
    images, labels = test_set.tensors
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


@pytest.mark.timeout(300)
@few(
    "strategy, seconds, period",
    [("async", 6.0, 1.5), ("async", 60.0, 3.0), ("async:max_staleness=3", 15.0, 1.5)],
    quick=1,
)
def test_async_run_survives_a_random_worker_kill_every_few_seconds(
    tmp_path: Path, strategy: str, seconds: float, period: float
) -> None:
    """All is trained, the parameters are whole, and the log's laws hold."""
    train_set, test_set = digits()
    steps = EPOCHS * -(-len(train_set) // BATCH)
    how: dict[str, Any] = {
        "workers": WORKERS, "strategy": strategy, "runs": tmp_path, "timeout": 60.0,
        "console": Console(io.StringIO(), quiet=True),
    }  # fmt: skip
    calm = pr.run(partial(train_slowly, tmp_path, 0.0), name="calm", **how)
    (tmp_path / "started").unlink()
    killer = Killer(tmp_path, period, seed=1)
    killer.start()
    try:
        # A little of the time goes into starting, and into what the dead had begun.
        disturbed = pr.run(
            partial(train_slowly, tmp_path, 0.85 * seconds * WORKERS / steps),
            name="disturbed",
            restarts=1000,
            **how,
        )
    finally:
        killer.done.set()
        killer.join()
    assert len(killer.killed) > 0.5 * seconds / period
    deaths = disturbed["joined"]
    assert len(killer.killed) - WORKERS <= deaths <= len(killer.killed)
    assert disturbed["batches_undone"] == 0
    # What the dead did in their last half second they could not tell.
    assert disturbed["samples"] > 0.8 * EPOCHS * len(train_set)
    leases = events(disturbed, "lease")
    assert {(line["epoch"], line["first"] + at) for line in leases for at in range(line["count"])} == {
        (epoch, batch) for epoch in range(EPOCHS) for batch in range(steps // EPOCHS)
    }
    check_laws(calm, at_once=strategy == "async")
    check_laws(disturbed, at_once=strategy == "async")
    print(f"killed {len(killer.killed)}, joined {deaths}, {disturbed['wall_s']:.0f} s,", end=" ")
    print(f"accuracy {accuracy(disturbed, test_set):.3f}, undisturbed {accuracy(calm, test_set):.3f}")
    assert accuracy(disturbed, test_set) > accuracy(calm, test_set) - 0.03
