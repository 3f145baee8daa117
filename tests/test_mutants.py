"""The list of faults (`tests/mutants`) fits the code and the tests, and the tool that plants them works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from polyrhythm.core.registry import describe
from tests import plant
from tests.support.scheduling import COLLECTED

ROOT = Path(__file__).parents[1]
FAULTS = plant.load(ROOT / "tests" / "mutants")


def test_every_fault_can_be_planted() -> None:
    """Its file exists, the old text occurs in it once, and what results is Python."""
    assert plant.unplantable(ROOT, FAULTS) == []
    assert all(fault.file.startswith("polyrhythm/") and fault.tests for fault in FAULTS)
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1


def selections(tests: Iterable[str]) -> set[str]:
    """What these tests can be selected by: themselves, their functions and their files."""
    ids = set(tests)
    return ids | {each.partition("[")[0] for each in ids} | {each.partition("::")[0] for each in ids}


def test_every_named_test_exists(request: pytest.FixtureRequest) -> None:
    """A selection that matches nothing would notice nothing."""
    missing = {test for fault in FAULTS for test in fault.tests} - selections(request.config.stash[COLLECTED])
    if missing:  # as most are when this file is run by itself
        # By file: beside a test that exists pytest does not look for parameters that it never had.
        files = sorted({test.partition("::")[0] for test in missing})
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *files]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        missing -= selections(found.stdout.splitlines())
    assert not missing


@pytest.mark.parametrize("kind", ["strategy", "codec"])
def test_every_update_rule_has_a_fault(kind: str) -> None:
    """A new strategy or codec needs an entry in tests/mutants/strategies.toml or codecs.toml."""
    rules = {fault.rule for fault in FAULTS}
    missing = [row.name for row in describe(kind) if row.name not in rules]
    where = {"strategy": "strategies.toml", "codec": "codecs.toml"}[kind]
    assert not missing, f"add a wrong update rule of {', '.join(missing)} to tests/mutants/{where}"
    assert rules <= {"", *(row.name for each in ("strategy", "codec") for row in describe(each))}


CODE = """
def double(x):
    return 2 * x

def half(x):
    return x / 2
"""
TESTS = """
from package.code import double

def test_double():
    assert double(3) == 6
"""
LIST = """
[[fault]]
name = "doubles to three times as much"
file = "package/code.py"
old = "2 * x"
new = "3 * x"
tests = ["tests/test_code.py::test_double"]
"""
UNNOTICED = """
[[fault]]
name = "half is a third"
file = "package/code.py"
old = "x / 2"
new = "x / 3"
tests = ["tests/test_code.py::test_double"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of its own, its tests and a list of faults."""
    root = tmp_path / "tree"
    (root / "package").mkdir(parents=True)
    (root / "tests" / "mutants").mkdir(parents=True)
    (root / "package" / "code.py").write_text(CODE)
    (root / "tests" / "test_code.py").write_text(TESTS)
    (root / "tests" / "mutants" / "list.toml").write_text(LIST)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return root


def planted(tree: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "tests" / "plant.py"), "--root", str(tree), "--preload", "pytest"]
    environment = os.environ | {"TMPDIR": str(tree.parent)}
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tree, env=environment, timeout=120
    )
    assert not found.stderr and [path.name for path in tree.parent.iterdir()] == ["tree"]
    assert (tree / "package" / "code.py").read_text() == CODE
    return found.returncode, found.stdout.splitlines()


@pytest.mark.slow
def test_a_fault_that_survives_fails(tree: Path) -> None:
    (tree / "tests" / "mutants" / "list.toml").write_text(LIST + UNNOTICED)
    code, lines = planted(tree)
    assert code == 1 and lines[-2].startswith("1 of 2 faults were noticed")
    assert lines[-1].startswith("  SURVIVED: half is a third")
    (noticed,) = (line for line in lines if "doubles to three times as much" in line)
    assert " noticed " in noticed and noticed.endswith("(tests/test_code.py::test_double)")


def test_tests_that_fail_anyway_notice_nothing(tree: Path) -> None:
    (tree / "tests" / "test_code.py").write_text(TESTS.replace("== 6", "== 7"))
    code, lines = planted(tree)
    assert code == 1 and lines[-1] == "these tests fail without a fault: they could notice nothing"


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "2 passed", ("SURVIVED", "")),
        (1, "FAILED tests/a.py::b[c - d] - assert 1", ("noticed", "tests/a.py::b[c")),
        (1, "FAILED tests/a.py::b\n1 failed", ("noticed", "tests/a.py::b")),
        (1, "ERROR tests/a.py::b - leaked", ("noticed", "tests/a.py::b")),
        (
            1,
            "FAILED tests/a.py::b - Failed: Timeout (>60.0s) from pytest-timeout.",
            ("hung", "tests/a.py::b"),
        ),
        (2, "ERROR tests/a.py - ImportError", ("BROKEN", "pytest exit code 2")),
        (4, "ERROR: not found: tests/a.py::b", ("BROKEN", "pytest exit code 4")),
        (5, "no tests ran", ("BROKEN", "pytest exit code 5")),
        (-9, "", ("TOO LONG", "killed after 240 s")),
        (-11, "Fatal Python error", ("crashed", "signal 11")),
    ],
)
def test_what_counts_as_noticed(code: int, output: str, verdict: tuple[str, str]) -> None:
    assert plant.judge(code, output) == verdict
    assert plant.judge(code, output).good == (verdict[0] in ("noticed", "hung", "crashed"))


def test_a_copy_is_restored_to_the_second(tree: Path) -> None:
    """With what numba has compiled of it, which would otherwise be compiled again for every later fault."""
    source, cache = tree / "package" / "code.py", tree / "package" / "__pycache__"
    cache.mkdir()
    (cache / "code.double-2.py311.nbi").write_bytes(b"index")
    before = source.stat().st_mtime_ns
    copy = plant.Copy(tree)
    copy.plant(plant.load(tree / "tests" / "mutants")[0])
    assert "3 * x" in source.read_text()
    (cache / "code.double-2.py311.nbi").write_bytes(b"another")
    (cache / "code.double-2.py311.1.nbc").write_bytes(b"more")
    copy.restore()
    assert source.read_text() == CODE and source.stat().st_mtime_ns == before
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {"code.double-2.py311.nbi": b"index"}
