"""`allreduce` against DistributedDataParallel, 2 workers on this host, batch 50 each.

Both systems train the Fashion-MNIST network (1,111,946 parameters), then an MLP of 24,697,866, in the same
two processes, one torch thread each, on the same data, in alternating blocks of steps. A third model that
exchanges nothing takes its turn too: what a step costs beyond it is the price of the exchange.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import apart
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    from torch import nn

WORKERS, BATCH = 2, 50
NETWORK = "Fashion-MNIST network"


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for name, steps in ((NETWORK, 10), ("MLP of 25M", 4)):
        more, note = against_ddp(name, 5 if quick else 25, steps)
        rows += more
        notes.append(note)
    return rows, notes


def against_ddp(name: str, rounds: int, steps: int) -> tuple[list[Row], str]:
    """Samples per second of one model, in `rounds` blocks of `steps` steps of each system."""
    with tempfile.TemporaryDirectory() as folder:
        apart(_launch, folder, name, rounds, steps)
        times = json.loads((Path(folder) / "times.json").read_text())
    speed = {each: [steps * BATCH * WORKERS / seconds for seconds in times[each]] for each in times}
    middle = {each: statistics.median(values) for each, values in speed.items()}
    rows = [
        Row(
            f"{name}: samples/s against DDP", middle["ours"], "/s", middle["ddp"],
            ratio=ratio(speed["ours"], speed["ddp"]), bar=1.1,
        ),
        Row(
            f"{name}: against no exchange", middle["ours"], "/s", middle["alone"],
            ratio=ratio(speed["ours"], speed["alone"]),
        ),
    ]  # fmt: skip
    beyond = {each: 1 - ratio(times["alone"], times[each]) for each in ("ours", "ddp")}
    return rows, (
        f"{name}: of a step of ours {beyond['ours']:.0%} is beyond one without exchange, of DDP's "
        f"{beyond['ddp']:.0%}"
    )


def _launch(folder: str, name: str, rounds: int, steps: int) -> None:
    from polyrhythm.launch import run

    program = functools.partial(_worker, Path(folder), name, rounds, steps)
    run(program, workers=WORKERS, strategy="allreduce", threads=1, runs=None)


def network() -> nn.Module:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def perceptron() -> nn.Module:
    from torch import nn

    sizes = [784, *[2048] * 6, 1024]
    layers = [each for a, b in itertools.pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(1024, 10))


def _worker(folder: Path, name: str, rounds: int, steps: int) -> None:
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import polyrhythm as pr

    session = pr.init()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=session.rank, world_size=WORKERS)
    data = [(torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))) for _ in range(8)]

    def block(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        distributed.barrier()
        began = time.perf_counter()
        for number in range(steps):
            x, y = data[number % len(data)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        distributed.barrier()
        return time.perf_counter() - began

    build = network if "network" in name else perceptron

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    theirs = DistributedDataParallel(build())
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    alone = made()
    loader = DataLoader(TensorDataset(torch.zeros(2)), batch_size=1)
    ours, our_optimizer, _ = session.prepare(*made(), loader)

    # In an empty context there is no session, so that only our own blocks have our hook after backward.
    systems: dict[str, Callable[[], float]] = {
        "ours": lambda: block(ours, our_optimizer),
        "ddp": lambda: contextvars.Context().run(block, theirs, their_optimizer),
        "alone": lambda: contextvars.Context().run(block, *alone),
    }
    for system in systems.values():
        system()
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        order = list(systems) if number % 2 else list(reversed(systems))
        for each in order:
            times[each].append(systems[each]())
    distributed.destroy_process_group()
    if session.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
