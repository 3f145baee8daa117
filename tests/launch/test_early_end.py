"""A run that ends early keeps what it has: the model, the summary, and a line that says how to continue."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Farewell
from polyrhythm.launch import early_end
from polyrhythm.session import context
from tests.support.combine import each_value, few
from tests.support.launchers import SilentLauncher, coordinator
from tests.support.programs import Steps
from tests.support.runs import WORLDS, run_in

MANY = 10_000  # steps, which no test waits for
AT = 7  # the step in which something happens
LOCKSTEP = ["allreduce", "local:4", "diloco:3", "sync", "gossip", "local:4+int8"]


@dataclass
class Disturbed:
    """Gradients that depend on rank and parameters; in step `AT` worker 1 does something."""

    what: Callable[[], None]
    taken: int = 0  # on real processes each worker has its own

    def __call__(self, rank: int, x: Tensor) -> Tensor:
        if rank == 1:
            self.taken += 1
            if self.taken == AT:
                self.what()
        return slope(rank, x)


def slope(rank: int, x: Tensor) -> Tensor:
    return x - torch.arange(1.0, 1 + len(x), dtype=x.dtype) * (1 + rank)


def interrupt_this_run(number: int = signal.SIGINT) -> Callable[[], None]:
    launcher = os.getpid()
    return lambda: os.kill(launcher, number)


def fail() -> None:
    raise RuntimeError("the user's own mistake")


def end_early(
    world: str, folder: Path, strategy: str, what: Callable[[], None]
) -> tuple[dict[str, Any], Any]:
    """Runs until `what` ends the run; returns its summary and the error."""
    with pytest.raises((KeyboardInterrupt, pr.PolyrhythmError)) as caught:
        program = Steps(MANY, Disturbed(what), lr=0.1, size=5)
        run_in(world, program, strategy=strategy, runs=folder, name="it")
    summary = json.loads((folder / "it" / "summary.json").read_text())
    return summary, caught.value


def finished(world: str, strategy: str, steps: int) -> Any:
    """The same run, if its script had ended after so many steps."""
    return run_in(world, Steps(steps, slope, lr=0.1, size=5), strategy=strategy)


def check_kept(summary: dict[str, Any], error: BaseException) -> dict[str, Tensor]:
    """The model is there, and the last line says where it is and how to continue."""
    path = Path(summary["folder"]) / "consensus.safetensors"
    (note,) = error.__notes__
    assert str(path) in note and "load it before session.prepare()" in note
    assert not list(path.parent.glob("*.part"))
    return safetensors.torch.load_file(path)


@each_value(("world", WORLDS), ("strategy", LOCKSTEP))
def test_an_interrupted_run_is_the_run_that_ends_there(world: str, strategy: str, tmp_path: Path) -> None:
    """Ctrl-C ends a lockstep run after the same step on all workers, bit for bit as if the script had."""
    summary, error = end_early(world, tmp_path, strategy, interrupt_this_run())
    assert isinstance(error, KeyboardInterrupt) and summary["ended"] == "interrupted"
    check_kept(summary, error)
    steps, over = divmod(summary["steps"], summary["workers"])
    assert not over and AT <= steps < MANY
    assert summary["digest"] == finished(world, strategy, steps)["digest"]


@pytest.mark.parametrize("world", WORLDS)
@few("strategy", ["async", "hogwild", "adpsgd", "broadcast", "ssp:2", "async+topk:0.5"], quick=2)
def test_sigterm_keeps_the_model_of_workers_at_their_own_pace(
    world: str, strategy: str, tmp_path: Path
) -> None:
    summary, error = end_early(world, tmp_path, strategy, interrupt_this_run(signal.SIGTERM))
    assert isinstance(error, KeyboardInterrupt) and summary["ended"] == "interrupted"
    assert check_kept(summary, error)["x"].isfinite().all()
    assert AT <= summary["steps"] < MANY


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("strategy", "source"), [("allreduce", "all workers"), ("local:4", "worker 1")])
def test_an_exception_leaves_the_model_before_it(
    world: str, strategy: str, source: str, tmp_path: Path
) -> None:
    """The worker that fails saves what it has: the last model that all agreed on, or its own replica."""
    summary, error = end_early(world, tmp_path, strategy, fail)
    assert str(error) == "worker 1 failed: RuntimeError: the user's own mistake"
    assert (summary["ended"], summary["error"]) == ("failed", str(error))
    state = check_kept(summary, error)
    assert summary["source"] == source
    if source == "all workers":
        assert summary["digest"] == finished(world, strategy, AT - 1)["digest"]
    else:  # a local round ended after step 4; since then this worker has stepped alone
        agreed = finished(world, strategy, 4).model_state()["x"]
        for _ in range(4, AT - 1):
            agreed = agreed - 0.1 * slope(1, agreed)
        assert torch.allclose(state["x"], agreed, rtol=0, atol=1e-12)


@few("strategy", ["allreduce", "local:4", "sync", "local:4+int8"], quick=2)
def test_survivors_of_a_killed_worker_save_the_model(strategy: str, tmp_path: Path) -> None:
    """Where no worker can continue without the other, one that lives saves what it has."""
    summary, error = end_early("real", tmp_path, strategy, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert str(error).startswith("worker 1 was killed by SIGKILL; ")
    assert check_kept(summary, error)["x"].isfinite().all()
    if strategy == "allreduce":
        assert summary["digest"] == finished("real", strategy, AT - 1)["digest"]
    if strategy == "local:4":
        assert summary["source"] in ("worker 0", "worker 2")


def test_a_worker_that_sends_its_model_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, answers = [100.0], []
    monkeypatch.setattr(early_end.time, "monotonic", lambda: now[0])
    run = coordinator("allreduce", 2, SilentLauncher())
    ending = run.ending
    ending.keeps = True
    ending.fail("worker 1 was killed", 1)
    end = early_end.EarlyEnd(run, print)
    end.advance()
    ending.offer(Peer("worker", 0), "all workers", answers.append)
    assert answers == [Farewell(last=True)] and ending.sending
    now[0] += early_end.SEND - 1
    end.advance()
    assert ending.sending
    now[0] += 2
    end.advance()
    assert ending.over and not ending.sending


@pytest.mark.slow  # the time for a worker that hangs has to pass
def test_a_worker_that_hangs_does_not_keep_the_others_from_saving(tmp_path: Path) -> None:
    """Some worker never gets to its next step: after a while the others save without it."""

    def hang() -> None:
        interrupt()
        time.sleep(600)

    interrupt = interrupt_this_run()
    summary, error = end_early("real", tmp_path, "sync", hang)
    assert isinstance(error, KeyboardInterrupt)
    assert summary["source"] == "the servers"
    check_kept(summary, error)


def by_session(session: pr.Session, path: Path) -> None:
    session.save("a checkpoint", path)


def by_torch(session: pr.Session, path: Path) -> None:
    session.save("an older one", path.with_name("old.pt"))
    if session.is_main:
        torch.save("a checkpoint", path)


def by_renaming(session: pr.Session, path: Path) -> None:
    if session.is_main:
        torch.save("a checkpoint", f"{path}.new")
        os.replace(f"{path}.new", path)


@each_value(("world", WORLDS), ("save", [by_torch, by_session, by_renaming]))
def test_the_last_line_names_what_the_script_has_saved_itself(
    world: str, save: Callable[[pr.Session, Path], None], tmp_path: Path
) -> None:
    def script() -> None:
        Steps(AT, slope, lr=0.1, size=5)()
        session = context.session.get()
        assert session is not None
        save(session, tmp_path / "own.pt")
        session.barrier()
        fail()

    with pytest.raises(pr.PolyrhythmError) as caught:
        run_in(world, script, workers=2, runs=tmp_path, name="it")
    (note,) = caught.value.__notes__
    assert (
        f"; the script saved {tmp_path}/own.pt at step {AT} of a worker; to continue, load one of them"
        in note
    )
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert summary["last_saved"] == {"path": f"{tmp_path}/own.pt", "step": AT}


@few("strategy, source", [("async", "the servers"), ("allreduce", "all workers")], quick=1)
def test_a_run_whose_workers_all_evaluate_keeps_its_model(
    strategy: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No script returns to the session in time, so a thread saves the model."""
    monkeypatch.setattr("polyrhythm.launch.early_end.EarlyEnd._patience", lambda self: 0.1)
    launcher = os.getpid()

    def script() -> None:
        Steps(AT, slope, lr=0.1, size=5)()
        session = context.session.get()
        assert session is not None
        session.barrier()
        if session.is_main:
            os.kill(launcher, signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt) as caught:
        run_in("real", script, strategy=strategy, workers=2, runs=tmp_path, name="it")
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    check_kept(summary, caught.value)
    assert (summary["ended"], summary["source"]) == ("interrupted", source)
    if strategy == "allreduce":
        finished = run_in("real", Steps(AT, slope, lr=0.1, size=5), strategy=strategy, workers=2)
        assert summary["digest"] == finished["digest"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_that_fails_before_its_first_step_keeps_a_summary_and_no_model(
    world: str, tmp_path: Path
) -> None:
    def script() -> None:
        session = pr.init()
        model = torch.nn.Linear(2, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fail()

    with pytest.raises(pr.PolyrhythmError) as caught:
        run_in(world, script, runs=tmp_path, name="it")
    summary = json.loads((tmp_path / "it" / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["digest"]) == ("failed", 0, "")
    assert not hasattr(caught.value, "__notes__")
    assert not (tmp_path / "it" / "consensus.safetensors").exists()
