"""The checks of a session: which share of the time of a training loop they take.

Two real workers train a network of 1.1 million parameters. The time inside each function that only checks is
added up on each worker, and divided by the time of the loop: a difference of two runs would be smaller than
what runs differ by anyway. The larger share of the two workers counts.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import apart
from benchmarks.report import Row

WORKERS, BATCH = 2, 32
STRATEGIES = ("allreduce", "async", "local:8", "broadcast", "allreduce+topk:0.01")


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    steps = 200 if quick else 1000
    rows, notes = [], []
    for strategy in STRATEGIES:
        shares, largest = apart(_shares, strategy, steps)
        rows.append(
            Row(f"share of the time in checks: {strategy}", 100 * max(shares), "%", bar=1, wanted="below")
        )
        notes.append(f"{strategy}: most in {largest}")
    return rows, [f"{steps} steps with a batch of {BATCH}, {WORKERS} workers", *notes]


def _shares(strategy: str, steps: int) -> tuple[list[float], str]:
    """The share of each worker, and the check that takes most."""
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        script = functools.partial(_train, Path(folder), steps)
        pr.run(script, workers=WORKERS, strategy=strategy, runs=None, threads=1)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    times = found[0]["checks"]
    largest = max(times, key=lambda name: float(times[name]))
    share = 100 * times[largest] / found[0]["loop"]
    return [sum(each["checks"].values()) / each["loop"] for each in found], f"{largest}, {share:.2f} %"


def _checks() -> list[tuple[type, str]]:
    """The methods that only check, of those that are called in each step."""
    from polyrhythm.model.replica import Replica
    from polyrhythm.session.given import GivenBatches
    from polyrhythm.session.replica_check import ReplicaCheck
    from polyrhythm.session.script_calls import ScriptCalls
    from polyrhythm.session.step import StepDriver
    from polyrhythm.session.write_check import WriteCheck

    return [
        (ReplicaCheck, "after_step"), (WriteCheck, "check"), (WriteCheck, "written"), (ScriptCalls, "check"),
        (StepDriver, "reattach"), (Replica, "stepped"), (Replica, "check_finite"), (GivenBatches, "give"),
        (GivenBatches, "before_forward"), (GivenBatches, "before_backward"),
    ]  # fmt: skip


def _train(folder: Path, steps: int) -> None:
    import torch
    from torch import nn

    import polyrhythm as pr

    times: dict[str, float] = {}

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        times[name] = 0.0

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                times[name] += time.perf_counter() - began

        return call

    for owner, name in _checks():
        setattr(owner, name, timed(f"{owner.__name__}.{name}", getattr(owner, name)))
    session = pr.init()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    data = torch.utils.data.TensorDataset(
        torch.randn(steps * BATCH, 784), torch.randint(10, (steps * BATCH,))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for key in times:
        times[key] = 0.0
    began = time.perf_counter()
    for _ in range(WORKERS):  # each epoch has half of the batches for each worker
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    result = {"checks": times, "loop": time.perf_counter() - began}
    (folder / f"{session.rank}.json").write_text(json.dumps(result))
