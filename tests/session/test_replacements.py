"""A replacement whose script resumes from a state that the same run has saved."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.runs import run_in

EPOCHS = 6
EQUAL = '[[hosts]]\nstep_time = "10 ms"\n'
RETURNS = EQUAL + '[[failures]]\nworkers = [1]\nat = "{at} ms"\nback = "{back} ms"\n'


@dataclass
class Resuming:
    """Exchanges values before training, after each epoch, and after saving; keeps what it got, by epoch.

    Worker 1 kills itself in `dies_in`, of real processes, when it has saved or before it has.
    """

    folder: Path
    dies_in: int | None = None
    dies_after_saving: bool = False
    epochs: int = EPOCHS
    predicts: bool = False

    def __call__(self) -> None:
        session = pr.init()
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(26, 2))
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        path = self.folder / f"{session.rank}.pt"
        saved = torch.load(path) if path.exists() else {}
        if saved:
            model.load_state_dict(saved["model"])
        assert session.gather("start") == ["start"] * session.workers
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=2))
        if saved:
            session.load_state_dict(saved["session"])
        assert session.mean(1.0) == 1.0
        for epoch in range(saved.get("epoch", 0), self.epochs):
            batches = 0
            for (x,) in loader:
                batches += 1
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            self.die(session, epoch, after_saving=False)
            found = session.gather((session.rank, epoch))
            session.consensus()
            state = {"epoch": epoch + 1, "model": model.state_dict(), "session": session.state_dict()}
            torch.save(state, path)
            self.die(session, epoch, after_saving=True)
            mean = session.mean(float(epoch))
            session.save(epoch, self.folder / "last.pt")
            outputs = session.predict(DataLoader(data, batch_size=13)) if self.predicts else torch.zeros(26)
            assert len(outputs) == 26
            incarnation = session._node.incarnation
            torch.save(
                (found, mean, batches, bool(state["session"]["worker"])),
                self.folder / f"got-{epoch}-{session.rank}-{incarnation}.pt",
            )

    def die(self, session: Any, epoch: int, after_saving: bool) -> None:
        once = session.rank == 1 and not session._node.incarnation
        if once and self.dies_in == epoch and self.dies_after_saving == after_saving:
            os.kill(os.getpid(), signal.SIGKILL)

    def check(self, workers: int = 3) -> list[int]:
        """Asserts that each worker got the values of its epoch. Returns the epochs of the replacement."""
        for file in self.folder.glob("got-*.pt"):
            epoch = int(file.name.split("-")[1])
            found, mean, _, complete = torch.load(file)
            assert found == [(rank, epoch) for rank in range(workers)] and mean == epoch and complete, file
        return sorted(int(file.name.split("-")[1]) for file in self.folder.glob("got-*-1-1.pt"))


STRATEGIES = ["async", "gossip", "adpsgd", "broadcast", "hogwild"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replacement_that_resumes_gets_the_values_of_its_epoch(strategy: str, tmp_path: Path) -> None:
    script = Resuming(tmp_path)
    cluster = RETURNS.format(at=165, back=190)
    summary = run_in("simulated", script, strategy=strategy, workers=3, cluster=cluster)
    assert summary["replaced"] == {"worker 1": 1}
    epochs = script.check()
    assert epochs and epochs[0] > 0 and epochs[-1] == EPOCHS - 1  # it did resume
    assert sum(torch.load(tmp_path / f"got-{each}-1-1.pt")[2] for each in epochs)  # and trained


@pytest.mark.parametrize("strategy", ["async", "gossip"])
def test_a_replacement_in_a_run_that_was_resumed_resumes_too(strategy: str, tmp_path: Path) -> None:
    """The whole run begins with epoch 3: the replacement finds what the others exchanged since."""
    run_in("simulated", Resuming(tmp_path, epochs=3), strategy=strategy, workers=3, cluster=EQUAL)
    script = Resuming(tmp_path, predicts=True)
    cluster = RETURNS.format(at=65, back=90)
    summary = run_in("simulated", script, strategy=strategy, workers=3, cluster=cluster)
    assert summary["replaced"] == {"worker 1": 1}
    epochs = script.check()
    assert epochs and epochs[0] >= 3 and epochs[-1] == EPOCHS - 1


@pytest.mark.parametrize("after_saving", [False, True])
@pytest.mark.parametrize("strategy", ["async", "gossip"])
def test_a_killed_process_resumes_from_what_it_saved(
    strategy: str, after_saving: bool, tmp_path: Path
) -> None:
    """What it died before, and would call again only in the next epoch, the others do without it."""
    script = Resuming(tmp_path, dies_in=1, dies_after_saving=after_saving, epochs=4, predicts=True)
    summary = run_in("real", script, strategy=strategy, workers=2, restarts=1)
    assert summary["replaced"] == {"worker 1": 1}
    first = 1 + after_saving
    for file in tmp_path.glob("got-*.pt"):
        epoch = int(file.name.split("-")[1])
        found, mean, _, complete = torch.load(file)
        assert found == [(0, epoch), (1, epoch)] and mean == epoch and complete, file
    assert sorted(int(each.name.split("-")[1]) for each in tmp_path.glob("got-*-1-1.pt")) == [
        *range(first, 4)
    ]


def counting(session: pr.Session, calls: dict[Any, list[Any]], inside: bool, every: int = 1) -> None:
    """Trains four epochs; exchanges values inside the loop, and after it from the same line."""
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(torch.randn(30, 2)), batch_size=2)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    mine = calls[session.rank, session._node.incarnation] = []  # type: ignore[attr-defined]

    def exchange(what: str) -> None:
        mine.append((what, session.gather(what)[0]))

    for epoch in range(4):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if inside:
                exchange(f"inside {epoch}")
        if epoch % every == 0:
            exchange(f"after {epoch}")


NOT_THERE = (
    r"worker 1 replaced a worker that died, and comes to session.gather\(\) in line \d+, where the others"
)


def test_calls_inside_a_loop_are_not_taken_for_others() -> None:
    """A replacement gets no batch of epochs that are over, so it makes only the calls after the loop."""
    calls: dict[Any, list[Any]] = {}
    script = lambda: counting(pr.init(), calls, inside=True)  # noqa: E731
    with pytest.raises(UsageError, match=NOT_THERE):
        run_in("simulated", script, strategy="gossip", workers=3, cluster=RETURNS.format(at=65, back=70))
    assert all(what == found for each in calls.values() for what, found in each)
    assert calls[1, 1] == [("after 0", "after 0")]


def test_a_call_that_nobody_made_in_that_epoch_is_refused() -> None:
    def script() -> None:
        session: Any = pr.init()
        counting(session, {}, inside=False, every=1 if session._node.incarnation else 3)

    with pytest.raises(UsageError, match=NOT_THERE):
        run_in("simulated", script, strategy="async", workers=3, cluster=RETURNS.format(at=165, back=170))
