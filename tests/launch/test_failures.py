"""What becomes of a run when one of its nodes fails: it ends soon and says why, or it goes on without it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import polyrhythm as pr
from polyrhythm.launch.console import Console
from tests.scripts.train import EXAMPLES, train
from tests.support.combine import few

SOON = 60.0  # seconds in which a run that cannot go on has to be over
LOCKSTEP = ["allreduce", "sync", "local:4"]


def run_to_the_end(
    strategy: str, timeout: float = 60.0, runs: Path | None = None, **how: Any
) -> tuple[str, str, dict[str, Any]]:
    """The error, if any, what the nodes printed, and the summary."""
    output = io.StringIO()
    began = time.monotonic()
    error, summary = "", {}
    try:
        summary = pr.run(
            partial(train, **how), workers=3, strategy=strategy, runs=runs, timeout=timeout,
            console=Console(output),
        )  # fmt: skip
    except pr.PolyrhythmError as failure:
        assert failure.exit_code == 1
        error = str(failure)
    assert time.monotonic() - began < SOON
    return error, output.getvalue(), summary


@pytest.mark.parametrize("strategy", [*LOCKSTEP, "async"])
def test_a_worker_that_raises_ends_the_run_and_shows_its_traceback_once(strategy: str) -> None:
    """The traceback of a worker that raises is shown, once, and the error says which one and what."""
    error, output, _ = run_to_the_end(strategy, do="raise")
    assert error == "worker 1 failed: RuntimeError: the user's own mistake"
    assert output.count("Traceback") == 1
    assert re.search(r"^\[worker 1\] Traceback.*\n\[worker 1\]   File .*/scripts/train\.py", output, re.M)
    assert "[worker 1] RuntimeError: the user's own mistake" in output


@pytest.mark.parametrize("strategy", LOCKSTEP)
def test_a_killed_worker_ends_a_lockstep_run_and_is_named(strategy: str) -> None:
    """Where no worker can go on without the other, a killed one ends the run, by name."""
    error, output, _ = run_to_the_end(strategy, do="kill")
    assert error.startswith("worker 1 was killed by SIGKILL; ")
    assert "Traceback" not in output


def test_asynchronous_workers_finish_the_data_of_a_killed_worker(tmp_path: Path) -> None:
    """Asynchronous workers train on without a killed one, and on every example that it had taken."""
    error, _, summary = run_to_the_end("async", do="kill", folder=tmp_path, pause=0.02)
    assert not error
    assert summary["lost"] == {"worker 1": "was killed by SIGKILL"}
    trained = [int(word) for path in tmp_path.glob("examples *") for word in path.read_text().split()]
    assert set(trained) == set(range(EXAMPLES))


def test_asynchronous_run_survives_two_workers_killed_at_once(tmp_path: Path) -> None:
    """Two deaths in one moment hold up nobody: the one that is left trains on every example."""
    error, _, summary = run_to_the_end("async", do="kill two", folder=tmp_path, pause=0.02)
    assert not error
    assert set(summary["lost"]) == {"worker 1", "worker 2"}
    trained = [int(word) for path in tmp_path.glob("examples *") for word in path.read_text().split()]
    assert set(trained) == set(range(EXAMPLES))


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_killed_server_ends_the_run_and_is_named(strategy: str, tmp_path: Path) -> None:
    """Nobody can go on without a server; the error names it and says what is lost."""
    error, output, _ = run_to_the_end(strategy, do="kill the server", folder=tmp_path)
    assert error.startswith("server 0 was killed by SIGKILL; its part of the parameters is lost")
    assert "Traceback" not in output


@few("strategy, who", [("allreduce", "worker 1"), ("sync", "server 0")], quick=1)
def test_timeout_error_says_who_waited_for_whom_and_how_long(strategy: str, who: str) -> None:
    """No wait is endless: the error says who waited for whom, for what and for how long."""
    error, _, _ = run_to_the_end(strategy, do="hang", timeout=2.0)
    assert re.match(r"(worker [02]|server 0) waited \d+\.\d+ s for ", error)
    assert who in error


@few("do, place", [("hang", r"; worker 1 is at train\.py, line \d+"), ("stuck", "")], quick=1)
def test_timeout_error_says_where_the_late_worker_is(do: str, place: str, tmp_path: Path) -> None:
    """Unless it cannot say so."""
    error, _, _ = run_to_the_end("allreduce", do=do, timeout=2.0, runs=tmp_path)
    assert re.fullmatch(r"worker \d waited \d\.\d s for worker 1 in a collective" + place, error), error


def test_a_worker_that_exits_mid_training_counts_as_lost() -> None:
    """A worker that ends its process in the middle of training has not finished, with any exit code."""
    error, _, _ = run_to_the_end("allreduce", do="vanish")
    assert error.startswith("worker 1 ended before it had finished; ")
    error, _, summary = run_to_the_end("async", do="vanish", pause=0.02)
    assert not error
    assert summary["lost"] == {"worker 1": "ended before it had finished"}


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_nonzero_sys_exit_is_a_failure_and_zero_is_not(strategy: str) -> None:
    """`sys.exit(3)` is a failure, `sys.exit(0)` at the end of the script is not."""
    assert run_to_the_end(strategy, do="exit 3")[0] == "worker 1 ended the script with exit code 3"
    error, _, summary = run_to_the_end(strategy, do="exit 0")
    assert not error
    assert summary["samples"] == EXAMPLES


def test_only_the_last_state_of_a_progress_bar_is_printed() -> None:
    """Of a progress bar, which rewrites its line, the last state is shown; other bytes do no harm."""

    def script() -> None:
        sys.stdout.buffer.write(b"10 %\r50 %\r100 %\n\xff\n")
        train(do="quiet")

    output = io.StringIO()
    pr.run(script, workers=1, strategy="allreduce", threads=1, runs=None, console=Console(output, quiet=True))
    assert output.getvalue() == "[worker 0] 100 %\n[worker 0] \ufffd\n"


@pytest.mark.slow
def test_run_starts_after_torch_has_used_several_threads() -> None:
    """A process whose torch has worked with several threads can start a run: its nodes do not hang."""
    code = """if True:
        import torch, polyrhythm as pr
        from tests.scripts.train import train
        torch.set_num_threads(2)
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        torch.randn(1000, 1000).exp().sum()
        print(pr.run(train, workers=1, strategy="async", runs=None, timeout=20)["samples"])
        try:
            pr.run(train, workers=1, threads=2, strategy="async", runs=None)
        except pr.UsageError as error:
            print(error)
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    *_, samples, error = done.stdout.splitlines()
    assert samples == str(EXAMPLES)
    assert error.startswith("2 threads per worker are not possible")


def test_dataloader_processes_end_with_a_killed_worker() -> None:
    """Processes that a DataLoader started end with their worker, also with one that is killed."""
    error, _, summary = run_to_the_end("async", do="kill", processes=2, pause=0.02)
    assert not error
    assert list(summary["lost"]) == ["worker 1"]


@pytest.mark.slow
def test_a_codec_with_a_broken_dependency_fails_with_its_error(tmp_path: Path) -> None:
    """A library that a codec needs is broken: the workers say so, each for itself."""
    (tmp_path / "google_crc32c.py").write_text("")
    (tmp_path / "train.py").write_text(
        "import torch, polyrhythm as pr\nsession, model = pr.init(), torch.nn.Linear(20, 5)\n"
        "model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters()))\n"
        "model(torch.ones(1, 20)).sum().backward()\noptimizer.step()\n"
    )
    places = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    command = [
        sys.executable,
        "-m",
        "polyrhythm",
        "run",
        "train.py",
        "--workers=1",
        "--strategy=allreduce+topk",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": places}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert "worker 0 failed: AttributeError: module 'google_crc32c'" in done.stderr
