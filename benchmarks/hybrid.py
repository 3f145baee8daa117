"""Four workers: two models of two stages (`allreduce@pipeline:2`), against four whole models (`allreduce`).

Both train the same model on batches of the same rows in total, with momentum, in turn. The memory of a worker
is the growth of its resident set from before it builds the model to its highest: with the whole model that
every worker builds at first, and with memory of others that it has touched.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import apart
from benchmarks.report import Row, ratio

WORKERS, WIDTH, LAYERS, ROWS = 4, 2048, 8, 256
STRATEGIES = "allreduce@pipeline:2", "allreduce"
MIB = 1 << 20


class Figures(NamedTuple):
    """Of one run."""

    samples: float  # a second
    memory: float  # MiB of the worker that needs most


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    found: dict[str, list[Figures]] = {name: [] for name in STRATEGIES}
    for _ in range(1 if quick else 3):
        for name in STRATEGIES:
            found[name].append(apart(_run, name, 2 if quick else 4))
    hybrid, whole = (found[name] for name in STRATEGIES)
    rows = []
    for what, unit, number in (("samples/s", "/s", 0), ("peak memory of a worker", "MiB", 1)):
        ours, theirs = [each[number] for each in hybrid], [each[number] for each in whole]
        medians = statistics.median(ours), statistics.median(theirs)
        rows.append(
            Row(f"{what}, {STRATEGIES[0]} against {STRATEGIES[1]}", medians[0], unit, medians[1],
                ratio(ours, theirs))
        )  # fmt: skip
    size = LAYERS * WIDTH * (WIDTH + 1) * 4 / MIB
    return rows, [
        f"{LAYERS} layers of {WIDTH} ({size:.0f} MiB of parameters), SGD with momentum, {ROWS} rows for each "
        f"step of all {WORKERS} workers, one thread for each; {os.cpu_count()} cores"
    ]


def _run(strategy: str, steps: int) -> Figures:
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        pr.run(_Script(steps, Path(folder)), workers=WORKERS, strategy=strategy, threads=1, runs=None)
        found = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    assert len(found) == WORKERS
    speeds, memory = zip(*found, strict=True)
    return Figures(min(speeds), max(memory))


class _Script:
    """Trains; every worker writes its figures."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps, self.folder = steps, folder

    def __call__(self) -> None:
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        rows = ROWS // session.workers  # those of one model
        data = TensorDataset(torch.randn(ROWS * (self.steps + 2), WIDTH))
        before = _resident("VmRSS")
        model: Any = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
        )
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, rows))
        began = 0.0
        for number, (x,) in enumerate(loader):
            if number == 2:
                session.barrier()
                began = time.perf_counter()
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
        session.barrier()
        speed = self.steps * ROWS / (time.perf_counter() - began)
        figures = speed, _resident("VmHWM") - before
        (self.folder / str(os.getpid())).write_text(json.dumps(figures))


def _resident(which: str) -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024
