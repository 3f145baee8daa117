"""Laws of what a worker saves besides its model: a run that is interrupted goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import MOMENTUM, Examples, mlp
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.errors import UsageError

EPOCHS = 4


def script(folder: Path, begin: int, end: int) -> None:
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
    if saved:
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


@pytest.mark.parametrize(
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
    ],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(strategy: str, tmp_path: Path) -> None:
    """Model, optimizer and session of each worker, saved and loaded: the same bits as without the pause."""

    def run(begin: int, end: int) -> str:
        return pr.simulate(
            lambda: script(tmp_path, begin, end), workers=2, strategy=strategy, runs=None, threads=1
        )["digest"]

    whole = run(0, EPOCHS)
    run(0, EPOCHS // 2)
    assert run(EPOCHS // 2, EPOCHS) == whole


def test_only_where_it_belongs(tmp_path: Path) -> None:
    """State of another strategy, or of another model, is refused, and so is any for a process alone."""
    pr.simulate(lambda: script(tmp_path, 0, 1), workers=2, strategy="allreduce+topk:0.1", runs=None)
    with pytest.raises(UsageError, match=r"was saved under allreduce\+topk:0\.1, and this run is local"):
        pr.simulate(lambda: script(tmp_path, 1, 2), workers=2, strategy="local", runs=None)
    saved = torch.load(tmp_path / "0.pt", weights_only=True)["session"]
    with pytest.raises(UsageError, match="a process alone has no strategy"):
        pr.init().load_state_dict(saved)
    saved["layout"] = "another"
    torch.save({**torch.load(tmp_path / "0.pt", weights_only=True), "session": saved}, tmp_path / "0.pt")
    with pytest.raises(UsageError, match="was saved with another model"):
        pr.simulate(lambda: script(tmp_path, 1, 2), workers=2, strategy="allreduce+topk:0.1", runs=None)
