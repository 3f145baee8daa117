"""Layers divided over two processes, against one process with one thread, and against DTensor over Gloo.

In one run of two workers the first trains a plain copy of the model alone, while the other waits, and then
both train the one whose layers are divided: by turns, so that a busy minute hits both. DTensor trains the
same layers by the same plan, in a run of its own with its own turns alone.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import Together, apart, together
from benchmarks.report import Row, ratio

WIDTH, BLOCKS = 512, 4
BAR = 1.5
Speeds = dict[str, list[float]]


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 3 if quick else 9
    rows = []
    for batch in (256, 1024):
        ours: Speeds = apart(_run, batch, rounds)
        theirs = together(2, _dtensor, batch, rounds)[0]
        other = ratio(theirs["divided"], theirs["alone"])
        rows.append(
            Row(
                f"{BLOCKS} blocks of {WIDTH} → {4 * WIDTH} → {WIDTH}, batch {batch}: steps/s, tensor:2 "
                "against one process",
                statistics.median(ours["divided"]), "/s", statistics.median(ours["alone"]),
                ratio(ours["divided"], ours["alone"]), BAR, more={"DTensor over Gloo": f"{other:.3f}×"},
            )
        )  # fmt: skip
    return rows, ["one thread for each process; forward, backward and a step of SGD"]


def _model(batch: int) -> tuple[Any, Any, Any]:
    """The blocks in order, a batch, and targets."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks), torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def _step(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    """Takes a step; returns steps per second."""
    from torch.nn import functional as F

    began = time.perf_counter()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return 1 / (time.perf_counter() - began)


def _turns(rounds: int, first: bool, barrier: Callable[[], None], alone: Any, divided: Any) -> Speeds:
    """Steps per second by turns: of one worker alone, and of all together."""
    speeds: Speeds = {"alone": [], "divided": []}
    for number in range(rounds + 1):
        if first:
            speeds["alone"].append(alone())
        barrier()
        speeds["divided"].append(divided())
        barrier()
        if number == 0:  # the first turns allocate
            speeds = {"alone": [], "divided": []}
    return speeds


def _run(batch: int, rounds: int) -> Speeds:
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speeds.json"
        pr.run(_Script(batch, rounds, file), workers=2, strategy="tensor:2", threads=1, runs=None)
        found: Speeds = json.loads(file.read_text())
        return found


class _Script:
    """Trains by turns; worker 0 writes what it has measured."""

    def __init__(self, batch: int, rounds: int, file: Path) -> None:
        self.batch, self.rounds, self.file = batch, rounds, file

    def __call__(self) -> None:
        import copy

        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        model, x, y = _model(self.batch)
        plain = copy.deepcopy(model)
        alone = torch.optim.SGD(plain.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(x, y), len(x))
        model, optimizer, loader = session.prepare(model, optimizer, loader)

        def divided() -> float:
            for batch in loader:
                assert len(batch[0]) == len(x)
                break
            return _step(model, optimizer, x, y)

        found = _turns(
            self.rounds, session.is_main, session.barrier, lambda: _step(plain, alone, x, y), divided
        )
        if session.is_main:
            self.file.write_text(json.dumps(found))


def _dtensor(here: Together, batch: int, rounds: int) -> Speeds:
    """The same by `parallelize_module` over Gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    store = dist.FileStore(str(here.folder / "store"), here.count)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.count)
    plain, x, y = _model(batch)
    plan: Any = {
        f"{block}.{layer}": style()
        for block in range(BLOCKS)
        for layer, style in ((0, ColwiseParallel), (2, RowwiseParallel))
    }
    model = parallelize_module(_model(batch)[0], init_device_mesh("cpu", (here.count,)), plan)
    alone = torch.optim.SGD(plain.parameters(), lr=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = _turns(
        rounds,
        here.rank == 0,
        here.barrier,
        lambda: _step(plain, alone, x, y),
        lambda: _step(model, optimizer, x, y),
    )
    dist.destroy_process_group()
    return found
