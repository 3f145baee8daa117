"""A run of divided models that is interrupted goes on as if it had not been."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.parallel.test_pipelines import Skipping
from tests.support.combine import few
from tests.support.runs import run_in

STEPS, BATCH = 11, 4


class Block(nn.Module):
    """Two layers to divide, one whole, dropout, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.last, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 6)
        self.shared.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.second(torch.tanh(self.first(x))))
        h = self.norm(torch.tanh(self.left(h)) + torch.tanh(self.right(h)))
        return self.shared(torch.tanh(self.last(h)))


@dataclass
class Saving:
    """Trains by steps, and saves after one of them; with `begin` it continues from there."""

    folder: Path
    stop: int
    begin: int = 0
    adam: bool = False
    scheduled: bool = False

    def __call__(self) -> None:
        torch.manual_seed(4)
        here = pr.init()
        model = Block().double()
        make = torch.optim.Adam if self.adam else lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)
        ends = [each for name, each in model.named_parameters() if "last" in name]
        rest = [each for name, each in model.named_parameters() if "last" not in name]
        optimizer = make([{"params": rest}, {"params": ends, "lr": 0.02}], lr=0.05)  # type: ignore[operator]
        data = TensorDataset(torch.randn(40, 6).double(), torch.randn(40, 6).double())
        loader = DataLoader(data, BATCH, shuffle=True)
        path = self.folder / f"{here.worker}.pt"
        saved = torch.load(path, weights_only=True) if self.begin else None
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        if saved:
            scheduler.load_state_dict(saved["scheduler"])
        model, optimizer, loader = here.prepare(model, optimizer, loader, loss=F.mse_loss)
        if saved:
            here.load_state_dict(saved["session"])
        step = self.begin
        while step < STEPS:
            for x, y in loader:
                optimizer.zero_grad()
                noise = x + 0.01 * torch.randn_like(x)
                if self.scheduled:
                    here.backward(noise, y)
                else:
                    F.mse_loss(model(noise), y).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                if step == self.stop and not self.begin:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    state |= {"scheduler": scheduler.state_dict(), "session": here.state_dict()}
                    torch.save(state, path)
                if step == STEPS:
                    break


SPLITS = [
    "allreduce@pipeline:2",
    "allreduce@tensor:2,column=first,row=second",
    "allreduce@branches:2,modules=left/right",
    "pipeline:2@tensor:2,column=first,row=second",
    "allreduce+topk:0.3@pipeline:2",
    "local:3+int8@pipeline:2",
    "gossip@pipeline:2",
    "diloco:3@tensor:2,column=first,row=second",
    "async@pipeline:2",
    "ssp:1+topk:0.4@pipeline:2",
    "easgd@pipeline:2",
    "adpsgd@pipeline:2",
    "hogwild@pipeline:2",
    "streaming-diloco:4,fragments=2@pipeline:2",
]


@few("strategy", SPLITS, quick=14)
@pytest.mark.parametrize("adam", [False, True])
def test_a_divided_model_resumes_to_the_same_bits(strategy: str, adam: bool, tmp_path: Path) -> None:
    def digest(begin: int) -> Any:
        script = Saving(tmp_path, 7, begin, adam)
        return run_in("simulated", script, strategy=strategy, workers=4)["digest"]

    assert digest(0) == digest(7)
