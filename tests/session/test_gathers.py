"""Calls of a replacement that has resumed and not begun: they get the values of their epoch, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.coordination.gathers import Gathers
from polyrhythm.coordination.membership import Membership
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Gather
from tests.support.runs import run_in

A, B = Peer("worker", 0), Peer("worker", 1)


class Calls:
    """Two workers, of which the second is replaced."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.membership.members, self.membership.workers = {A: None, B: None}, [A, B]  # type: ignore[dict-item]
        self.errors: list[str] = []
        self.gathers = Gathers(self.membership, set(), lambda why, code: self.errors.append(why))
        self.gathers.keep = True

    def call(self, peer: Peer, line: int, epochs: int) -> list[bytes] | None:
        """The values; None if it waits or has failed."""
        found: list[Any] = []
        request = Gather(f"session.mean() in line {line}", b"%d" % epochs, str(line), epochs)
        self.gathers.add(peer, request, found.append)
        return found[0].values if found else None

    def both(self, line: int, epochs: int) -> None:
        self.call(A, line, epochs)
        assert self.call(B, line, epochs) == [b"%d" % epochs] * 2

    def replace(self, epoch: int) -> None:
        self.membership.incarnations[B] += 1
        self.gathers.lose(B)
        self.gathers.resume(B, 0, epoch)


def test_a_call_at_the_top_of_the_loop_belongs_to_the_epoch_that_was_resumed() -> None:
    calls = Calls()
    calls.both(line=5, epochs=0)  # before the loop
    for epoch in range(4):
        calls.both(line=9, epochs=epoch)
        calls.both(line=12, epochs=epoch + 1)
    calls.replace(epoch=3)
    assert calls.call(B, line=5, epochs=0) == [b"0"] * 2
    assert calls.call(B, line=9, epochs=0) == [b"3"] * 2
    assert calls.call(B, line=12, epochs=4) == [b"4"] * 2
    assert not calls.errors


def test_a_replacement_waits_for_the_others_at_the_top_of_its_epoch() -> None:
    calls = Calls()
    for epoch in range(3):
        calls.both(line=9, epochs=epoch)
    calls.replace(epoch=3)
    assert calls.call(B, line=9, epochs=0) is None
    assert calls.call(A, line=9, epochs=3) == [b"3", b"0"]  # what B sends is its value in epoch 3
    assert not calls.errors


def test_a_call_that_turns_out_to_be_in_the_loop_ends_the_run() -> None:
    """Others have called it in epoch 0 only: it may be one from before training, until they call it again."""
    calls = Calls()
    calls.both(line=9, epochs=0)
    calls.replace(epoch=4)
    assert calls.call(B, line=9, epochs=0) == [b"0"] * 2
    assert calls.call(A, line=9, epochs=4) is None
    assert (
        len(calls.errors) == 1 and "line 9 from before training, but the others call it in" in calls.errors[0]
    )


def test_epochs_of_a_loader_that_has_not_begun_again_count(tmp_path: Path) -> None:
    """A call between the loops over two loaders has the same number in a resumed run."""
    seen: list[list[int]] = []

    def script(resumes: bool) -> None:
        session: Any = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        loaders: list[Any] = [DataLoader(TensorDataset(torch.randn(4, 2)), batch_size=2) for _ in range(2)]
        model, optimizer, *loaders = session.prepare(model, optimizer, *loaders)
        path, numbers = tmp_path / f"{session.rank}.pt", []
        if resumes:
            session.load_state_dict(torch.load(path))
        for epoch in range(resumes * 2, 4):
            for loader in loaders:
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                numbers.append(session._data.epochs)
            if epoch == 1:
                torch.save(session.state_dict(), path)
        seen.append(numbers)

    for resumes in (False, True):
        run_in("simulated", lambda resumes=resumes: script(resumes), strategy="allreduce", workers=1)
    assert seen == [[1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8]]
