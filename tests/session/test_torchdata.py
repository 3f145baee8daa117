"""StatefulDataLoader of torchdata: in a run it is a DataLoader, and the session has the position."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value
from tests.support.runs import WORLDS, run_in

loaders = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def loader(**options: Any) -> Any:
    return loaders.StatefulDataLoader(TensorDataset(torch.arange(24.0)[:, None]), batch_size=2, **options)


def script(folder: Path, before: Any = None, after: Any = None, **options: Any) -> None:
    """Trains for an epoch, saves after the first batch, and continues from there if it was saved before."""
    session = pr.init()
    model: Any = nn.Linear(1, 1)
    mine = loader(**options)
    if before is not None:
        mine.load_state_dict(before)
    model, optimizer, mine = session.prepare(model, SGD(model.parameters(), lr=0.0), mine)
    if after is not None:
        mine.load_state_dict(after)
    path, seen = folder / f"state-{session.rank}.pt", []
    if path.exists():
        session.load_state_dict(torch.load(path))
    for (x,) in mine:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        seen += x.flatten().tolist()
        if not path.exists():
            torch.save(session.state_dict(), path)
    torch.save(seen, folder / f"{session.rank}.pt")


@each_value(("world", WORLDS), ("strategy, loaders", [("allreduce", 0), ("allreduce", 2), ("async", 0)]))
def test_a_stateful_loader_is_shared_and_resumed(
    world: str, strategy: str, loaders: int, tmp_path: Path
) -> None:
    """Each example once per epoch; a run that continues has the examples that were left."""

    def seen() -> Counter[float]:
        run_in(
            world, lambda: script(tmp_path, shuffle=True, num_workers=loaders), strategy=strategy, workers=2
        )
        return Counter(each for rank in range(2) for each in torch.load(tmp_path / f"{rank}.pt"))

    assert seen() == Counter(range(24))
    rest = seen()
    assert set(rest.values()) == {1} and rest.total() < 24
    if strategy == "allreduce":
        assert rest.total() == 20


def test_a_position_of_a_single_process_is_refused(tmp_path: Path) -> None:
    alone = loader()
    next(iter(alone))
    saved = alone.state_dict()
    for given, says in [
        ({"before": saved}, "has loaded a position of its own"),
        ({"after": saved}, "was not saved"),
    ]:
        with pytest.raises(UsageError, match=says + r".*session\.state_dict\(\)"):
            run_in("simulated", lambda given=given: script(tmp_path, **given), workers=2)
