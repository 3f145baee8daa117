"""The golden file: every digest in it is still what the library computes (docs/testing.md)."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from polyrhythm.core.strategy import Strategy
from polyrhythm.strategies.local_sgd import LocalSGD
from tests.golden import checks
from tests.golden.__main__ import RULE, main
from tests.golden.cases import cases, chosen
from tests.golden.checks import Golden
from tests.support.combine import few


def fails(wrong: checks.Differences, golden: Golden, found: Golden) -> None:
    if wrong:
        pytest.fail(f"{checks.report(wrong, golden, found)}\n{RULE}", pytrace=False)


@pytest.mark.slow
@pytest.mark.timeout(600)  # all cases of a seed in one process
@few("seed", sorted({case.seed for case in cases()}), quick=1)
def test_simulated_runs_are_as_the_golden_file_says(seed: int) -> None:
    """Parameters, loss, steps, samples, bytes, virtual time and events of every simulated case."""
    simulated = [case for case in chosen(world="simulated") if case.seed == seed]
    golden, found = Golden.load(), checks.run(simulated)
    fails(checks.differences(golden, found), golden, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_runs_are_as_the_golden_file_says() -> None:
    """Each lockstep strategy on real processes."""
    golden, found = Golden.load(), checks.run(chosen(world="real"))
    fails(checks.differences(golden, found), golden, found)


def test_the_file_holds_every_case_and_no_other() -> None:
    """A new strategy or codec without a line is an error that says how to add one."""
    golden = Golden.load()
    missing = {case.name: {} for case in cases() if case.name not in golden.cases}
    wrong = checks.differences(golden, Golden(golden.versions, missing))
    fails(wrong | checks.obsolete(golden, cases()), golden, golden)
    assert checks.FILE.read_text() == golden.text()


def test_the_simulator_tells_the_truth_of_real_runs() -> None:
    """On one host real processes have the bits, steps, samples and bytes of the simulation."""
    golden = Golden.load()
    fails(checks.contradictions(golden, cases()), golden, golden)
    assert any(case.world == "real" for case in cases())


def test_cases_are_about_what_they_say() -> None:
    """Two workers die and one returns in each schedule with failures; another seed gives other parameters."""
    golden = Golden.load().cases
    for case in cases():
        line = golden[case.name]
        if case.failures:
            assert (line["lost"], line["joined"]) == (2, 1), case
        if case.seed == 2:
            assert line["parameters"] != golden[replace(case, seed=1).name]["parameters"], case


def test_a_new_strategy_needs_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the registry, and the message has the command that adds its line."""
    monkeypatch.setitem(Strategy.registry, "newcomer", LocalSGD)
    golden, name = Golden.load(), "newcomer seed=1"
    assert name in {case.name for case in cases()}
    wrong = checks.differences(golden, Golden(golden.versions, {name: {}}))
    assert f"python -m tests.golden renew --only '{name}'" in wrong[name][0]


def test_differences_name_the_old_and_the_new_value() -> None:
    """Also an error, and versions other than those that made the file."""
    golden = Golden.load()
    found = copy.deepcopy(golden)
    assert checks.differences(golden, found) == {}
    found.versions["torch"] = "9.9"
    found.cases["async seed=1"]["bytes"] = -1
    found.cases["sync seed=2"] = {"error": "ValueError: no"}
    wrong = checks.differences(golden, found)
    assert wrong == {
        "async seed=1": [f"bytes      {golden.cases['async seed=1']['bytes']} -> -1"],
        "sync seed=2": ["failed: ValueError: no"],
    }
    assert f"torch {golden.versions['torch']} (here 9.9)" in checks.report(wrong, golden, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check notices a digest that is wrong in the file, and renewing one case restores the file."""
    name, before = "allreduce seed=1", checks.FILE.read_text()
    monkeypatch.setattr(checks, "FILE", tmp_path / "digests.json")
    checks.FILE.write_text(before)
    wrong = Golden.load()
    right, wrong.cases[name]["parameters"] = wrong.cases[name]["parameters"], "0" * 16
    checks.FILE.write_text(wrong.text())
    assert main(["check", "--only", name]) == 1
    told = capsys.readouterr().out
    assert f"{name}\n    parameters {'0' * 16} -> {right}\n1 of 1 cases differ" in told
    assert main(["renew", "--only", name]) == 0
    assert f"parameters {'0' * 16} -> {right}" in capsys.readouterr().out
    assert checks.FILE.read_text() == before
    assert main(["check", "--only", name]) == 0
