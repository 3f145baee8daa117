"""Two sites on a slow link: time and bytes to the same loss, for one strategy over all workers and for two.

Simulated, with real gradients: two sites of 4 workers each, with 1 Gbit/s inside and a link of 10 Mbit/s and
20 ms between them; a model of 301,066 parameters on the digits. A run is looked at when all are together
anyway, at the end of a round, and its time is that at which the loss over all training images was first
below the target. Time is virtual, so that the figures are the same on every machine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.processes import Together, together
from benchmarks.report import Row

SITE, BATCH, PERIOD = 4, 4, 20  # workers of a site, examples of a worker's batch, steps of a round
TARGET = 0.05  # of the mean cross-entropy over the training images
MOST = 800  # steps
RATE = 1e-3  # of AdamW, for all
SEEDS = (1, 2, 3)
BARS = (0.1, 0.05)  # for time and for bytes, as shares of what allreduce over all takes, in a ring
CLUSTER = """
[[hosts]]
count = 4
site = "a"
step_time = { lognormal = "50 ms", sigma = 0.1 }
bandwidth = "1 Gbit/s"
latency = "0.1 ms"
[[hosts]]
count = 4
site = "b"
step_time = { lognormal = "50 ms", sigma = 0.1 }
bandwidth = "1 Gbit/s"
latency = "0.1 ms"
[[sites]]
name = "a"
bandwidth = "10 Mbit/s"
latency = "20 ms"
[[sites]]
name = "b"
bandwidth = "10 Mbit/s"
latency = "20 ms"
"""


@dataclass(frozen=True)
class Case:
    """Who trains how."""

    strategy: str
    workers: int = 2 * SITE
    collective: str = "auto"
    barred: bool = False

    def __str__(self) -> str:
        if self.workers == SITE:
            return f"one site alone: {self.strategy}"
        if self.collective == "ring":
            return f"{self.strategy}, in a ring"
        return self.strategy


def cases(quick: bool) -> list[Case]:
    """The first is what the others are compared with: the all-reduce that sends least between sites."""
    few = [
        Case("allreduce", collective="ring"),
        Case("allreduce", workers=SITE),
        Case(f"allreduce / diloco:{PERIOD}", barred=True),
        Case(f"allreduce / diloco:{PERIOD}+int4"),
    ]
    if quick:
        return few
    return [
        *few,
        Case("allreduce"),
        Case("allreduce+int8"),
        Case(f"local:{PERIOD}"),
        Case(f"diloco:{PERIOD}"),
        Case(f"allreduce / local:{PERIOD}"),
        Case(f"allreduce / average:{PERIOD}"),
        Case(f"allreduce / diloco:{PERIOD}+topk:0.05"),
    ]


@dataclass(frozen=True)
class Outcome:
    """What it took: virtual seconds, steps, and bytes that left a site."""

    seconds: float
    steps: int
    passed: float
    reached: bool


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    seeds = SEEDS[:1] if quick else SEEDS
    jobs = [(case, seed) for case in cases(quick) for seed in seeds]
    parts = together(min(os.cpu_count() or 1, len(jobs)), _share, jobs)
    found: dict[Case, list[Outcome]] = {case: [] for case in cases(quick)}
    for case, outcome in (pair for part in parts for pair in part):
        found[case].append(outcome)
    first, *_ = found.values()
    return [row for case, mine in found.items() for row in _rows(case, mine, first)], [
        f"time and bytes until the loss over all training images was first below {TARGET}, looked at every "
        f"{PERIOD} steps; medians over seeds {', '.join(map(str, seeds))}",
        f"{SITE} workers per site, batch {BATCH} each, AdamW at {RATE}, steps of about 50 ms",
        "theirs: all-reduce over all workers, in a ring; one site alone is what to beat",
    ]


def _rows(case: Case, mine: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[Row]:
    """How long it took, and what passed between the sites meanwhile."""

    def middle(those: Sequence[Outcome], what: str) -> float:
        # What never got there took no time that could be compared, and meets no bar.
        there = all(each.reached for each in those)
        return statistics.median(getattr(each, what) for each in those) if there else nan

    def row(what: str, key: str, unit: str, scale: float, bar: float, **more: str) -> Row:
        ours, beside = middle(mine, key) / scale, middle(theirs, key) / scale
        return Row(
            f"{case}: {what}", ours, unit, None if mine is theirs else beside,
            ratio=None if mine is theirs else ours / beside, bar=bar if case.barred else None, wanted="below",
            more=more,
        )  # fmt: skip

    reached = f"{sum(each.reached for each in mine)} of {len(mine)}"
    return [
        row("time", "seconds", "s", 1.0, BARS[0], steps=f"{middle(mine, 'steps'):.0f}", reached=reached),
        row("between sites", "passed", "MB", 1e6, BARS[1]),
    ]


def _share(here: Together, jobs: list[tuple[Case, int]]) -> list[tuple[Case, Outcome]]:
    return [(case, train(case, seed)) for case, seed in jobs[here.rank :: here.count]]


def train(case: Case, seed: int) -> Outcome:
    """Trains until the loss is below the target, or for the most steps."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr
    from polyrhythm.data import digits

    train_set, _ = digits()
    images, labels = train_set.tensors
    seen: list[Outcome] = []

    def main() -> None:
        session = pr.init()
        model: Any = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        steps = 0
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
                if steps % PERIOD:
                    continue
                # What was seen a round ago all know by now, for worker 0 has come this far too.
                if steps > MOST or any(each.reached for each in seen if each.steps < steps):
                    return
                shown = session.consensus()  # they are together: it costs nothing
                if session.rank == 0:
                    with torch.no_grad():
                        loss = F.cross_entropy(shown(images), labels).item()
                    world = session._node.world  # type: ignore[attr-defined]
                    passed = sum(node.bytes_between for node in world.nodes.values())
                    seen.append(Outcome(world.loop.now, steps, passed, loss < TARGET))

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(CLUSTER)
        pr.simulate(
            main, workers=case.workers, strategy=case.strategy, cluster=cluster, seed=seed, threads=1,
            collective=case.collective,
        )  # fmt: skip
    return next((each for each in seen if each.reached), seen[-1])
