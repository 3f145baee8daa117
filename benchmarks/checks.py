"""The checks of a session: which share of the time of a training loop they take.

Two real workers train the network of `allreduce`, with 1.1 million parameters and batches of 50. The time
inside each function that only checks, or finds out which batch a gradient belongs to, is added up on each
worker and divided by the time of the loop: a difference of two runs would be smaller than what runs differ by
anyway. The larger share of the two workers counts. The time per step hardly depends on the model.
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

WORKERS, BATCH = 2, 50
STRATEGIES = ("allreduce", "async", "local:8", "broadcast", "allreduce+topk:0.01")


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    steps = 100 if quick else 500
    rows, notes = [], []
    for strategy in STRATEGIES:
        shares, each = apart(_shares, strategy, steps)
        rows.append(
            Row(f"share of the time in checks: {strategy}", 100 * max(shares), "%", bar=1, wanted="below")
        )
        notes.append(f"{strategy}: {each}")
    return rows, [f"{steps} steps with a batch of {BATCH}, {WORKERS} workers", *notes]


def _shares(strategy: str, steps: int) -> tuple[list[float], str]:
    """The share of each worker, and the time of worker 0 in a step."""
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        script = functools.partial(_train, Path(folder), steps)
        pr.run(script, workers=WORKERS, strategy=strategy, runs=None, threads=1)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    spent, loop = found[0]["checks"], found[0]["loop"]
    micro = {name: 1e6 * seconds / steps for name, seconds in spent.items() if seconds}
    slowest = sorted(micro, key=lambda name: -micro[name])[:3]
    return (
        [sum(each["checks"].values()) / each["loop"] for each in found],
        f"{sum(micro.values()):.0f} of {1e6 * loop / steps:,.0f} µs a step, most in "
        + ", ".join(f"{name} ({micro[name]:.0f})" for name in slowest),
    )


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
    from benchmarks.allreduce import network

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
    model = network()
    images, labels = torch.randn(steps * BATCH, 1, 28, 28), torch.randint(10, (steps * BATCH,))
    data = torch.utils.data.TensorDataset(images, labels)
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
