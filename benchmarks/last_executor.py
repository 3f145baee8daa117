"""The last executor: how long a round of N workers takes whose steps take exponential times, beside H_N.

All wait for the slowest: with N step times of mean 1 a round of `allreduce` takes H_N = 1 + 1/2 + ... + 1/N
on average, 4.74 for 64 workers, though none is slower than the others as a rule. `local:H` waits once in H
steps, and luck evens out: of N sums of H steps the largest is nearer to the mean. The network is free here,
so that only waiting is measured, and time is virtual: the figures are the same on every machine. Unless it is
quick it also draws docs/last-executor.svg.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import DRAWN, Row

WORKERS = (1, 2, 4, 8, 16, 32, 64)
PERIODS = (1, 8)  # steps between two meetings; 1 is `allreduce`
STEPS = 600  # of each worker
STEP = 0.010  # the mean time of a step, in seconds
CLUSTER = '[[hosts]]\nstep_time = { exponential = "10 ms" }\n'
PLOT = Path(__file__).parents[1] / "docs" / "last-executor.svg"


@dataclass(frozen=True)
class Law:
    """The largest of N sums of H exponential times of mean 1, divided by H: its mean and its deviation."""

    mean: float
    deviation: float

    @staticmethod
    def of(workers: int, period: int = 1) -> Law:
        """E[max] is the integral of 1 - F^N, and E[max^2] that of 2x (1 - F^N), with F of Gamma(H, 1)."""
        import numpy as np

        x = np.linspace(0.0, period + 12 * math.sqrt(period) + 60.0, 200_001)
        term = np.exp(-x)
        tail = term.copy()
        for k in range(1, period):
            term *= x / k
            tail += term
        late = -np.expm1(workers * np.log1p(-np.minimum(tail, 1 - 2**-53)))
        mean = _integral(late, x)
        square = _integral(2 * x * late, x)
        return Law(mean / period, math.sqrt(square - mean**2) / period)


def _integral(values: Any, x: Any) -> float:
    """By trapezoids; NumPy's own has another name before version 2."""
    return float(((values[1:] + values[:-1]) / 2 * (x[1:] - x[:-1])).sum())


def harmonic(count: int) -> float:
    return math.fsum(1 / k for k in range(1, count + 1))


def strategy(period: int) -> str:
    return "allreduce" if period == 1 else f"local:{period}"


def pace(workers: int, period: int, rounds: int, seed: int = 0) -> float:
    """The time of a step in a simulated run, waits included, divided by the mean time of a step alone."""
    import torch

    import polyrhythm as pr

    def main() -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1, bias=False)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(rounds * period):
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(CLUSTER)
        summary = pr.simulate(
            main, workers=workers, strategy=strategy(period), cluster=cluster, seed=seed, threads=1
        )
    return float(summary["wall_s"]) / (rounds * period * STEP)


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    steps = STEPS // 5 if quick else STEPS
    rows = []
    found: dict[int, list[float]] = {}
    for period in PERIODS:
        rounds = steps // period
        for workers in WORKERS:
            law = Law.of(workers, period)
            value = pace(workers, period, rounds)
            found.setdefault(period, []).append(value)
            away = (value - law.mean) / (law.deviation / math.sqrt(rounds))
            who = f"{workers} worker{'s' * (workers > 1)}"
            rows.append(
                Row(
                    f"{strategy(period)}, {who}: a step and its wait", value, "steps",
                    theirs=law.mean, ratio=value / law.mean, more={"off by deviations": f"{away:+.1f}"},
                )
            )  # fmt: skip
    notes = [
        "theirs: the law, H_N for allreduce and the mean of the largest of N sums of 8, divided by 8, for "
        f"local:8; {steps} steps of each worker",
        "a rank has the same step times in every row, so that errors are alike",
    ]
    if not quick:
        draw(found, steps, PLOT)
        notes.append(f"drawn: {PLOT.relative_to(PLOT.parents[1])}")
    return rows, notes


def draw(found: dict[int, list[float]], steps: int, path: Path) -> None:
    """Dots with two standard errors for what was measured, lines for the laws; no date: the same bytes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colours = dict(zip(found, ("#c2410c", "#1d4ed8", "#15803d"), strict=False))
    with matplotlib.rc_context(DRAWN):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
        for period, values in found.items():
            name = "1 + 1/2 + … + 1/N"
            if period > 1:
                name = f"largest of N sums of {period} steps, over {period}"
            curve = [Law.of(n, period).mean for n in range(1, WORKERS[-1] + 1)]
            axes.plot(range(1, len(curve) + 1), curve, color=colours[period], linewidth=1.5, label=name)
            rounds = steps // period
            errors = [2 * Law.of(n, period).deviation / math.sqrt(rounds) for n in WORKERS]
            axes.errorbar(
                WORKERS, values, errors, fmt="o", color=colours[period], markersize=5, elinewidth=1,
                capsize=3, label=f"{strategy(period)}, simulated",
            )  # fmt: skip
        axes.axhline(1.0, color="#737373", linewidth=1, linestyle=":")
        axes.annotate("nobody waits", (WORKERS[-1], 1.0), (0, -14), textcoords="offset points", ha="right")
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORKERS, [str(workers) for workers in WORKERS])
        axes.set_ylim(0, None)
        axes.set_xlabel("workers N")
        axes.set_ylabel("time of a step with its waits,\nin mean steps")
        axes.set_title("The last executor: steps take exponential times", loc="left", fontsize=12)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left")
        figure.tight_layout()
        extra = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=extra, dpi=110)
        pyplot.close(figure)
