"""Models divided over two processes, against one process with one thread.

In one run of two workers the first trains a plain copy of the model alone, while the other waits, and then
both train the divided one: by turns, so that a busy minute hits both. `torch.distributed.pipelining` over
Gloo trains the same layers in the same way, in a run of its own with its own turns alone.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.divided import Speeds, by_turns, timed
from benchmarks.processes import Together, apart, together
from benchmarks.report import Row, ratio

MICRO_BATCHES = 8
BAR = 1.5
NAMES = "MLP, 8 layers of 512, batch 2048", "transformer, 8 layers of 256, 32 × 64"


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 3 if quick else 9
    rows = []
    for name, steps in ((each, 1) for each in NAMES):
        ours: Speeds = apart(
            by_turns, partial(build, name), f"pipeline:2,micro_batches={MICRO_BATCHES}", rounds, steps
        )
        theirs = together(2, _torch, name, rounds, steps)[0]
        gained = ratio(ours["divided"], ours["alone"])
        other = ratio(theirs["divided"], theirs["alone"])
        rows.append(
            Row(
                f"{name}: steps/s, 2 stages against one process",
                statistics.median(ours["divided"]), "/s", statistics.median(ours["alone"]), gained, BAR,
                more={"torch.distributed.pipelining": f"{other:.3f}× (1F1B)"},
            )
        )  # fmt: skip
    name = NAMES[0]
    for schedule, steps, same in (
        ("1f1b", 1, ""),
        ("interleaved", 1, "Interleaved1F1B"),
        ("zerobubble", 1, "InterleavedZeroBubble"),
        ("pipedream", 4, ""),
        ("2bw", 4, ""),
    ):
        cut = "" if schedule == "pipedream" else f",micro_batches={MICRO_BATCHES}"
        strategy = f"pipeline:2,schedule={schedule}{cut}"
        speeds: Speeds = apart(by_turns, partial(build, name), strategy, rounds, steps)
        divided, alone = statistics.median(speeds["divided"]), statistics.median(speeds["alone"])
        gained = ratio(speeds["divided"], speeds["alone"])
        more = {}
        if same:
            chunks = 2 if schedule == "interleaved" else 1
            theirs = together(2, _torch, name, rounds, steps, same, chunks)[0]
            other = ratio(theirs["divided"], theirs["alone"])
            more = {"torch.distributed.pipelining": f"{other:.3f}× ({same})"}
        title = f"{name}, {schedule}: steps/s, 2 stages against one process"
        rows.append(Row(title, divided, "/s", alone, gained, more=more))
    return rows, [
        f"{MICRO_BATCHES} micro-batches, so (K-1)/(M+K-1) = 1/9 of the time is idle and 1.78× is the most; "
        "interleaved with 2 chunks: 1/17, 1.88×; zerobubble: 1/25, 1.92×; "
        "one thread for each process; forward, backward and a step of SGD"
    ]


def _model(name: str) -> tuple[Any, Any, Any]:
    """The layers in order, a batch, and targets."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name.startswith("MLP"):
        layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(*layers), torch.randn(2048, 512), torch.randn(2048, 512)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(32, 64, 256), torch.randn(32, 64, 256)


def build(name: str) -> tuple[Any, tuple[Any, ...], Any]:
    model, x, y = _model(name)
    return model, (x,), y


def _torch(
    here: Together, name: str, rounds: int, steps: int, schedule: str = "1F1B", chunks: int = 1
) -> Speeds:
    """The same by a schedule of torch over Gloo."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torch.nn import functional as F

    torch.set_num_threads(1)
    store = dist.FileStore(str(here.folder / "store"), here.count)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.count)
    plain, x, y = _model(name)
    whole, _, _ = _model(name)
    count = here.count * chunks
    mine = {
        number: nn.Sequential(*list(whole)[8 * number // count : 8 * (number + 1) // count])
        for number in range(here.rank, count, here.count)
    }
    optimizer = torch.optim.SGD([each for part in mine.values() for each in part.parameters()], lr=0.01)
    alone = torch.optim.SGD(plain.parameters(), lr=0.01)
    stages = [PipelineStage(part, number, count, torch.device("cpu")) for number, part in mine.items()]
    made: Any = get_schedule_class(schedule)
    given = stages[0] if issubclass(made, PipelineScheduleSingle) else stages
    runs = made(given, MICRO_BATCHES, loss_fn=F.mse_loss)
    speeds: Speeds = {"alone": [], "divided": []}

    def train_alone() -> None:
        alone.zero_grad()
        F.mse_loss(plain(x), y).backward()
        alone.step()

    def train() -> None:
        optimizer.zero_grad()
        runs.step(x) if here.rank == 0 else runs.step(target=y)
        optimizer.step()

    for number in range(rounds + 1):
        if here.rank == 0:
            speed = timed(train_alone, steps)
            if number:
                speeds["alone"].append(speed)
        here.barrier()
        speed = timed(train, steps)
        if number:
            speeds["divided"].append(speed)
        here.barrier()
    dist.destroy_process_group()
    return speeds
