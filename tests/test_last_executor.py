"""The last executor: a wait for all workers is a wait for the slowest, and its length follows a law."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.last_executor import Law, draw, harmonic, pace
from tests.support.combine import few
from tests.support.programs import SPEEDS, Steps, events


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 16, 64, 100])
def test_law_of_the_maximum_of_n_exponentials_matches_theory(workers: int) -> None:
    """Its mean is H_N, and its variance 1 + 1/4 + ... + 1/N^2."""
    law = Law.of(workers)
    assert law.mean == pytest.approx(harmonic(workers), abs=1e-6)
    variance = math.fsum(1 / k**2 for k in range(1, workers + 1))
    assert law.deviation == pytest.approx(math.sqrt(variance), abs=1e-6)


@pytest.mark.parametrize(("workers", "figure"), [(8, 2.718), (16, 3.381), (64, 4.744)])
def test_harmonic_numbers_match_known_values(workers: int, figure: float) -> None:
    assert harmonic(workers) == pytest.approx(figure, abs=5e-4)


@pytest.mark.parametrize(("workers", "period"), [(1, 8), (2, 3), (8, 8), (32, 4)])
def test_law_of_the_maximum_of_n_sums_matches_monte_carlo(workers: int, period: int) -> None:
    """The integral is what a Monte Carlo of its own finds; one worker has mean 1 and variance 1/H."""
    law, count, stream = Law.of(workers, period), 20_000, random.Random(0)
    draws = [max(stream.gammavariate(period, 1) for _ in range(workers)) / period for _ in range(count)]
    mean = math.fsum(draws) / count
    deviation = math.sqrt(math.fsum((draw - mean) ** 2 for draw in draws) / count)
    assert law.mean == pytest.approx(mean, abs=3 * law.deviation / math.sqrt(count))
    assert law.deviation == pytest.approx(deviation, rel=0.03)
    if workers == 1:
        assert (law.mean, law.deviation) == pytest.approx((1, period**-0.5), abs=1e-6)


@few("workers", [1, 2, 4, 8, 16, 64], quick=3)
def test_a_round_of_all_takes_the_harmonic_number(workers: int) -> None:
    """The mean time of a round of `allreduce`, in mean steps, is H_N within three standard errors."""
    rounds = 300 if workers == 64 else 600
    error = math.sqrt(math.fsum(1 / k**2 for k in range(1, workers + 1)) / rounds)
    assert pace(workers, 1, rounds) == pytest.approx(harmonic(workers), abs=3 * error)


@few("workers, period", [(1, 8), (4, 8), (8, 2), (16, 4), (32, 8)], quick=3)
def test_local_sgd_step_time_matches_the_law_of_maximum_sums(workers: int, period: int) -> None:
    """With `local:H` a step and its wait take the mean of the largest of N sums of H, divided by H."""
    rounds = 60
    law = Law.of(workers, period)
    assert pace(workers, period, rounds) == pytest.approx(law.mean, abs=3 * law.deviation / math.sqrt(rounds))
    assert law.mean < harmonic(workers) or workers == 1


def test_longer_periods_never_make_simulated_runs_slower(simulate: Any) -> None:
    """With the same step times fewer meetings are never later, and a meeting in each step is `allreduce`."""
    times = [pace(6, period, 48 // period, seed=3) for period in (1, 2, 4, 8, 16, 48)]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    one, other = (
        simulate(Steps(48), each, 6, cluster=SPEEDS["exponential"]) for each in ("allreduce", "local:1")
    )
    assert one["wall_s"] == other["wall_s"]


def test_simulated_round_times_depend_on_the_seed_only() -> None:
    assert pace(4, 1, 20) == pace(4, 1, 20) != pace(4, 1, 20, seed=1)


@pytest.mark.parametrize("strategy", ["allreduce", "local:5"])
def test_a_round_is_as_long_as_its_longest_member(simulate: Any, strategy: str) -> None:
    """Exactly: in the log, each meeting comes when the slowest of its round is there."""
    workers, count, period = 5, 40, 5 if strategy == "local:5" else 1
    summary = simulate(Steps(count), strategy, workers, cluster=SPEEDS["exponential"])
    own: dict[str, list[float]] = {}
    for line in events(summary, "step"):
        own.setdefault(line["node"], []).append(line["compute_s"])
    rounds = [
        max(math.fsum(steps[start : start + period]) for steps in own.values())
        for start in range(0, count, period)
    ]
    assert len(own) == workers and {len(steps) for steps in own.values()} == {count}
    # The log has whole microseconds.
    assert math.fsum(rounds) == pytest.approx(summary["wall_s"], abs=count * 1e-6)
    assert summary["compute_s"] + summary["wait_s"] == pytest.approx(workers * summary["wall_s"], rel=1e-9)


@pytest.mark.slow
def test_the_picture_is_the_same_every_time(tmp_path: Path) -> None:
    """It has no date and no random names in it, so that the file changes only if the figures do."""
    pytest.importorskip("matplotlib")
    found = {1: [1.0, 1.5, 2.1, 2.7, 3.4, 4.1, 4.7], 8: [1.0, 1.2, 1.4, 1.6, 1.7, 1.9, 2.0]}
    for name in ("one.svg", "two.svg"):
        draw(found, 600, tmp_path / name)
    one, two = ((tmp_path / name).read_text() for name in ("one.svg", "two.svg"))
    assert one == two and "<dc:date>" not in one and "allreduce" in one and len(one) < 60_000
