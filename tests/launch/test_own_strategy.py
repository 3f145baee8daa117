"""A strategy and a codec of a user, as the command line starts them: every process here is a real one.

This test process knows the example's classes; the processes that it starts do not, until they run the script
or import a module. `examples/own_strategy.py` is the script, or the module `mine` beside another script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.core.plan import Plan
from tests.support.combine import few

ROOT = Path(__file__).parents[2]
EXAMPLE, TRAIN = ROOT / "examples" / "own_strategy.py", ROOT / "tests" / "scripts" / "train.py"
START = 90.0  # seconds for a run to begin on a busy machine
STRATEGY = "bmuf:4+turns:2"


class Commands:
    """Starts commands, each in a folder of its own, as on hosts of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [str(ROOT)]
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: object, host: str = "a") -> subprocess.Popen[str]:
        place = self.folder / host
        place.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(self.path), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "polyrhythm", *map(str, words)], cwd=place, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=(place / "shown.txt").open("w"),
        )  # fmt: skip
        self._started.append(process)
        return process

    def shown(self, host: str = "a") -> str:
        return (self.folder / host / "shown.txt").read_text()

    def end(self, process: subprocess.Popen[str], host: str = "a") -> str:
        """Waits for success; returns what the command printed."""
        out, _ = process.communicate(timeout=START)
        assert process.returncode == 0, self.shown(host)
        return out

    def summary(self, *words: object) -> dict[str, Any]:
        world, *rest = words
        found: dict[str, Any] = json.loads(self.end(self.start(world, "--json", "-q", *rest)))
        return found

    def refused(self, *words: object) -> str:
        """The line of a command that cannot begin."""
        process = self.start(*words)
        out, _ = process.communicate(timeout=START)
        error = self.shown()
        assert (process.returncode, out, error.count("\n")) == (2, "", 1), error
        return error

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    found = Commands(tmp_path)
    yield found
    found.close()


def copied(source: Path, folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(source, folder / name))


@pytest.mark.slow
def test_a_strategy_and_codec_of_the_script_train_alike_in_both_worlds(commands: Commands) -> None:
    """The command line names them; config.json keeps their class paths."""
    how = (EXAMPLE, "-n", 3, "-s", STRATEGY, "--threads", 1)
    real, virtual = (commands.summary(world, *how, "--", "--epochs", 2) for world in ("run", "simulate"))
    assert real["strategy"] == virtual["strategy"] == STRATEGY
    assert real["digest"] == virtual["digest"] and real["metrics"] == virtual["metrics"]
    assert real["metrics"]["accuracy"] > 0.8
    plan = Plan.read(commands.folder / "a" / real["folder"])
    assert (plan.strategy, plan.classes) == (
        STRATEGY, {"strategy bmuf": "__main__:BlockMomentum", "codec turns": "__main__:Turns"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_script_may_choose_its_own_strategy(commands: Commands) -> None:
    """With an instance of its class, in `pr.init`; the command line wins over it."""
    assert commands.summary("run", EXAMPLE, "--", "--epochs", 1)["strategy"] == "bmuf:4"
    chosen = commands.summary("run", EXAMPLE, "-s", "allreduce+turns:3", "--", "--epochs", 1)
    assert chosen["strategy"] == "allreduce+turns:3"


SERVED = """
import os
from dataclasses import dataclass
import torch
from torch.utils.data import DataLoader
import polyrhythm as pr

@dataclass(frozen=True)
class Eager(type(pr.parse("async"))):
    name = "eager"

session, model = pr.init(), torch.nn.Linear(3, 1)
loader = DataLoader(torch.randn(64, 3), batch_size=2)
model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for step, x in enumerate(loader):
    if session.rank == 1 and step == 3 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_servers_and_replacements_know_the_strategy_of_the_script(commands: Commands) -> None:
    (commands.folder / "a").mkdir()
    (commands.folder / "a" / "served.py").write_text(SERVED)
    summary = commands.summary(
        "run", "served.py", "-s", "eager:weight=1/tau", "--servers", 2, "--restarts", 1
    )
    assert (summary["strategy"], summary["servers"]) == ("eager:weight=1/tau", 2)
    assert summary["replaced"] == {"worker 1": 1} and summary["samples"] >= 64


# --- other hosts ----------------------------------------------------------------------------------------


def train_on_two_hosts(commands: Commands, script: Path, there: Path, *how: object) -> dict[str, Any]:
    """Two workers here and one on a host where the script is elsewhere."""
    key, rest = commands.folder / "run.key", ["--", "--epochs", 1]
    begun = commands.start(
        "run", script, "-n", 3, "--here", 2, "--listen", "127.0.0.1:0", "--key", key, "--json", *how, *rest
    )
    deadline = time.monotonic() + START
    while not (found := re.search(r"polyrhythm join (\S+)", commands.shown())):
        assert begun.poll() is None and time.monotonic() < deadline, commands.shown()
        time.sleep(0.05)
    joined = commands.start("join", found[1], there, "--key", key, *rest, host="b")
    assert "trained" in commands.end(joined, "b")
    summary: dict[str, Any] = json.loads(commands.end(begun))
    return summary


@pytest.mark.slow
def test_another_host_joins_with_its_own_copy_of_the_script(commands: Commands) -> None:
    """Another path there, and no word of the strategy on its command line."""
    there = copied(EXAMPLE, commands.folder / "elsewhere", "train.py")
    summary = train_on_two_hosts(commands, EXAMPLE, there, "-s", STRATEGY, "--collective", "direct")
    expected = commands.summary(
        "simulate", EXAMPLE, "-n", 3, "-s", STRATEGY, "--threads", 1, "--", "--epochs", 1
    )
    assert summary["strategy"] == STRATEGY and summary["metrics"] == expected["metrics"]


@pytest.mark.slow
def test_another_host_imports_the_modules_of_the_run(commands: Commands) -> None:
    """Each host has the module beside its script; the plan says that it is to be imported."""
    scripts = [copied(TRAIN, commands.folder / name, "train.py") for name in ("one", "two")]
    for script in scripts:
        copied(EXAMPLE, script.parent, "mine.py")
    summary = train_on_two_hosts(commands, *scripts, "-s", STRATEGY, "--import", "mine")
    assert summary["strategy"] == STRATEGY
    plan = Plan.read(commands.folder / "a" / summary["folder"])
    assert (plan.imports, plan.classes["codec turns"]) == (("mine",), "mine:Turns")


@pytest.mark.slow
def test_a_host_without_the_strategy_is_named(commands: Commands) -> None:
    """It fails in one line. The run waits for another host, or ends with the reason if it had begun."""
    key = commands.folder / "run.key"
    begun = commands.start(
        "run", EXAMPLE, "-s", STRATEGY, "--here", 1, "--listen", "127.0.0.1:0", "--key", key, "--timeout", 60
    )
    deadline = time.monotonic() + START
    while not (found := re.search(r"polyrhythm join (\S+)", commands.shown())):
        assert begun.poll() is None and time.monotonic() < deadline, commands.shown()
        time.sleep(0.05)
    joined = commands.start("join", found[1], TRAIN, "--key", key, host="b")
    joined.communicate(timeout=START)
    assert joined.returncode == 2
    assert re.search(r"polyrhythm: unknown strategy 'bmuf'.*--import\n$", commands.shown("b"))
    while begun.poll() is None and "has left before the run began" not in commands.shown():
        assert time.monotonic() < deadline, commands.shown()
        time.sleep(0.05)
    if begun.poll() is None:
        begun.terminate()
    begun.communicate(timeout=START)
    ended = r"worker 1 ended \(unknown strategy 'bmuf'.*\) on 127.0.0.1 before training began"
    assert begun.returncode == 130 or re.search(ended, commands.shown())


# --- modules and packages -------------------------------------------------------------------------------


IMPORTING = "import os\nopen('importers.txt', 'a').write(f'{os.getpid()} {os.getppid()}\\n')\n"


@pytest.mark.slow
def test_a_module_is_imported_once_and_not_by_the_launcher(commands: Commands) -> None:
    """It may import torch, which the launcher must not; the nodes are forked from the process that did."""
    script = copied(TRAIN, commands.folder / "a", "train.py")
    (script.parent / "mine.py").write_text(IMPORTING + EXAMPLE.read_text())
    process = commands.start("run", script, "-s", STRATEGY, "--import", "mine", "--json", "-q")
    summary = json.loads(commands.end(process))
    assert summary["strategy"] == STRATEGY
    importers = (script.parent / "importers.txt").read_text().split()
    assert len(importers) == 2 and importers[1] == str(process.pid)


@pytest.mark.slow
def test_a_module_may_be_imported_in_simulation_and_listed(commands: Commands) -> None:
    copied(EXAMPLE, commands.folder / "a", "mine.py")
    how = ("-s", "allreduce+turns", "--import", "mine")
    assert commands.summary("simulate", TRAIN, *how)["strategy"] == "allreduce+turns"
    for kind, name in (("strategies", "bmuf"), ("codecs", "turns")):
        listed = json.loads(commands.end(commands.start(kind, "--import", "mine", "--json")))
        (found,) = (row for row in listed if row["origin"])
        assert (found["name"], found["origin"]) == (name, "mine")
        told = commands.end(commands.start(kind, name, "--import", "mine"))
        assert told.startswith(f"{name}:") and "mine.py" in told


@pytest.fixture
def plugin(commands: Commands) -> Path:
    """An installed package with entry points, as pip leaves it: a folder and its metadata."""
    place = commands.folder / "site"
    copied(EXAMPLE, place, "their_package.py")
    metadata = place / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[polyrhythm.strategies]\nbmuf = their_package:BlockMomentum\n"
        "broken = their_package:Nothing\nbmoof = their_package:BlockMomentum\n"
        "[polyrhythm.codecs]\nturns = their_package:Turns\n"
    )
    commands.path.append(str(place))
    return place


@pytest.mark.usefixtures("plugin")
@pytest.mark.slow
def test_a_strategy_of_an_installed_package_needs_no_import(commands: Commands) -> None:
    for world in ("run", "simulate"):
        summary = commands.summary(world, TRAIN, "-s", STRATEGY)
        assert summary["strategy"] == STRATEGY
        plan = Plan.read(commands.folder / "a" / summary["folder"])
        assert plan.classes["strategy bmuf"] == "their_package:BlockMomentum"


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_strategies_of_installed_packages_are_listed_and_broken_ones_named(commands: Commands) -> None:
    listed = json.loads(commands.end(commands.start("strategies", "--json")))
    assert [row["name"] for row in listed if row["origin"] == "their_package"] == ["bmuf"]
    failed, misnamed = commands.shown().splitlines()
    assert re.match(r"polyrhythm: the plug-in broken = their_package:Nothing of theirs failed: Attr", failed)
    assert re.match(r"polyrhythm: the plug-in bmoof = .* is not a strategy with this name", misnamed)
    assert re.search("plug-in broken = .* failed", commands.refused("run", TRAIN, "-s", "broken"))
    error = commands.refused("run", TRAIN, "-s", "bmuff")
    assert re.search(r"unknown strategy 'bmuff'; did you mean 'bmuf'\? Known: adpsgd, .*bmuf, ", error)


# --- mistakes -------------------------------------------------------------------------------------------


MENTIONS = """
import torch, polyrhythm as pr
print("late" if False else "", end="")  # a text that could have been the name of a class
session = pr.init()
"""


@few("world", ["run", "simulate"], quick=1)
def test_a_name_that_the_script_does_not_define_is_refused_late(commands: Commands, world: str) -> None:
    """It could have been; once `pr.init` is reached it is not, and one line says what is known."""
    (commands.folder / "a").mkdir()
    (commands.folder / "a" / "late.py").write_text(MENTIONS)
    error = commands.refused(world, "late.py", "-s", "late:4")
    assert re.search(r"unknown strategy 'late'.* Known: adpsgd, .* --import \(late\.py, line \d+\)$", error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy", "wrong"),
    [
        ("run", "bmuf:x", "bmuf:x: period takes a whole number, not 'x'"),
        ("simulate", "bmuf+topk:9", r"bmuf\+topk:9: density must be more than 0"),
        ("run", "bmuf+turn", r"bmuf\+turn: unknown codec 'turn'\. Known: bf16"),
        ("simulate", "bmuf:0", "bmuf:0: period must be 1 or more"),
        ("run", "bmuf --servers 2", "uses no servers"),
    ],
)
def test_wrong_values_of_an_own_strategy_are_refused(
    commands: Commands, world: str, strategy: str, wrong: str
) -> None:
    """Those of known classes before anything starts; those of the script's where its classes are known."""
    assert re.search(wrong, commands.refused(world, EXAMPLE, "-s", *strategy.split()))


@pytest.mark.slow
def test_a_missing_module_is_refused_before_anything_starts(commands: Commands) -> None:
    for world in ("run", "simulate"):
        error = commands.refused(world, TRAIN, "-s", "bmuf", "--import", "mine")
        assert "there is no module mine to import" in error
    assert not (commands.folder / "a" / "runs").exists()


@pytest.mark.slow
def test_a_script_that_would_train_is_not_imported_for_a_list(commands: Commands) -> None:
    (commands.folder / "a").mkdir()
    (commands.folder / "a" / "train.py").write_text("import polyrhythm as pr\npr.init()\n")
    process = commands.start("strategies", "train.py")
    process.communicate(timeout=START)
    assert process.returncode == 2 and "would train" in commands.shown()
    told = commands.end(commands.start("strategies", EXAMPLE))
    assert told.startswith("bmuf:PERIOD") and "allreduce" not in told
    assert commands.end(commands.start("strategies", TRAIN)) == f"{TRAIN} defines no strategy\n"
