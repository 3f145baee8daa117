"""The speed-up that `polyrhythm plan` predicts for two stages, beside the measured one.

The prediction is made in a process of its own, before and after the run whose stages are cut where it says;
the run measures two stages against one process by turns, as `python -m benchmarks pipeline` does.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.divided import Speeds, by_turns
from benchmarks.pipeline import MICRO_BATCHES, NAMES, build
from benchmarks.processes import apart
from benchmarks.report import Row, ratio


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 3 if quick else 9
    rows = []
    for name in NAMES:
        predictions = [apart(_predict, name)]
        strategy = predictions[0][1].removeprefix("allreduce@")
        speeds: Speeds = apart(by_turns, partial(build, name), strategy, rounds, 1)
        predictions.append(apart(_predict, name))
        predicted = statistics.mean(speedup for speedup, _ in predictions)
        measured = ratio(speeds["divided"], speeds["alone"])
        both = " and ".join(f"{speedup:.2f}×" for speedup, _ in predictions)
        rows.append(
            Row(
                f"{name}: predicted speed-up of 2 stages, against the measured one",
                predicted, "×", measured, predicted / measured,
                more={"predictions": both, "strategy": strategy},
            )
        )  # fmt: skip
    return rows, [
        f"{MICRO_BATCHES} micro-batches, one thread for each process; the prediction counts forward and "
        "backward passes, the measurement a step of SGD besides"
    ]


def _predict(name: str) -> tuple[float, str]:
    """The expected speed-up, and the strategy that `plan` prints."""
    from polyrhythm.lab.plan import Wanted, plan_model

    model, inputs, _ = build(name)
    plan = plan_model(model, (inputs, {}), Wanted(2, MICRO_BATCHES)).plan
    return plan.speedup, plan.strategy
