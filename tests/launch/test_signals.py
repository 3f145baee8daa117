"""However a run is ended, nothing of it is left: no process, no socket, no shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from polyrhythm.launch.signals import HINT
from tests.support.combine import each_value, few

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
START = 60.0  # seconds for a run to begin on a busy machine
SOON = 30.0  # seconds for everything to be gone


class Run:
    """A run by the real command, whose processes all carry a mark in their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        command = [sys.executable, "-m", "polyrhythm", "run", str(SCRIPT), "--runs", str(folder / "runs")]
        command += ["--batch-norm", "local"]  # chosen, so that nothing is said about it
        self.launcher = subprocess.Popen(
            [*command, *arguments, "--folder", str(folder), "--epochs", "1000", "--pause", "0.01"],
            env=os.environ | {"POLYRHYTHM_TEST": self.mark}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get("POLYRHYTHM_TEST") == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def sockets(self) -> set[str]:
        """The inodes of the sockets that the processes of this run hold."""
        inodes = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
        return inodes

    def fork_server(self) -> psutil.Process:
        return psutil.Process(self.launcher.pid).children()[0]

    def trains(self) -> bool:
        return all((self.folder / f"trains {rank}").exists() for rank in range(2))

    def check_gone(self, within: float = SOON) -> None:
        deadline = time.monotonic() + within
        while left := self.processes():
            assert time.monotonic() < deadline, [process.as_dict(["pid", "cmdline"]) for process in left]
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        for process in run.processes():
            process.kill()
        run.launcher.communicate()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@few(
    "number, stage",
    [(signal.SIGINT, "starting"), (signal.SIGTERM, "training"), (signal.SIGINT, "hanging")],
    quick=2,
)
def test_ctrl_c_and_sigterm_end_the_run_with_exit_code_130(
    start: Callable[..., Run], stage: str, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM end everything soon, at any time, in one line and with exit code 130."""
    strategy = "async" if stage == "training" else "sync"
    run = start("-q", "-s", strategy, "--", "--do", "hang" if stage == "hanging" else "")
    # Two processes: the launcher, and the one that imports torch.
    wait_until(run.trains if stage != "starting" else lambda: len(run.processes()) == 2)
    sockets = run.sockets()
    if stage == "training":  # `ps` and `pgrep` tell them apart
        names = sorted(each.name() for each in run.processes() if each.pid != run.launcher.pid)
        assert names == ["pr fork server", "pr server 0", "pr worker 0", "pr worker 1"]
    os.killpg(run.launcher.pid, number)
    _, error = run.launcher.communicate(timeout=SOON)
    assert run.launcher.returncode == 130
    lines = error.splitlines()
    if stage == "starting":
        assert lines == ["polyrhythm: interrupted"]
    else:  # also if one worker hangs, the servers have the model
        assert lines[:2] == [HINT, "polyrhythm: interrupted"]
        assert "load it before session.prepare()" in lines[2] and len(lines) == 3
    run.check_gone(within=SOON)
    assert not sockets & {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()}


@few("victim", ["launcher", "fork server"], quick=1)
def test_a_killed_launcher_or_fork_server_leaves_no_processes(start: Callable[..., Run], victim: str) -> None:
    """A launcher or fork server that is killed leaves nothing, not even the processes of a DataLoader."""
    run = start("-s", "async", "--", "--processes", "2")
    wait_until(run.trains)
    assert len(run.processes()) >= 2 + 3 + 2 * 2
    os.kill(run.launcher.pid if victim == "launcher" else run.fork_server().pid, signal.SIGKILL)
    run.check_gone(within=SOON)
    _, error = run.launcher.communicate()
    if victim == "fork server":
        assert run.launcher.returncode == 1
        assert "\npolyrhythm: the process that forks the nodes is gone" in f"\n{error}"


@pytest.mark.slow
def test_both_killed_while_a_worker_is_stuck(start: Callable[..., Run]) -> None:
    """Launcher and fork server cannot end a worker in which no thread runs any more: then the kernel does."""
    run = start("-s", "sync", "--", "--do", "stuck")
    wait_until(run.trains)
    server = run.fork_server()
    server.suspend()  # it shall not see the launcher go
    run.launcher.kill()
    server.kill()
    run.check_gone(within=SOON)


@pytest.mark.slow
def test_a_launcher_killed_during_startup_leaves_no_processes(start: Callable[..., Run]) -> None:
    """A launcher that is killed before there are nodes leaves nothing either."""
    run = start("-s", "async", "--")
    wait_until(lambda: len(run.processes()) == 2)
    run.launcher.kill()
    run.check_gone()


@pytest.mark.slow
def test_repeated_ctrl_c_does_not_stop_the_cleanup(start: Callable[..., Run]) -> None:
    """The second Ctrl-C ends the run at once, and further ones do not stop the cleaning up."""
    run = start("-q", "-s", "sync", "--", "--do", "hang")
    wait_until(run.trains)
    for _ in range(5):
        os.killpg(run.launcher.pid, signal.SIGINT)
        time.sleep(0.1)
    _, error = run.launcher.communicate(timeout=SOON)
    assert run.launcher.returncode == 130
    assert error.splitlines()[:2] == [HINT, "polyrhythm: interrupted"] and "but no model" in error
    run.check_gone(within=SOON)


@few("number", [signal.SIGINT, signal.SIGTERM], quick=0)
def test_ctrl_c_and_sigterm_end_the_run_during_worker_replacements(
    start: Callable[..., Run], number: signal.Signals
) -> None:
    """Worker 1 dies in its third step, in each of its lives: at whatever stage of that, all ends soon."""
    run = start("-s", "async", "--restarts", "1000", "--", "--do", "kill")
    wait_until(run.trains)
    time.sleep(0.3)
    os.killpg(run.launcher.pid, number)
    _, error = run.launcher.communicate(timeout=SOON)
    assert run.launcher.returncode == 130
    assert "polyrhythm: interrupted\n" in error and "Traceback" not in error
    run.check_gone(within=SOON)


@pytest.mark.slow
@each_value(
    ("strategy", ["hogwild", "hogwild:lock=yes"]),
    ("number", [signal.SIGINT, signal.SIGKILL]),
)
def test_ended_hogwild_runs_leave_no_processes_or_shared_memory(
    start: Callable[..., Run], strategy: str, number: signal.Signals
) -> None:
    """Ctrl-C, or a launcher that is killed: no process, also none that waits for a lock, and no memory."""
    run = start("-q", "-s", strategy, "--")
    wait_until(run.trains)
    assert any("/memfd:polyrhythm" in each.path for each in run.processes()[-1].memory_maps())
    os.kill(run.launcher.pid, number)
    run.launcher.communicate(timeout=SOON)
    run.check_gone(within=SOON)  # memory without a name goes with the last process that has it
