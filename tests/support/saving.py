"""Scripts that save and resume."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.programs import MOMENTUM, Examples, mlp
from tests.support.runs import run_in

EPOCHS = 4

# Without randomness: a resumed run does not repeat the draws of the first one.
EQUAL = '[[hosts]]\nstep_time = "10 ms"\n'
UNEQUAL = EQUAL + "[[stragglers]]\nworkers = [1]\nslowdown = 1.717\n"
CLUSTERS = [pytest.param(EQUAL, id="equal"), pytest.param(UNEQUAL, id="unequal")]


def script(folder: Path, begin: int, end: int, forgets: int = -1) -> None:
    """Trains some of the epochs; begins with what is in the folder, and leaves there what the next needs."""
    here = pr.init()
    model = mlp()
    optimizer = MOMENTUM(model.parameters())
    loader = DataLoader(Examples(24), batch_size=2)
    path = folder / f"{here.worker}.pt"
    saved = torch.load(path, weights_only=True) if begin else None
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model, optimizer, loader = here.prepare(model, optimizer, loader)
    if saved and here.rank != forgets:
        here.load_state_dict(saved["session"])
    for _ in range(begin, end):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "session": here.state_dict(),
    }
    torch.save(state, path)


@dataclass
class Stopping:
    """Takes steps whose batches depend on rank and step only, and saves after one of them.

    With `begin` it continues from there with what was saved. With `staggered` workers start at different
    steps, so they come to the place where they save one after the other, and not in rank order; and each
    copies its model before it waits for the others there. A worker whose rank is `forgets` resumes without
    loading its session.
    """

    folder: Path
    begin: int
    stop: int
    steps: int
    optimizer: Any = MOMENTUM
    staggered: bool = False
    forgets: int = -1

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer = self.optimizer(model.parameters())
        path = self.folder / f"{here.worker}.pt"
        saved = torch.load(path, weights_only=True) if self.begin else None
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        data = Examples(24)
        model, optimizer = here.prepare(model, optimizer, example=torch.stack([data[0][0], data[1][0]]))
        if saved and here.rank != self.forgets:
            here.load_state_dict(saved["session"])
        skipped = (here.rank + 1) % here.workers if self.staggered else 0
        for step in range(self.begin or skipped, self.steps):
            places = [(7 * step + 3 * here.rank + number) % 24 for number in range(2)]
            x, y = (torch.stack(each) for each in zip(*(data[place] for place in places), strict=True))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step + 1 == self.stop and not self.begin:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state = copy.deepcopy(state) if self.staggered else state
                torch.save({**state, "session": here.state_dict()}, path)


def saved_states(folder: Path, workers: int) -> list[dict[str, Any]]:
    """What the strategy's worker of each rank has saved."""
    files = [folder / f"{rank}.pt" for rank in range(workers)]
    return [torch.load(file, weights_only=True)["session"]["worker"] for file in files]


def went_on_and_resumed(
    strategy: str, folder: Path, stop: int, workers: int, cluster: str
) -> list[dict[str, Any]]:
    """The summaries of a simulated run that saved and went on, and of one that resumed from there."""
    scripts = (Stopping(folder, begin, stop, stop + 9, staggered=True) for begin in (0, stop))
    return [
        run_in("simulated", script, strategy=strategy, workers=workers, cluster=cluster) for script in scripts
    ]
