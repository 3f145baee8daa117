"""A script that saves and resumes."""

from __future__ import annotations

from pathlib import Path

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
