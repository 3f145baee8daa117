"""The consensus of workers that hold the parameters themselves and go at their own pace is one model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from tests.support.combine import each_value
from tests.support.programs import MOMENTUM, SPEEDS, Examples, mlp, same, trained
from tests.support.runs import WORLDS, run_in

STRATEGIES = [
    "broadcast:0.001",
    "broadcast:0.001,topology=tree,warmup=3",
    "adpsgd",
    "hogwild",
    "hogwild:lock=yes",
]


class Showing:
    """Trains, and each worker keeps the consensus in the middle and at the end of each epoch."""

    def __init__(self, folder: Path, epochs: int = 3) -> None:
        self.folder, self.epochs = folder, epochs

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(48), batch_size=2, shuffle=True)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        shown = [here.consensus().state_dict()]
        for _ in range(self.epochs):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if step == 0:  # each worker has at least one batch
                    shown.append(here.consensus().state_dict())
            shown.append(here.consensus().state_dict())
        torch.save(shown, self.folder / f"{here.rank}.pt")


@each_value(("strategy", STRATEGIES), ("world", WORLDS))
def test_the_consensus_is_one_model_and_the_last_is_the_result(
    world: str, strategy: str, tmp_path: Path
) -> None:
    """All workers that call it together get the same bits; at the end these are the bits of the run."""
    summary = run_in(
        world, Showing(tmp_path), strategy=strategy, workers=3, runs=tmp_path,
        cluster=SPEEDS["heterogeneous"] if world == "simulated" else None,
    )  # fmt: skip
    shown = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    assert [len(each) for each in shown] == [7, 7, 7]
    for together in zip(*shown, strict=True):
        assert all(same(together[0], each) for each in together[1:])
    assert same(shown[0][-1], trained(summary)) and not same(shown[0][-1], shown[0][-2])
