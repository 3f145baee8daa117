"""Laws of what a worker saves besides its model: a run that is interrupted goes on as if it had not been."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value, few
from tests.support.runs import run_in
from tests.support.saving import EPOCHS, EQUAL, script


@each_value(
    (
        "strategy",
        [
            "allreduce",
            "allreduce+topk:0.1",
            "allreduce+topk:0.1,warmup=40",
            "allreduce+threshold:0.01,adaptive=yes",
            "allreduce+randomk:0.2",
            "allreduce+fp16:feedback=yes",
            "local:4+topk:0.2",
            "slowmo:4",
            "diloco:4",
            "diloco:4+topk:0.2",
            "push",
            "push:2",
            "push:1,fanout=2",
            "noloco:4",
            "noloco:5",
        ],
    ),
    ("workers", [2, 3]),
)
def test_interrupted_simulated_run_resumes_exactly(strategy: str, workers: int, tmp_path: Path) -> None:
    """Model, optimizer and session of each worker, saved and loaded: the same bits as without the pause."""
    workers += "fanout=2" in strategy  # of two workers each has one receiver

    def train_steps(begin: int, end: int) -> str:
        return pr.simulate(
            lambda: script(tmp_path, begin, end), workers=workers, strategy=strategy, runs=None, threads=1
        )["digest"]

    whole = train_steps(0, EPOCHS)
    train_steps(0, EPOCHS // 2)
    assert train_steps(EPOCHS // 2, EPOCHS) == whole


@few("strategy", ["push:1", "noloco:5", "gossip", "choco:0.5+topk:0.3"], quick=1)
def test_interrupted_run_resumes_exactly_on_real_processes(strategy: str, tmp_path: Path) -> None:
    def train_steps(begin: int, end: int) -> str:
        return pr.run(
            lambda: script(tmp_path, begin, end), workers=3, strategy=strategy, runs=None, threads=1
        )["digest"]

    whole = train_steps(0, EPOCHS)
    train_steps(0, EPOCHS // 2)
    assert train_steps(EPOCHS // 2, EPOCHS) == whole


@pytest.mark.parametrize("strategy", ["push", "push:1", "noloco:4"])
def test_a_worker_that_does_not_load_its_saved_state_is_refused(strategy: str, tmp_path: Path) -> None:
    """Not left to wait for rounds that never come, nor silently mixed with another's."""
    train = partial(pr.simulate, workers=3, strategy=strategy, runs=None, threads=1)
    train(lambda: script(tmp_path, 0, 2))

    def forgetful() -> None:
        script(tmp_path, 2, 4, forgets=1)

    with pytest.raises(UsageError, match="either each worker loads the state that it saved itself"):
        train(forgetful)


def test_resuming_with_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    for strategy in ("push", "diloco:3", "async+topk:0.1"):
        pr.simulate(lambda: script(tmp_path, 0, 2), workers=3, strategy=strategy, runs=None)
        with pytest.raises(UsageError, match="saved by 3 workers, but this run has 2: use --workers 3"):
            pr.simulate(lambda: script(tmp_path, 2, 4), workers=2, strategy=strategy, runs=None)


@pytest.mark.parametrize("strategy", ["async", "gossip", "adpsgd", "hogwild"])
def test_a_state_that_survivors_saved_is_refused_with_what_would_work(strategy: str, tmp_path: Path) -> None:
    """Also by fewer workers. Without the session's state they continue from the model."""
    cluster = f'{EQUAL}[[failures]]\nworkers = [1]\nat = "25 ms"\n'
    run_in("simulated", lambda: script(tmp_path, 0, 2), strategy=strategy, cluster=cluster)
    assert not (tmp_path / "1.pt").exists()
    (tmp_path / "2.pt").rename(tmp_path / "1.pt")
    with pytest.raises(UsageError, match=r"after worker 1 had died, .* leave out session\.load_state_dict"):
        run_in("simulated", lambda: script(tmp_path, 2, 4), strategy=strategy, workers=2)
    for rank in range(2):
        path = tmp_path / f"{rank}.pt"
        torch.save({**torch.load(path, weights_only=True), "session": {}}, path)
    assert run_in("simulated", lambda: script(tmp_path, 2, 4), strategy=strategy, workers=2)["steps"] > 0


def test_saved_state_of_another_strategy_or_model_is_refused(tmp_path: Path) -> None:
    """State of another strategy, or of another model, is refused, and so is any for a single process."""
    pr.simulate(lambda: script(tmp_path, 0, 1), workers=2, strategy="allreduce+topk:0.1", runs=None)
    with pytest.raises(UsageError, match=r"was saved under allreduce\+topk:0\.1, but this run uses local"):
        pr.simulate(lambda: script(tmp_path, 1, 2), workers=2, strategy="local", runs=None)
    saved = torch.load(tmp_path / "0.pt", weights_only=True)["session"]
    with pytest.raises(UsageError, match="a single process has no strategy"):
        pr.init().load_state_dict(saved)
    saved["layout"] = "another"
    torch.save({**torch.load(tmp_path / "0.pt", weights_only=True), "session": saved}, tmp_path / "0.pt")
    with pytest.raises(UsageError, match="was saved with a different model"):
        pr.simulate(lambda: script(tmp_path, 1, 2), workers=2, strategy="allreduce+topk:0.1", runs=None)
