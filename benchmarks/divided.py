"""A model that two workers hold together against the same model alone, by turns in one run.

The first worker trains a plain copy alone, while the other waits, and then both train the divided model, so
that a busy minute hits both.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Speeds = dict[str, list[float]]
Build = Callable[[], tuple[Any, tuple[Any, ...], Any]]  # a model, its inputs, and targets


def timed(train: Callable[[], None], steps: int) -> float:
    """Steps per second."""
    began = time.perf_counter()
    for _ in range(steps):
        train()
    return steps / (time.perf_counter() - began)


def by_turns(build: Build, strategy: str, rounds: int, steps: int) -> Speeds:
    """Steps per second of forward, backward and SGD, alone and divided, each with one thread."""
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speeds.json"
        pr.run(_Script(build, rounds, steps, file), workers=2, strategy=strategy, threads=1, runs=None)
        found: Speeds = json.loads(file.read_text())
        return found


class _Script:
    """Trains by turns; worker 0 writes what it has measured."""

    def __init__(self, build: Build, rounds: int, steps: int, file: Path) -> None:
        self.build, self.rounds, self.steps, self.file = build, rounds, steps, file

    def __call__(self) -> None:
        import copy

        import torch
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        model, inputs, y = self.build()
        plain = copy.deepcopy(model)
        alone = torch.optim.SGD(plain.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(*inputs, y), len(y))
        model, optimizer, loader = session.prepare(model, optimizer, loader, loss=F.mse_loss)
        speeds: Speeds = {"alone": [], "divided": []}

        def train_alone() -> None:
            alone.zero_grad()
            F.mse_loss(plain(*inputs), y).backward()
            alone.step()

        def train() -> None:
            optimizer.zero_grad()
            session.backward(inputs, y)  # without a schedule that is the loop of a script
            optimizer.step()

        for number in range(self.rounds + 1):
            if session.is_main:
                speed = timed(train_alone, self.steps)
                if number:  # not the first
                    speeds["alone"].append(speed)
            session.barrier()
            for batch in loader:
                assert len(batch[0]) == len(y)
                break
            speed = timed(train, self.steps)
            if number:
                speeds["divided"].append(speed)
            session.barrier()
        if session.is_main:
            self.file.write_text(json.dumps(speeds))
