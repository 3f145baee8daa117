"""The process group of torch.distributed on our transports against Gloo, 2 workers on this host.

Both groups live in the same processes, one torch thread each, and take turns. Sizes are those of the whole
tensor: the output of all_gather, the input of reduce_scatter. Send and receive is a round trip. The step of
FSDP2 is forward, backward and SGD of an MLP whose layers are sharded one by one. The ratio is Gloo's time
over ours.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import apart
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

WORKERS = 2
SIZES = (1 << 16, 1 << 20, 16 << 20)
LAYERS, WIDTH, BATCH = 6, 1024, 64
Times = dict[str, dict[str, list[float]]]  # seconds by what was measured and by system


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 5 if quick else 21
    with tempfile.TemporaryDirectory() as folder:
        apart(_launch, folder, rounds)
        times: Times = json.loads((Path(folder) / "times.json").read_text())
    rows = [
        Row(
            what, 1e3 * statistics.median(each["ours"]), "ms", 1e3 * statistics.median(each["gloo"]),
            ratio=ratio(each["gloo"], each["ours"]),
        )
        for what, each in times.items()
    ]  # fmt: skip
    return rows, [f"medians of {rounds} rounds in turn"]


def _launch(folder: str, rounds: int) -> None:
    from polyrhythm.launch import run

    run(functools.partial(_worker, Path(folder), rounds), workers=WORKERS, threads=1, runs=None)


def _worker(folder: Path, rounds: int) -> None:
    import torch.distributed as dist

    import polyrhythm as pr

    session = pr.init()
    pr.integrations.process_group.install(session)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    groups = {"ours": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    times: Times = {}
    for size in SIZES:
        repeats = max(1, min(50, (8 << 20) // size))
        for name, begin in _collectives(size).items():
            systems = {system: begin(group) for system, group in groups.items()}
            _take_turns(times.setdefault(f"{name}, {_size(size)}", {}), systems, rounds, repeats)
    steps = {system: _fsdp_step(group) for system, group in groups.items()}
    _take_turns(times.setdefault("FSDP2 step", {}), steps, rounds, repeats=2)
    if session.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))


def _take_turns(
    found: dict[str, list[float]], systems: dict[str, Callable[[], None]], rounds: int, repeats: int
) -> None:
    import torch.distributed as dist

    for number in range(-1, rounds):  # the first round is a rehearsal
        for name in list(systems) if number % 2 else list(reversed(systems)):
            systems[name]()  # all are awake
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                systems[name]()
            seconds = (time.perf_counter() - began) / repeats
            if number >= 0:
                found.setdefault(name, []).append(seconds)


def _collectives(size: int) -> dict[str, Callable[[ProcessGroup], Callable[[], None]]]:
    """By name: makes tensors for a group, and returns what to measure."""
    import torch
    import torch.distributed as dist

    whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // WORKERS)

    def exchange(group: ProcessGroup, tensor: Tensor) -> None:
        if dist.get_rank():
            dist.recv(tensor, 0, group)
            dist.send(tensor, 0, group)
        else:
            dist.send(tensor, 1, group)
            dist.recv(tensor, 1, group)

    def call(function: Callable[..., Any], *tensors: Tensor) -> Callable[[ProcessGroup], Callable[[], None]]:
        return lambda group: functools.partial(function, *tensors, group=group)

    return {
        "all_reduce": call(dist.all_reduce, whole),
        "all_gather": call(dist.all_gather_single, whole, part),
        "reduce_scatter": call(dist.reduce_scatter_single, part, whole),
        "send and receive": lambda group: functools.partial(exchange, group, whole),
    }


def _fsdp_step(group: ProcessGroup) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
