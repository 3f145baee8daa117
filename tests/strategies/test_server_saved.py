"""Laws of what a run with servers saves: one that is resumed continues as if it had not been interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyrhythm as pr
from polyrhythm.core.registry import describe
from tests.support.combine import each_value
from tests.support.programs import MOMENTUM, pushes
from tests.support.runs import run_in

STEPS = 13
SPEEDS = {
    "equal": '[[hosts]]\nstep_time = "10 ms"\n',
    "unequal": "".join(
        f'[[hosts]]\ncount = 1\nspeed = {speed}\nstep_time = "10 ms"\n' for speed in (1.0, 0.37, 2.3)
    ),
}


class Turning(nn.Module):
    """Layers of two dtypes, of which the middle one has no gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, dtype=torch.float64)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(hidden.float())).double() if whole else hidden)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    return x, x[:, :3].argmax(1)


@dataclass
class Saving:
    """Trains from one step to another and saves after some of them; starts from what was saved."""

    folder: Path
    begin: int = 0
    end: int = STEPS
    saves: tuple[int, ...] = ()
    forgets: int = -1  # a worker that does not load what it has saved
    optimizer: Any = MOMENTUM
    look: bool = False  # at the consensus after each step
    x: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # by worker and step

    def path(self, rank: int, step: int) -> Path:
        return self.folder / f"{rank} {step}.pt"

    def __call__(self) -> None:
        here = pr.init()
        torch.manual_seed(0)
        model: Any = Turning()
        optimizer = self.optimizer(
            [
                {"params": model.first.parameters()},
                {"params": [*model.middle.parameters(), *model.last.parameters()]},
            ]
        )
        saved = None
        if self.begin:
            saved = torch.load(self.path(here.rank, self.begin), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = here.prepare(model, optimizer)
        if saved and here.rank != self.forgets:
            here.load_state_dict(saved["session"])
        for step in range(self.begin + 1, self.end + 1):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + step // 4)
            optimizer.zero_grad()
            x, y = batch(here.rank, step)
            nn.functional.cross_entropy(model(x, whole=step % 5 != 4), y).backward()
            optimizer.step()
            self.x[here.rank, step] = [each.detach().clone() for each in model.parameters()]
            if self.look:
                shown = here.consensus()
                self.x[here.rank, step] += [each.detach().clone() for each in shown.parameters()]
            if step in self.saves:
                parts = {"model": model, "optimizer": optimizer, "session": here}
                torch.save(
                    {name: each.state_dict() for name, each in parts.items()}, self.path(here.rank, step)
                )


VARIANTS = [
    ("sync:clip=0.5", 2), ("sync:prefetch=yes", 2), ("backup:1,clip=0.5", 3), ("async", 3),
    ("async:prefetch=yes", 2), ("async:push_every=3,fetch_every=2", 2), ("async:push_every=4", 1),
    ("async:weight=1/tau,discard=4", 2), ("async:weight=exp,reduce=sum,wait_for=2", 1), ("ssp:1", 2),
    ("softsync:2,pull=next-version", 3), ("softsync:2,prefetch=yes", 1), ("softsync:3", 2),
    ("dc-asgd:2,adaptive=yes", 2), ("dana-slim:prefetch=yes", 2), ("dana-zero:weight=exp", 2),
    ("ormo:prefetch=yes", 2), ("easgd:3,alpha=0.2,max_staleness=0", 2), ("delayed-nesterov:3", 2),
    ("delayed-nesterov:3,dynamic=yes", 2),
]  # fmt: skip
CODED = [
    ("sync+int8", 2), ("sync+terngrad", 2), ("sync:prefetch=yes+topk:0.2", 1), ("async+topk:0.2", 2),
    ("async:prefetch=yes+topk:0.2,pull=dense", 2), ("async:push_every=3+int4:rounding=stochastic", 2),
    ("async+powersgd", 2), ("async+threshold:0.01,adaptive=yes", 1), ("softsync:2+randomk:0.3", 2),
    ("ssp:2+qsgd", 1), ("dc-asgd+topk:0.4", 2), ("gap-aware+int8", 2), ("dana-zero+topk:0.3,warmup=20", 2),
    ("easgd:3+int4", 2), ("delayed-nesterov:3+int8", 2),
]  # fmt: skip
PLAIN = [(row.name, 0) for row in describe() if pr.parse(row.name).traits.uses_servers]


@each_value(
    ("strategy, servers", [*PLAIN, *VARIANTS, *CODED]), ("at", [1, 4, 6, 11]), ("speeds", SPEEDS),
)  # fmt: skip
def test_resumed_run_with_servers_has_the_same_bits(
    tmp_path: Path, strategy: str, servers: int, at: int, speeds: str
) -> None:
    """Saved after any step, by workers and servers: from there on every worker sees the same parameters, and
    every server applies the same pushes at the same versions."""
    whole, resumed = Saving(tmp_path, saves=(at,)), Saving(tmp_path, begin=at)
    first, second = (
        run_in("simulated", script, strategy=strategy, servers=servers, cluster=SPEEDS[speeds], runs=tmp_path)
        for script in (whole, resumed)
    )
    for place, expected in whole.x.items():
        if place[1] > at:
            assert all(map(torch.equal, resumed.x[place], expected)), place
    assert first["digest"] == second["digest"]
    for server in range(first["servers"]):
        later, again = (applied(summary, server) for summary in (first, second))
        assert again and later[-len(again) :] == again


def applied(summary: dict[str, Any], server: int) -> list[tuple[Any, ...]]:
    """What a server did with each push, in order."""
    names = ("event", "worker", "version", "staleness", "bytes")
    return [tuple(line[name] for name in names) for line in pushes(summary, server)]
