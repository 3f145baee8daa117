"""What benchmarks may claim."""

from __future__ import annotations

import json
from math import nan

from benchmarks import sites
from benchmarks.report import Row


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
