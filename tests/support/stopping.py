"""A run that saves its state on the way, and another that resumes from there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyrhythm as pr
from tests.support.programs import CLASSES, FEATURES, MOMENTUM, mlp
from tests.support.runs import run_in

# Without randomness: a resumed run does not repeat the draws of the first one.
EQUAL = '[[hosts]]\nstep_time = "10 ms"\n'
UNEQUAL = EQUAL + "[[stragglers]]\nworkers = [1]\nslowdown = 1.717\n"
CLUSTERS = [pytest.param(EQUAL, id="equal"), pytest.param(UNEQUAL, id="unequal")]


@dataclass
class Stopping:
    """Takes steps on data that depends on rank and step only, and saves before step `stop`; or resumes there.

    Workers start at different steps, so they come to the place where they save one after the other, and not
    in rank order. A worker whose rank is `forgets` resumes without loading its session.
    """

    folder: Path
    stop: int
    end: int
    resumes: bool = False
    forgets: int = -1

    def __call__(self) -> None:
        here = pr.init()
        path = self.folder / f"{here.rank}.pt"
        model = mlp()
        optimizer = MOMENTUM(model.parameters())
        saved = torch.load(path, weights_only=True) if self.resumes else None
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = here.prepare(model, optimizer)
        if saved is not None and here.rank != self.forgets:
            here.load_state_dict(saved["session"])
        for step in range(self.stop if self.resumes else (here.rank + 1) % here.workers, self.end):
            if step == self.stop and not self.resumes:
                state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                torch.save({**state, "session": here.state_dict()}, path)
            self.step(model, optimizer, 1000 * step + here.rank)

    def step(self, model: nn.Module, optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, FEATURES, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(4) % CLASSES).backward()
        optimizer.step()


def saved_states(folder: Path, workers: int) -> list[dict[str, Any]]:
    """What the strategy's worker of each rank has saved."""
    files = [folder / f"{rank}.pt" for rank in range(workers)]
    return [torch.load(file, weights_only=True)["session"]["worker"] for file in files]


def went_on_and_resumed(
    strategy: str, folder: Path, stop: int, workers: int, cluster: str
) -> list[dict[str, Any]]:
    """The summaries of a simulated run that saved and went on, and of one that resumed from there."""
    return [
        run_in("simulated", script, strategy=strategy, workers=workers, cluster=cluster)
        for script in (Stopping(folder, stop, stop + 9), Stopping(folder, stop, stop + 9, resumes=True))
    ]
