"""Workers that are killed and replaced, on real processes: the run goes on as if nothing had happened."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.launch.console import Console
from tests.scripts.train import EXAMPLES, Numbered, network
from tests.support.combine import each_value
from tests.support.programs import events, trained

EPOCHS = 2
SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"


def train_and_die(
    folder: Path, kills: dict[int, int], at: str = "step", pause: float = 0.01, count: str = "range"
) -> None:
    """Worker `rank` kills itself `kills[rank]` times, in its third step or as soon as it has started."""
    session = pr.init()
    me = session._context.me
    log = folder / f"lives of {me}"
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    doomed = me.role == "worker" and len(log.read_text().split()) <= kills.get(me.rank, 0)
    if doomed and at == "start" and len(log.read_text().split()) > 1:  # before it, the run would not begin
        os.kill(os.getpid(), signal.SIGKILL)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    steps = 0
    for epoch in session.epochs(EPOCHS) if count == "epochs" else range(EPOCHS):
        for numbers, x, y in loader:
            steps += 1
            if doomed and steps == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with (folder / f"examples {session.rank} {os.getpid()}").open("a") as file:
                file.write(" ".join(f"{loader.epoch}.{number}" for number in numbers.tolist()) + "\n")
            time.sleep(pause)
        session.log(epoch=epoch)


def run_with_kills(
    folder: Path, kills: dict[int, int], restarts: int, workers: int = 2, **more: Any
) -> dict[str, Any]:
    how = {name: more.pop(name) for name in ("at", "pause", "count") if name in more}
    return pr.run(
        partial(train_and_die, folder, kills, **how), workers=workers, strategy=more.pop("strategy", "async"),
        restarts=restarts, runs=folder / "runs", name="run", timeout=30.0,
        console=Console(io.StringIO(), quiet=True), **more,
    )  # fmt: skip


def check_trained(folder: Path) -> None:
    """Every example of every epoch was trained on."""
    words = [word for path in folder.glob("examples *") for word in path.read_text().split()]
    # What a dead worker held at the end of an epoch is handed out in the next.
    assert len(words) >= EPOCHS * EXAMPLES
    assert {word.partition(".")[2] for word in words} == set(map(str, range(EXAMPLES)))


@each_value(("count", ["range", "epochs"]), ("rank", [0, 1]))
def test_a_killed_worker_is_replaced(tmp_path: Path, rank: int, count: str) -> None:
    summary = run_with_kills(tmp_path, {rank: 1}, restarts=2, count=count)
    assert summary["joined"] == 1 and summary["replaced"] == {f"worker {rank}": 1}
    assert summary["lost"] == {f"worker {rank}": "was killed by SIGKILL"}
    assert summary["samples"] >= EPOCHS * EXAMPLES and summary["batches_undone"] == 0
    check_trained(tmp_path)
    network().load_state_dict(trained(summary))
    # It trained on after it had joined, and no longer than the others.
    joined = next(line["t"] for line in events(summary, "joined") if line["node"] == "server 0")
    late = [
        line for line in events(summary, "step") if line["node"] == f"worker {rank}" and line["t"] > joined
    ]
    assert late
    leases = events(summary, "lease")
    assert max(line["epoch"] for line in leases) == EPOCHS - 1
    assert summary["metrics"] == {"epoch": EPOCHS - 1}


def test_a_killed_worker_is_replaced_over_tcp(tmp_path: Path) -> None:
    summary = run_with_kills(tmp_path, {1: 1}, restarts=1, listen="tcp:127.0.0.1:0")
    assert summary["joined"] == 1
    check_trained(tmp_path)


@pytest.mark.slow
def test_the_replacement_of_the_only_worker_resumes_from_the_servers(tmp_path: Path) -> None:
    """The servers wait for the one that comes; its own parameters are theirs, not those it begins with."""
    summary = run_with_kills(tmp_path, {0: 1}, restarts=1, workers=1)
    assert summary["joined"] == 1 and summary["batches_undone"] == 0
    check_trained(tmp_path)
    applied = events(summary, "apply")
    assert [line["version"] for line in applied] == list(range(1, len(applied) + 1))


@pytest.mark.slow
def test_a_worker_out_of_restarts_is_not_replaced(tmp_path: Path) -> None:
    """The others train on without one that died too often; if it was the last, the run fails and says so."""
    summary = run_with_kills(tmp_path, {1: 3}, restarts=2)
    assert summary["joined"] == 2
    assert summary["lost"] == {"worker 1": "was killed by SIGKILL 3 times"}
    check_trained(tmp_path)
    (tmp_path / "alone").mkdir()
    with pytest.raises(pr.PolyrhythmError, match="was killed by SIGKILL, and no worker is left to send"):
        run_with_kills(
            tmp_path / "alone", {0: 3}, restarts=1, workers=1
        )  # the third: one is replaced, one rescues


@pytest.mark.slow
def test_a_replacement_that_dies_at_startup_is_replaced_in_turn(tmp_path: Path) -> None:
    """A replacement that dies at once counts as a death, and is replaced in turn."""
    summary = run_with_kills(tmp_path, {1: 3}, restarts=3, at="start")
    assert summary["lost"] == {"worker 1": "was killed by SIGKILL 3 times"}
    check_trained(tmp_path)


@pytest.mark.slow
def test_all_workers_killed_at_once_are_replaced(tmp_path: Path) -> None:
    summary = run_with_kills(tmp_path, {0: 2, 1: 2, 2: 1}, restarts=5, workers=3)
    assert summary["joined"] == 5 and summary["batches_undone"] == 0
    check_trained(tmp_path)


@pytest.mark.slow
def test_shared_memory_of_dead_workers_is_reused_by_replacements(tmp_path: Path) -> None:
    """The memory of the dead is used again, once no server refers to it."""
    summary = run_with_kills(tmp_path, {0: 3, 1: 3}, restarts=6, servers=2)
    assert summary["joined"] == 6 and summary["batches_undone"] == 0
    check_trained(tmp_path)


def test_lockstep_has_no_restarts(tmp_path: Path) -> None:
    with pytest.raises(
        pr.UsageError, match="under sync no worker can continue without the others; leave out --restarts"
    ):
        run_with_kills(tmp_path, {1: 1}, restarts=3, strategy="sync")


def test_the_last_worker_is_replaced_once_even_without_restarts(tmp_path: Path) -> None:
    """What servers hold is not lost when the last worker dies: once, another brings it home, asked or not."""
    summary = run_with_kills(tmp_path, {0: 1}, restarts=0, workers=1)
    assert summary["joined"] == 1 and summary["batches_undone"] == 0
    check_trained(tmp_path)


def test_a_run_that_fails_while_a_replacement_starts_cleans_up(tmp_path: Path) -> None:
    """Nothing is left of it: neither the one that was to come, nor its memory."""

    def script() -> None:
        session = pr.init()
        me = session._context.me
        (tmp_path / str(me)).write_text(str(os.getpid()))
        model = network()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if me.rank == 0:
            os.kill(int((tmp_path / "worker 1").read_text()), signal.SIGKILL)
            time.sleep(0.05)
            raise RuntimeError("one more mistake")
        time.sleep(30)

    with pytest.raises(pr.PolyrhythmError, match="worker 0 failed: RuntimeError: one more mistake"):
        pr.run(
            script, workers=2, strategy="async", restarts=9, runs=None, timeout=10.0,
            console=Console(io.StringIO(), quiet=True),
        )  # fmt: skip


@pytest.mark.slow
def test_cli_reports_lost_and_replaced_workers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyrhythm", "run", str(SCRIPT), "--runs", str(tmp_path / "runs"), "-q"]
    command += ["-s", "async", "--restarts", "2", "--", "--do", "kill", "--pause", "0.02"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "lost: worker 1 was killed by SIGKILL 3 times; replaced 2 times\n" in done.stderr


def test_negative_restarts_are_refused() -> None:
    with pytest.raises(pr.UsageError, match="restarts is -1; it must be 0 or more"):
        pr.run(lambda: None, restarts=-1, runs=None)
