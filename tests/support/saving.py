"""Scripts that save and resume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.programs import MOMENTUM, Examples, mlp

EPOCHS = 4


def script(folder: Path, begin: int, end: int, forgets: int = -1) -> None:
    """Trains some of the epochs; begins with what is in the folder, and leaves there what the next needs."""
    here = pr.init()
    model = mlp()
    optimizer = MOMENTUM(model.parameters())
    loader = DataLoader(Examples(24), batch_size=2)
    path = folder / f"{here.rank}.pt"
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

    With `begin` it continues from there with what was saved.
    """

    folder: Path
    begin: int
    stop: int
    steps: int
    optimizer: Any = MOMENTUM

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer = self.optimizer(model.parameters())
        path = self.folder / f"{here.rank}.pt"
        saved = torch.load(path, weights_only=True) if self.begin else None
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = here.prepare(model, optimizer)
        if saved:
            here.load_state_dict(saved["session"])
        data = Examples(24)
        for step in range(self.begin, self.steps):
            places = [(7 * step + 3 * here.rank + number) % 24 for number in range(2)]
            x, y = (torch.stack(each) for each in zip(*(data[place] for place in places), strict=True))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step + 1 == self.stop and not self.begin:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "session": here.state_dict()}, path)
