"""What a dead worker had not trained on is in no other's part of the epoch: it is counted."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.cli.entry import main as command
from tests.support.programs import MOMENTUM, Examples, mlp

SIZE, EPOCHS = 90, 4
DIES = '[[hosts]]\nlatency = "1 ms"\nstep_time = "10 ms"\n[[failures]]\nworkers = [1]\nat = "133 ms"\n'


@dataclass
class Part:
    """Trains; worker 1 may kill itself, and all may leave the last epoch early."""

    kills: bool = False
    leaves: int = -1  # after so many batches of the last epoch

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(SIZE), batch_size=4)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        late = here._late  # type: ignore[attr-defined]
        for epoch in range(EPOCHS):
            for number, (x, y) in enumerate(loader):
                if self.kills and here.rank == 1 and epoch == 1 and number == 3 and not late:
                    os.kill(os.getpid(), signal.SIGKILL)
                if epoch == EPOCHS - 1 and number == self.leaves:
                    break
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()


@pytest.mark.parametrize("back", ["", 'back = "160 ms"\n'])
@pytest.mark.parametrize("strategy", ["gossip", "choco", "push:1", "noloco:3"])
def test_all_examples_are_trained_on_or_left_out(simulate: Any, strategy: str, back: str) -> None:
    summary = simulate(Part(), strategy, 3, cluster=DIES + back)
    assert list(summary["lost"]) == ["worker 1"]
    assert 0 < summary["samples_left_out"] < SIZE / 3
    assert summary["samples"] + summary["samples_left_out"] == EPOCHS * SIZE


@pytest.mark.parametrize("restarts", [0, 1])
def test_samples_and_left_out_samples_add_up_on_real_processes(tmp_path: Path, restarts: int) -> None:
    """By what the dead one has said last: what it has not said, nobody knows."""
    summary = pr.run(
        Part(kills=True), workers=3, strategy="gossip", runs=tmp_path, threads=1, restarts=restarts
    )
    assert summary["joined"] == restarts and summary["samples_left_out"] >= 30 - 12
    assert summary["samples"] + summary["samples_left_out"] == EPOCHS * SIZE


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "adpsgd"])
def test_examples_skipped_by_the_script_do_not_count_as_left_out(simulate: Any, strategy: str) -> None:
    for script in (Part(), Part(leaves=2)):
        assert simulate(script, strategy, 3)["samples_left_out"] == 0


def test_strategies_with_leases_leave_no_examples_out_after_a_death(simulate: Any) -> None:
    assert simulate(Part(), "adpsgd", 3, cluster=DIES)["samples_left_out"] == 0


SCRIPT = """\
import torch, polyrhythm as pr
from torch.utils.data import DataLoader, TensorDataset
def main():
    here, model = pr.init(), torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.ones(90, 3)), batch_size=4)
    model, optimizer, loader = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(4):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
if __name__ == "__main__":
    main()
"""


def test_cli_reports_left_out_examples_only_if_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "dies.toml").write_text(DIES)
    torch.manual_seed(0)
    arguments = ["simulate", str(tmp_path / "train.py"), "-n", "3", "-s", "gossip", "--runs", str(tmp_path)]
    assert command([*arguments, "--cluster", str(tmp_path / "dies.toml")]) == 0
    assert "examples of epochs in which their workers died" in capsys.readouterr().err
    assert command(arguments) == 0
    assert "left out" not in capsys.readouterr().err
