"""`session.predict` on two processes, against one process with one thread.

In one run of two workers the first evaluates a plain copy of the model alone, while the other waits, and then
both predict the same loader: by turns, so that a busy minute hits both. A prediction includes all that a
script pays for it: the model that the workers agree on, loading, dealing, and outputs on every worker.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import apart
from benchmarks.report import Row, ratio

WIDTH, LAYERS, BATCH, CLASSES = 1024, 8, 256, 10
BAR = 1.6
Speeds = dict[str, list[float]]


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, batches = (3, 32) if quick else (7, 48)
    rows = []
    for what, strategy in (("dealt to 2 replicas", "allreduce"), ("streamed through 2 stages", "pipeline:2")):
        found: Speeds = apart(_run, strategy, rounds, batches)
        rows.append(
            Row(
                f"{what}: batches/s against one process",
                statistics.median(found["together"]), "/s", statistics.median(found["alone"]),
                ratio(found["together"], found["alone"]), BAR,
            )
        )  # fmt: skip
    return rows, [
        f"{batches} batches of {BATCH} rows, {LAYERS} layers of {WIDTH} and {CLASSES} classes; one thread "
        "for each process; the same bits in all three"
    ]


def _run(strategy: str, rounds: int, batches: int) -> Speeds:
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speeds.json"
        pr.run(_Script(rounds, batches, file), workers=2, strategy=strategy, threads=1, runs=None)
        found: Speeds = json.loads(file.read_text())
        return found


class _Script:
    """Predicts by turns; worker 0 writes what it has measured."""

    def __init__(self, rounds: int, batches: int, file: Path) -> None:
        self.rounds, self.batches, self.file = rounds, batches, file

    def __call__(self) -> None:
        import copy

        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
        plain = copy.deepcopy(model).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.randn(BATCH * self.batches, WIDTH)), BATCH)
        session.prepare(model, optimizer, example=(torch.randn(BATCH, WIDTH),))
        speeds: Speeds = {"alone": [], "together": []}

        def timed(function: Callable[[], Any]) -> tuple[float, Any]:
            began = time.perf_counter()
            found = function()
            return self.batches / (time.perf_counter() - began), found

        @torch.no_grad()
        def alone() -> Any:
            return torch.cat([plain(x) for (x,) in loader])

        for number in range(self.rounds + 1):
            speed, expected = timed(alone) if session.is_main else (0.0, None)
            session.barrier()
            both, found = timed(lambda: session.predict(loader))
            if session.is_main:
                assert torch.equal(found, expected)
                if number:  # not the first
                    speeds["alone"].append(speed)
                    speeds["together"].append(both)
            session.barrier()
        if session.is_main:
            self.file.write_text(json.dumps(speeds))
