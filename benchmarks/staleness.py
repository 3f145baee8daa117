"""What stale gradients do to a real network: a fixed rate, a rate divided by staleness, and momentum.

The first table has the shape of Zhang, Gupta, Lian, Liu 2016: 30 learners, batch 4 each, momentum 0.9, and
n-softsync, which applies the mean of every 30/n pushes. The second is 8 workers with momentum 0.9 at a rate
that one learner trains well with. All is simulated, with real gradients and exponential step times, so that
the figures are the same on every machine; the bars are for accuracy, in points.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import Together, together
from benchmarks.report import Row

LEARNERS, MOMENTUM_WORKERS, BATCH = 30, 8, 4
RATE, MOMENTUM = 0.03, 0.9
EPOCHS, MOMENTUM_EPOCHS = 40, 10
DECAY = 32  # the epoch from which the rate is a tenth, as it is late in the paper
SEEDS = (6, 7, 8)  # others than those on which rate, epochs and decay were chosen
CHANCE = 0.1
CLUSTER = '[[hosts]]\nstep_time = { exponential = "10 ms" }\n'


@dataclass(frozen=True)
class Case:
    """One line of a table: who trains how, and what is expected of it."""

    what: str
    strategy: str
    workers: int
    epochs: int
    rate: float = RATE
    momentum: float = MOMENTUM
    expected: Literal["learns", "fails"] | None = None


def cases(quick: bool) -> tuple[list[Case], list[Case]]:
    """The two tables. Each begins with the one learner that the others are compared with."""
    softsync = [Case("one learner", "allreduce", 1, EPOCHS)]
    if not quick:
        # As few updates as n = 1, and no staleness: tells the one from the other.
        softsync += [Case(f"{LEARNERS} learners, hard synchronous", "sync", LEARNERS, EPOCHS)]
    for n in (30, 1) if quick else (30, 15, 1):
        # The paper sees the fixed rate fail at n = 30 and 15. At n = 1 hardly anything is stale, and both
        # rates have as few updates as the synchronous row: what they miss is not due to staleness.
        fails: Literal["fails"] | None = "fails" if n > 1 else None
        learns: Literal["learns"] | None = "learns" if n > 1 else None
        name = f"{LEARNERS} learners, n = {n}"
        group = f"softsync:{LEARNERS // n}"
        softsync += [
            Case(f"{name}, fixed rate", group, LEARNERS, EPOCHS, expected=fails),
            Case(f"{name}, rate / staleness", f"{group},weight=1/tau", LEARNERS, EPOCHS, expected=learns),
        ]

    def eight(strategy: str, what: str = "", **more: Any) -> Case:
        return Case(
            f"{MOMENTUM_WORKERS} workers, {what or strategy}",
            strategy,
            MOMENTUM_WORKERS,
            MOMENTUM_EPOCHS,
            **more,
        )

    momentum = [
        Case("one learner, as long as the 8", "allreduce", 1, MOMENTUM_EPOCHS),
        eight("async", expected="fails"),
        eight("dana-zero"),
        eight("dana-slim"),
    ]
    if not quick:
        momentum += [
            eight("gap-aware"),
            eight("ormo"),
            eight("dc-asgd"),
            eight("async", "async, no momentum", momentum=0.0),
            # Momentum 0.9 makes steps ten times as long in the end; this is as bold without it.
            eight("async", "async, no momentum, 10 × rate", momentum=0.0, rate=10 * RATE),
        ]
    return softsync, momentum


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    seeds = SEEDS[:1] if quick else SEEDS
    tables = cases(quick)
    jobs = [(case, seed) for table in tables for case in table for seed in seeds]
    parts = together(min(os.cpu_count() or 1, len(jobs)), _share, jobs)
    outcomes: dict[Case, list[Outcome]] = {}
    for case, outcome in (pair for part in parts for pair in part):
        outcomes.setdefault(case, []).append(outcome)
    rows = [row for table in tables for row in _rows(table, outcomes)]
    notes = [
        f"rate {RATE}, momentum {MOMENTUM}, batch {BATCH}, seeds {', '.join(map(str, seeds))}; "
        f"{EPOCHS} epochs on the digits, the last {EPOCHS - DECAY} at a tenth of the rate; "
        f"{MOMENTUM_EPOCHS} for the {MOMENTUM_WORKERS} workers",
        "accuracy on 360 test digits, mean over seeds; one digit is 0.28 points; chance is 10 %",
    ]
    return rows, notes


@dataclass(frozen=True)
class Outcome:
    """What a run came to. A run whose loss is no number any more has chance's accuracy."""

    accuracy: float
    staleness: float = 0.0
    stalest: float = 0.0
    diverged: bool = False


def _rows(table: Sequence[Case], outcomes: dict[Case, list[Outcome]]) -> list[Row]:
    def percent(case: Case) -> list[float]:
        return [100 * outcome.accuracy for outcome in outcomes[case]]

    alone = statistics.mean(percent(table[0]))
    bars: dict[str | None, tuple[float | None, Literal["at least", "below"]]] = {
        None: (None, "at least"),
        "learns": (alone - 1, "at least"), "fails": (200 * CHANCE, "below"),
    }  # fmt: skip
    rows = []
    for case in table:
        accuracies, runs = percent(case), outcomes[case]
        bar, wanted = bars[case.expected]
        diverged = sum(run.diverged for run in runs)
        stale = f"{statistics.mean(run.staleness for run in runs):.1f} / {max(r.stalest for r in runs):.0f}"
        more = {
            "lowest – highest": f"{min(accuracies):.1f} – {max(accuracies):.1f}",
            "staleness mean / max": "?" if diverged else stale,
            "not finite": f"{diverged} of {len(runs)}",
        }
        theirs = None if case is table[0] else alone
        rows.append(
            Row(case.what, statistics.mean(accuracies), "%", theirs, bar=bar, wanted=wanted, more=more)
        )
    return rows


def _share(here: Together, jobs: list[tuple[Case, int]]) -> list[tuple[Case, Outcome]]:
    """This process's share of the runs."""
    return [(case, _train(case, seed)) for case, seed in jobs[here.rank :: here.count]]


def _train(case: Case, seed: int) -> Outcome:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr
    from polyrhythm.data import digits

    train_set, test_set = digits()
    images, labels = test_set.tensors

    def main() -> None:
        session = pr.init()
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=case.momentum)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [DECAY])
        loader = DataLoader(train_set, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(case.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step()
        # All say it; the last to do so is the last to finish, and what it says stays.
        with torch.no_grad():
            right = session.consensus()(images).argmax(1) == labels
        session.log(accuracy=right.float().mean().item())

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(CLUSTER)
        try:
            summary = pr.simulate(
                main, workers=case.workers, strategy=case.strategy, cluster=cluster, seed=seed, threads=1
            )
        except pr.PolyrhythmError as error:
            if "not finite" not in str(error):
                raise
            return Outcome(CHANCE, diverged=True)
    staleness = summary["staleness"]
    return Outcome(summary["metrics"]["accuracy"], staleness["mean"], staleness["max"])
