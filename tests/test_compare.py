"""`python -m benchmarks compare`: the verdict on given numbers, and work trees that are always removed.

The repository here is a small one, with the real `benchmarks/key.py` and a benchmark that takes no time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare, key, revisions

BENCHMARK = """\
import os
import signal
import subprocess
import sys
from pathlib import Path

from polyrhythm.{} import RATE


def event_rates(pings, repeats):
    where = "import polyrhythm; print(polyrhythm.__file__)"  # in a process that is started elsewhere
    found = subprocess.run([sys.executable, "-c", where], cwd="/", stdout=-1, text=True, check=True).stdout
    turns = Path(os.environ["TURNS"])
    with turns.open("a") as file:
        file.write(Path(found).parent.parent.name + "\\n")
    if turns.read_text().count("\\n") == int(os.environ.get("INTERRUPT", 0)):
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
    return {{"pings": RATE}}
"""
SIMULATOR = "simulator, events per CPU second: pings"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its first commit has a package only, its second benchmarks too, and its work tree another layout."""
    root = tmp_path / "repository"
    (root / "polyrhythm").mkdir(parents=True)
    (root / "polyrhythm" / "__init__.py").touch()
    write(root, "old", 100.0)
    git(root, "init", "--quiet")
    commit(root)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "__init__.py").touch()
    shutil.copy(key.__file__, root / "benchmarks")
    (root / "benchmarks" / "simulator.py").write_text(BENCHMARK.format("old"))
    commit(root)
    (root / "polyrhythm" / "old.py").unlink()
    write(root, "new", 50.0)
    (root / "benchmarks" / "simulator.py").write_text(BENCHMARK.format("new"))
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    return root


def write(root: Path, module: str, rate: float) -> None:
    (root / "polyrhythm" / f"{module}.py").write_text(f"RATE = {rate}\n")


def git(root: Path, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=root, env=clean, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "A revision")


def left_behind(root: Path) -> list[str]:
    """Work trees besides the repository itself."""
    return git(root, "worktree", "list").splitlines()[1:]


def run(root: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    file = root.parent / "compare.json"
    status = compare.main([*arguments, "--json", str(file)], root)
    return status, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize(
    ("better", "before", "after", "verdict"),
    [
        ("higher", [10.0, 10.5, 10.2], [5.0, 5.2, 5.1], "worse"),
        ("lower", [10.0, 10.5, 10.2], [5.0, 5.2, 5.1], "better"),
        ("lower", [5.0, 5.2, 5.1], [10.0, 10.5, 10.2], "worse"),
        ("higher", [5.0, 5.2, 5.1], [10.0, 10.5, 10.2], "better"),
        ("higher", [10.0, 6.0, 10.2], [7.0, 8.0, 7.5], compare.WITHIN),  # one round before was as bad
        ("higher", [10.0, 12.0, 14.0], [9.9, 9.8, 9.9], compare.WITHIN),  # apart, but by less than the noise
        ("higher", [2.0, 4.0, 3.9], [1.0, 1.9, 1.1], "worse"),  # the noise is 82 %, but it fell to 28 %
        ("lower", [8.00, 8.01, 8.00], [8.10, 8.11, 8.10], compare.WITHIN),  # apart, but by 1 %
        ("lower", [8.0], [16.0], None),  # who knows
        ("lower", [8.0, 8.0], [], None),
    ],
)
def test_a_change_counts_if_it_is_larger_than_the_noise(
    better: str, before: list[float], after: list[float], verdict: str | None
) -> None:
    figure = compare.Figure("x", "what", "×", better, dict(enumerate(before)), dict(enumerate(after)))
    assert figure.verdict == verdict


def test_the_ratio_is_taken_of_rounds_that_have_both() -> None:
    figure = compare.Figure("x", "what", "×", "higher", {0: 1.0, 1: 10.0, 2: 2.0}, {1: 20.0, 2: 6.0, 3: 99.0})
    assert figure.ratio == 2.5
    assert figure.noise == pytest.approx(93 / 20)
    assert compare.Figure("x", "what", "×", "higher", {0: 1.0}, {1: 2.0}).ratio is None


@pytest.mark.parametrize(("steal", "others", "busy"), [(0.0, 0.1, False), (0.0, 0.4, True), (0.3, 0.0, True)])
def test_a_busy_machine_is_told(steal: float, others: float, busy: bool) -> None:
    comparison = compare.Comparison(["ddp"])
    for number in range(2):
        for side in compare.SIDES:
            figure = {"what": "speed", "value": 1.0, "unit": "×", "better": "higher"}
            comparison.add("ddp", side, number, revisions.Measured([figure], steal=steal, others=others))
    assert any("the machine was busy" in note for note in comparison.notes()) == busy
    assert comparison.show().splitlines()[-1].split()[-2:] == [f"{steal:.1%}", f"{others:.1%}"]


def test_two_layouts_in_turn(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each revision runs its own code, and what one of them cannot measure costs nothing else."""
    (repository / "benchmarks" / "memory.py").write_text(
        "STRATEGIES = QUICK = ()\nclass P: training, most = 3.0, 4.0\n"
        "def megabytes(width): return '1 MB'\ndef peaks(strategies, width): return {'x': P()}\n"
    )
    status, written = run(repository, "HEAD", "--only", "simulator", "memory", "--rounds", "2")
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith(SIMULATOR))
    assert line.split()[6:12] == ["100/s", "50/s", "0.500", "higher", "0%", "worse"]
    (line,) = (line for line in out.splitlines() if line.startswith("peak memory") and "training" in line)
    assert line.split("while training")[1].split()[:5] == ["–", "3×", "–", "lower", "–"]
    assert f"worse by more than the noise: {SIMULATOR}" in out
    assert "– before, memory: ImportError: cannot import name 'memory'" in out
    assert (tmp_path / "turns").read_text().split() == ["before", "repository", "repository", "before"]
    assert status == 1 and [error["side"] for error in written["errors"]] == ["before"]
    assert written["after"]["uncommitted"] is True
    assert left_behind(repository) == []


def test_a_revision_without_key_figures_is_measured_with_the_present_ones(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "old", 25.0)
    (repository / "benchmarks" / "simulator.py").write_text(BENCHMARK.format("old"))
    status, written = run(repository, "HEAD~1", "--only", "simulator", "--rounds", "1")
    assert status == 0 and "the present benchmarks measure it" in capsys.readouterr().err
    (figure,) = written["figures"]
    assert (figure["before"], figure["after"], figure["verdict"]) == ([100.0], [25.0], None)


def test_a_wrong_revision_is_answered_in_one_line(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(repository, "no-such-branch")[0] == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "no commit 'no-such-branch'" in error


def test_code_from_elsewhere_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure of the wrong package would be worse than none."""
    (repository / "polyrhythm" / "__init__.py").write_text("__file__ = '/elsewhere/polyrhythm/__init__.py'\n")
    assert run(repository, "HEAD", "--only", "simulator")[0] == 2
    assert "but Python imports /elsewhere/polyrhythm" in capsys.readouterr().err
    assert left_behind(repository) == []


def test_the_work_tree_is_removed_after_a_failure(repository: Path) -> None:
    commit_of = revisions.resolve(repository, "HEAD")
    with pytest.raises(ZeroDivisionError), revisions.checkout(repository, commit_of) as tree:
        assert (tree / "polyrhythm" / "old.py").exists() and len(left_behind(repository)) == 1
        (tree / "new").touch()  # a work tree with files of its own must go too
        raise ZeroDivisionError
    assert left_behind(repository) == [] and not tree.parent.exists()


def test_an_interrupt_shows_what_was_measured(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INTERRUPT", "4")
    status, written = run(repository, "HEAD", "--only", "simulator")
    assert status == 130 and written["interrupted"]
    (figure,) = written["figures"]
    assert (figure["before"], figure["after"]) == ([100.0], [50.0, 50.0])
    assert SIMULATOR in capsys.readouterr().out
    assert left_behind(repository) == []


def test_a_benchmark_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lines that old and new revisions must go on to write."""

    def fail(quick: bool) -> list[key.Figure]:
        raise RuntimeError("process 0 of the benchmark failed:\nTraceback\n  ...\nKeyError: 'x'")

    good = key.Figure("speed", 2.0, "×", "higher")
    monkeypatch.setattr(key, "MEASURES", {"bad": fail, "good": lambda quick: [good]})
    with (tmp_path / "lines").open("w") as file:
        assert key._measure(["bad", "good"], True, file)
    package, bad, fine = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert Path(package["package"]).name == "__init__.py"
    assert bad == {"name": "bad", "error": "KeyError: 'x'"}
    assert fine == {"name": "good", "what": "speed", "value": 2.0, "unit": "×", "better": "higher"}
