"""Random workers are killed during a run, and the model is as good as without."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
import time
from dataclasses import dataclass
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
STEPS = 900  # of all workers, without the batches that are trained again


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass
class Progress:
    """How many steps all workers have taken and how many workers were killed: the sizes of two files.

    The run has `kills` + 1 parts of equally many steps. In each but the last a worker is killed, and no
    worker continues with the next part before. So as many are killed however fast the run is.
    """

    folder: Path
    kills: int

    @property
    def parts(self) -> float:
        """How many parts of the run are done."""
        return self._count("steps") * (self.kills + 1) / STEPS

    @property
    def killed(self) -> int:
        return self._count("killed")

    def add(self, what: str) -> None:
        with (self.folder / what).open("ab", buffering=0) as file:
            file.write(b".")

    def _count(self, what: str) -> int:
        file = self.folder / what
        return file.stat().st_size if file.exists() else 0


def train(progress: Progress) -> None:
    session = pr.init()
    if session._context.me.role == "worker":
        (progress.folder / f"worker {session.rank}").write_text(str(os.getpid()))
    train_set, _ = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            progress.add("steps")
            while progress.killed < min(int(progress.parts), progress.kills):
                time.sleep(0.01)


class Killer(threading.Thread):
    """Kills a random worker that lives at a random moment of each part of the run but the last."""

    def __init__(self, progress: Progress, seed: int) -> None:
        super().__init__(name="killer")
        self.progress, self.random = progress, random.Random(seed)
        self.done = threading.Event()

    def run(self) -> None:
        for part in range(self.progress.kills):
            moment = part + self.random.uniform(0.1, 0.9)  # the first steps need all workers
            while self.progress.parts < moment or not self._kill():
                if self.done.wait(0.001):
                    return
            self.progress.add("killed")

    def _kill(self) -> bool:
        files = sorted(self.progress.folder.glob("worker *"))
        self.random.shuffle(files)
        alive = {process.pid: process for process in psutil.Process().children(recursive=True)}
        for file in files:
            with contextlib.suppress(ValueError, KeyError, psutil.NoSuchProcess):
                process = alive[int(file.read_text())]
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    return True
        return False


def accuracy(summary: dict[str, Any], test_set: TensorDataset) -> float:
    model = network()
    model.load_state_dict(trained(summary))
    images, labels = test_set.tensors
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


@pytest.mark.timeout(300)
@few("strategy, kills", [("async", 3), ("async", 20), ("async:max_staleness=3", 8)], quick=0)
def test_async_run_survives_random_worker_kills(tmp_path: Path, strategy: str, kills: int) -> None:
    """All is trained, the parameters are whole, and the log's laws hold."""
    train_set, test_set = digits()
    assert EPOCHS * -(-len(train_set) // BATCH) == STEPS
    how: dict[str, Any] = {
        "workers": WORKERS, "strategy": strategy, "runs": tmp_path, "timeout": 60.0,
        "console": Console(io.StringIO(), quiet=True),
    }  # fmt: skip
    calm = pr.run(partial(train, Progress(tmp_path, 0)), name="calm", **how)
    (tmp_path / "steps").unlink()
    progress = Progress(tmp_path, kills)
    killer = Killer(progress, seed=1)
    killer.start()
    try:
        disturbed = pr.run(partial(train, progress), name="disturbed", restarts=kills, **how)
    finally:
        killer.done.set()
        killer.join()
    assert progress.killed == kills and disturbed["lost"]
    assert kills - WORKERS <= disturbed["joined"] <= kills
    assert disturbed["batches_undone"] == 0
    assert len(events(disturbed, "apply")) >= STEPS  # what the dead had begun is trained again
    leases = events(disturbed, "lease")
    assert {(line["epoch"], line["first"] + at) for line in leases for at in range(line["count"])} == {
        (epoch, batch) for epoch in range(EPOCHS) for batch in range(STEPS // EPOCHS)
    }
    check_laws(calm, at_once=strategy == "async")
    check_laws(disturbed, at_once=strategy == "async")
    print(f"killed {kills}, joined {disturbed['joined']}, {disturbed['wall_s']:.0f} s,", end=" ")
    print(f"accuracy {accuracy(disturbed, test_set):.3f}, undisturbed {accuracy(calm, test_set):.3f}")
    assert accuracy(disturbed, test_set) > accuracy(calm, test_set) - 0.03
