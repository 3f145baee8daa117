"""`polyrhythm bench servers`: what it prints, what it refuses, and the formula beside what is measured."""

from __future__ import annotations

import json
import re

import pytest

from polyrhythm.cli.entry import main
from polyrhythm.lab.servers import ServerSweep, formula, knee

TINY = ["bench", "servers", "--size", "64KiB", "--workers", "1,2", "--servers", "1,2", "--seconds", "0.2"]
DEFAULTS = {"size": "16MiB", "workers": "1,2,4", "servers": "1,2,4", "step_time": "50ms"}


@pytest.mark.slow
def test_bench_servers_json_reports_every_cell_and_knee(capfd: pytest.CaptureFixture[str]) -> None:
    """One object with every cell, the knees and what they come from; progress is on standard error."""
    assert main([*TINY, "--step-time", "5ms", "--json"]) == 0
    out, error = capfd.readouterr()
    assert out.count("\n") == 1
    report = json.loads(out)
    assert (report["bytes"], report["step_time_s"], report["seconds"]) == (65536, 0.005, 0.2)
    assert report["beta_bytes_per_s"] > 0
    pairs = [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [(cell["workers"], cell["servers"]) for cell in report["cells"]] == pairs
    for cell in report["cells"]:
        assert cell["bytes_per_s"] == cell["round_trips_per_s"] * 65536
        assert cell["share"] == pytest.approx(cell["round_trips_per_s"] * 0.005 / cell["workers"])
        assert 0 < cell["share"] < 1  # a worker sleeps at least its step time, whatever else it does
    for each in report["knees"]:
        assert each["knee"] in (1, 2)
        assert each["formula"] == formula(each["workers"], 65536, report["beta_bytes_per_s"], 0.005)
    assert [line.partition(":")[0] for line in error.splitlines()] == [f"{n} of 5" for n in range(1, 6)]


def test_bench_servers_prints_a_table_with_knee_and_formula(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A row for each number of workers with its knee and its P*, under the numbers of servers."""
    cells = [
        {"workers": n, "servers": p, "round_trips_per_s": 10.0 * n * p, "share": 0.5}
        for n in (1, 4)
        for p in (1, 2)
    ]  # fmt: skip
    knees = [{"workers": 1, "knee": 1, "formula": 1}, {"workers": 4, "knee": 2, "formula": 3}]
    report = {
        "bytes": 10**6, "step_time_s": 0.05, "seconds": 2.0, "cores": 2, "beta_bytes_per_s": 3e7,
        "cells": cells, "knees": knees,
    }  # fmt: skip
    monkeypatch.setattr("polyrhythm.lab.servers.measure", lambda plan, say: report)
    assert main(TINY) == 0
    text = capfd.readouterr().out
    assert text.startswith("1.0 MB of parameters over shared memory; 2 cores for all processes.")
    assert "receives 30.0 MB/s." in text
    assert "sleeps 50 ms" in text
    assert re.search(r"^workers +1 server +2 servers +knee +P\*$", text, re.MULTILINE)
    row = r"^ +4  40\.0/s  40\.0 MB/s   50%  80\.0/s  80\.0 MB/s   50%     2   3$"
    assert re.search(row, text, re.MULTILINE)


@pytest.mark.parametrize(
    ("workers", "nbytes", "beta", "step_time", "servers"),
    [
        (4, 100, 400.0, 1.0, 1),  # one server is busy all the time, and just enough
        (5, 100, 400.0, 1.0, 2),
        (8, 100, 400.0, 0.5, 4),
        (8, 100, 400.0, 0.25, 8),  # a push takes a worker's whole step: as many servers as workers
        (1, 1, 1e12, 1.0, 1),
    ],
)
def test_server_count_formula_matches_hand_computed_values(
    workers: int, nbytes: int, beta: float, step_time: float, servers: int
) -> None:
    """P* = ceil(N |w| / (beta t)), and never none."""
    assert formula(workers, nbytes, beta, step_time) == servers


def test_the_knee_is_the_fewest_that_come_close() -> None:
    assert knee({1: 50.0, 2: 89.0, 4: 91.0, 8: 100.0}) == 4
    assert knee({1: 90.0, 2: 100.0, 4: 60.0}) == 1
    assert knee({3: 1.0}) == 3


def test_server_sweep_parses_sizes_lists_and_times() -> None:
    """Sizes in both systems of units, numbers in any order and once each."""
    given = DEFAULTS | {"size": "4MB", "workers": "4,1, 2,4", "step_time": "0.5 s"}
    sweep = ServerSweep.parse(**given, seconds=1.0)
    assert (sweep.nbytes, sweep.workers, sweep.step_time) == (4_000_000, (1, 2, 4), 0.5)
    assert ServerSweep.parse(**DEFAULTS, seconds=2.0) == ServerSweep()


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--size", "x", "--size x: must be a text with a number and a unit; use B, kB, "),
        ("--size", "4", "--size 4: no unit; use B, kB, "),
        ("--size", "0MB", "--size 0MB: must be above 0"),
        ("--workers", "0", "--workers 0: must be whole numbers above 0 separated by commas, such as 1,2,4"),
        ("--workers", "1,,2", "--workers 1,,2: must be whole"),
        ("--workers", "2000", "processes are more than 1024"),
        ("--servers", "two", "--servers two: must be whole"),
        ("--size", "4B", "--size 4B: 2 servers need at least as many parameters, of 4 bytes each"),
        ("--step-time", "0ms", "--step-time 0ms: must be above 0"),
        ("--step-time", "5", "--step-time 5: no unit; use ns, us, ms or s"),
        ("--seconds", "0", "--seconds 0: must be above 0"),
        ("--seconds", "nan", "--seconds nan: must be above 0"),
        ("--seconds", "long", "--seconds: invalid float value: 'long'"),
    ],
)
def test_bench_servers_refuses_invalid_options_in_one_line(
    option: str, value: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2, before anything starts."""
    try:
        code = main([*TINY, option, value])
    except SystemExit as end:
        code = int(str(end.code))
    out, error = capfd.readouterr()
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("polyrhythm")
    assert line in error
