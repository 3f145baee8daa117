"""What benchmarks may claim."""

from __future__ import annotations

import json
import os
from math import nan
from pathlib import Path

import pytest

from benchmarks import collectives, hosts, memory, ring, server, sites
from benchmarks.report import Row
from polyrhythm.wire import Arenas


def test_benchmark_bar_is_not_met_if_a_run_missed_its_target() -> None:
    """However little time it spent: there is no time to compare."""
    case = sites.Case("allreduce / diloco:20", barred=True)
    there, short = sites.Outcome(1000.0, 800, 1e9, True), sites.Outcome(1.0, 20, 1e3, False)
    quick = sites.Outcome(1.0, 20, 1e3, True)
    assert [row.met for row in sites._rows(case, [quick, quick], [there, there])] == [True, True]
    assert [row.met for row in sites._rows(case, [quick, short], [there, there])] == [False, False]
    assert [row.met for row in sites._rows(case, [quick, quick], [there, short])] == [False, False]


def test_nan_benchmark_figures_are_null_in_json() -> None:
    text = json.dumps(Row("never", nan, "s", ratio=nan, bar=1.0).plain(), allow_nan=False)
    assert json.loads(text)["ours"] is None and json.loads(text)["met"] is False


def test_memory_benchmark_counts_a_page_once_at_its_owner() -> None:
    """The arena of a node counts what all processes have written; anonymous memory counts from the start."""
    size = 8 << 20
    written = bytes([1]) * size  # allocated before anything is counted: malloc may keep what is freed
    arenas = Arenas(2, 1 << 30)
    mine, other = (memory._Process(os.getpid(), arena=arenas.file(index)) for index in range(2))
    before = mine.nbytes()[0], other.nbytes()[0]
    for index in range(2):  # this process writes to both
        arenas.view(index)[:size] = written
    arenas.clear(1)
    after = mine.nbytes()[0], other.nbytes()[0]
    assert after[0] - before[0] >= size > after[1] - before[1]
    for each in (mine, other, arenas):
        each.close()


def test_memory_benchmark_samples_each_phase_of_workers_and_servers(tmp_path: Path) -> None:
    samples = memory._samples(tmp_path, os.getpid())
    assert next(samples)[0] == "training"
    (tmp_path / "consensus-1").touch()
    phase, workers, servers, resident = next(samples)
    assert (phase, servers) == ("consensus", 0) and resident > workers
    for name in ("after-0", "end-1", "over"):
        (tmp_path / name).touch()
    assert [each[0] for each in samples] == ["end"]


def test_memory_benchmark_bars_hold_for_the_highest_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(strategies: tuple[str, ...], width: int, momentum: float) -> dict[str, memory.Peak]:
        return dict.fromkeys(strategies, memory.Peak(2.0, 3.5 + momentum, 3.0, 1.0, 9.0))

    monkeypatch.setattr(memory, "peaks", peaks)
    rows, _ = memory.measure(quick=False)
    met = {row.what: row.met for row in rows}
    assert not met["async, SGD"] and met["local:8, SGD"] and len(met) == 2 * len(memory.STRATEGIES)
    assert not met["allreduce, SGD with momentum"] and met["adpsgd, SGD with momentum"]
    assert memory.BARS.keys() >= set(memory.QUICK)


@pytest.mark.slow
def test_benchmark_of_server_round_trips_runs() -> None:
    """Its nodes meet without a launcher, so a change of how nodes meet breaks it first."""
    rows = server.round_trips(1, (1,), rounds=1, work=2)
    assert any("shared memory" in row.what for row in rows) and all(row.ours > 0 for row in rows)


@pytest.mark.slow
def test_benchmarks_of_the_ring_and_of_shared_memory_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "why_not", lambda rate="": "on loopback, as without root")
    times = ring.between(2, (ring.SMALL,), 1)
    assert len(times) > 1 and all(seconds > 0 for each in times.values() for seconds in each)
    assert all(row.ours > 0 for row in collectives.one_host(2, (1 << 10,), 1))
