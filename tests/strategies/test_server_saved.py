"""Laws of what a run with servers saves: one that is resumed continues as if it had not been interrupted."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe
from polyrhythm.strategies.server.clocks import Clocks
from tests.support.combine import each_value, few
from tests.support.programs import MOMENTUM, Examples, events, mlp, pushes, trained
from tests.support.runs import run_in

STEPS = 13
# Speeds that stay the same. Of unequal ones no two workers end a step at the same time.
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
            rank = min(here.rank, here.workers - 1)  # there may be more servers than workers
            saved = torch.load(self.path(rank, self.begin), weights_only=True)
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
PLAIN = [(row.name, 1) for row in describe() if pr.parse(row.name).traits.uses_servers]


# The conformance suite resumes every strategy. Here are also their fields, at several steps and speeds.
QUICK = [
    ("async:push_every=3,fetch_every=2", 2, "4", "unequal"),
    ("softsync:2,pull=next-version", 3, "6", "equal"),
    ("ssp:1", 2, "11", "unequal"), ("dc-asgd:2,adaptive=yes", 2, "1", "unequal"),
    ("ormo:prefetch=yes", 2, "6", "equal"), ("dana-zero+topk:0.3,warmup=20", 2, "4", "unequal"),
    ("delayed-nesterov:3,dynamic=yes", 2, "11", "unequal"), ("async+powersgd", 2, "6", "equal"),
]  # fmt: skip
ALL = [
    (strategy, servers, saves, speeds)
    for number, (strategy, servers) in enumerate([*PLAIN, *VARIANTS, *CODED])
    for saves, speeds in zip(("1,6", "4,11"), sorted(SPEEDS, reverse=number % 2 == 1), strict=True)
]


@few("strategy, servers, saves, speeds", [*QUICK, *ALL], quick=len(QUICK))
def test_resumed_run_with_servers_has_the_same_bits(
    tmp_path: Path, strategy: str, servers: int, saves: str, speeds: str
) -> None:
    """Saved after any step, by workers and servers: from there on every worker sees the same parameters, and
    every server applies the same pushes at the same versions."""

    def trained(script: Saving) -> dict[str, Any]:
        return run_in(
            "simulated", script, strategy=strategy, servers=servers, cluster=SPEEDS[speeds], runs=tmp_path
        )

    steps = tuple(map(int, saves.split(",")))
    whole = Saving(tmp_path, saves=steps)
    first = trained(whole)
    for at in steps:
        resumed = Saving(tmp_path, begin=at, saves=tuple(step for step in steps if step > at))
        second = trained(resumed)
        for place, expected in whole.x.items():
            if place[1] > at:
                assert all(map(torch.equal, resumed.x[place], expected)), (at, place)
        assert first["digest"] == second["digest"]
        for server in range(first["servers"]):
            later, again = (applied(summary, server) for summary in (first, second))
            assert again and later[-len(again) :] == again


def applied(summary: dict[str, Any], server: int) -> list[tuple[Any, ...]]:
    """What a server did with each push, in order."""
    names = ("event", "worker", "version", "staleness", "bytes")
    return [tuple(line[name] for name in names) for line in pushes(summary, server)]


@pytest.mark.parametrize(
    "strategy", ["sync", "sync:prefetch=yes+topk:0.2", "backup:0", "easgd:3,max_staleness=0"]
)
def test_saving_does_not_change_a_synchronous_run(tmp_path: Path, strategy: str) -> None:
    plain, saving, resumed = (
        run_in("simulated", script, strategy=strategy, servers=2, cluster=SPEEDS["unequal"])["digest"]
        for script in (Saving(tmp_path), Saving(tmp_path, saves=(3, 8)), Saving(tmp_path, begin=8))
    )
    assert plain == saving == resumed


@pytest.mark.parametrize("strategy", ["sync", "sync:prefetch=yes+topk:0.2"])
def test_resumed_synchronous_run_has_the_same_bits_on_real_processes(tmp_path: Path, strategy: str) -> None:
    digests = [
        run_in("real", script, strategy=strategy, servers=2)["digest"]
        for script in (Saving(tmp_path, saves=(4,)), Saving(tmp_path, begin=4))
    ]
    assert digests[0] == digests[1]


@few("strategy", ["ormo:prefetch=yes", "async:push_every=3+int8", "dc-asgd", "delayed-nesterov:3"], quick=1)
def test_resumed_asynchronous_run_of_one_worker_has_the_same_bits_on_real_processes(
    tmp_path: Path, strategy: str
) -> None:
    """One worker has one order of events."""
    digests = [
        run_in("real", script, strategy=strategy, workers=1, servers=2)["digest"]
        for script in (Saving(tmp_path, saves=(4,)), Saving(tmp_path, begin=4))
    ]
    assert digests[0] == digests[1]


def test_real_asynchronous_workers_save_and_resume(tmp_path: Path) -> None:
    """The versions of the servers continue, and every step counts once."""
    first, second = (
        run_in("real", script, strategy="async:prefetch=yes", servers=2, runs=tmp_path)
        for script in (Saving(tmp_path, end=5, saves=(5,)), Saving(tmp_path, begin=5))
    )
    for server in range(2):
        versions = [version for _, _, version, *_ in applied(first, server) + applied(second, server)]
        assert versions == list(range(1, 3 * STEPS + 1))


# --- workers that take different numbers of steps ---------------------------------------------------

HELD = [
    "ssp:1", "backup:1", "backup:2", "softsync:3,pull=next-version", "async:max_staleness=1,prefetch=yes",
    "softsync:3,pull=next-version,prefetch=yes", "softsync:2,pull=next-version,clip=0.1", "async", "easgd:2",
    "delayed-nesterov:2", "softsync:3",
]  # fmt: skip


@dataclass
class SavingEpochs:
    """Trains epochs whose batches are shared by lease, and saves after each."""

    folder: Path
    epochs: int = 4
    size: int = 60

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        loader: Any = DataLoader(Examples(self.size), batch_size=2)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        for epoch in range(self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            torch.save(here.state_dict(), self.folder / f"{here.rank} {epoch}.pt")

    def saved(self, epoch: int, workers: int) -> list[dict[str, Any]]:
        """What each worker saved, but for those that joined later."""
        states = [
            torch.load(self.folder / f"{rank} {epoch}.pt", weights_only=True)["worker"]
            for rank in range(workers)
        ]
        return [state for state in states if state]


@each_value(("strategy", HELD), ("servers", [1, 2]))
def test_a_paused_worker_holds_nobody_back(tmp_path: Path, strategy: str, servers: int) -> None:
    """A slow worker waits to save while others still push: groups do without it, and so does the bound."""
    cluster = '[[hosts]]\ncount = 1\nspeed = 0.1\n[[hosts]]\nstep_time = { exponential = "10 ms" }\n'
    script = SavingEpochs(tmp_path)
    summary = run_in(
        "simulated", script, strategy=strategy, workers=4, servers=servers, cluster=cluster, runs=tmp_path
    )
    assert summary["steps"] == script.epochs * script.size / 2
    for epoch in range(script.epochs):
        states = script.saved(epoch, 4)
        assert len(states) == 4 and [len(each["servers"]["states"]) for each in states] == [servers, 0, 0, 0]


@each_value(("strategy", HELD), ("servers", [1, 3]))
@few("seeds", [range(1), range(1, 4)], quick=1)
def test_saving_with_servers_never_deadlocks_despite_crashes(
    tmp_path: Path, strategy: str, servers: int, seeds: range
) -> None:
    """Random deaths and returns while others save, over slow links: the run ends."""
    for seed in seeds:
        chance = random.Random(f"{strategy}/{servers}/{seed}")
        cluster = (
            '[[hosts]]\nstep_time = { exponential = "10 ms" }\nbandwidth = "1 Mbit/s"\nlatency = "2 ms"\n'
        )
        for worker in chance.sample(range(5), 3):
            at = chance.uniform(5, 250)
            cluster += f'[[failures]]\nworkers = [{worker}]\nat = "{at:.3f} ms"\n'
            if chance.random() < 0.6:
                cluster += f'back = "{at + chance.uniform(1, 80):.3f} ms"\n'
        script = SavingEpochs(tmp_path, epochs=5)
        summary = run_in(
            "simulated", script, strategy=strategy, workers=5, servers=servers, cluster=cluster, seed=seed
        )
        assert summary["samples"] >= 5 * script.size and summary["batches_undone"] == 0


def test_another_worker_keeps_the_snapshot_if_its_keeper_dies(tmp_path: Path) -> None:
    """Worker 0 dies around the time of the snapshot. If it has not saved, worker 1 has the servers' state."""
    begun = 0  # snapshots that worker 0 did not live to end
    for at in range(20, 160, 5):
        cluster = (
            '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "1 Mbit/s"\nlatency = "1 ms"\n'
            f'[[failures]]\nworkers = [0]\nat = "{at} ms"\n'
        )
        script = SavingEpochs(tmp_path, epochs=1, size=24)
        for path in tmp_path.glob("*.pt"):
            path.unlink()
        summary = run_in(
            "simulated", script, strategy="async", workers=3, servers=2, cluster=cluster, runs=tmp_path
        )
        asked = [line["sender"] for line in events(summary, "deliver") if line["kind"] == "snapshot"]
        if (tmp_path / "0 0.pt").exists():
            continue
        begun += "worker 0" in asked
        states = [torch.load(tmp_path / f"{rank} 0.pt")["worker"]["servers"] for rank in (1, 2)]
        assert [len(each["states"]) for each in states] == [2, 0]
        assert states[0]["mark"] == states[1]["mark"] and states[0]["mark"][-1] == 1
    assert begun


def test_a_replacement_passes_the_places_where_others_have_saved(tmp_path: Path) -> None:
    """It is part of the snapshots that follow, and has nothing of those before."""
    cluster = f'{SPEEDS["equal"]}[[failures]]\nworkers = [2]\nat = "120 ms"\nback = "150 ms"\n'
    script = SavingEpochs(tmp_path, epochs=6)
    summary = run_in("simulated", script, strategy="async", workers=3, cluster=cluster)
    assert summary["replaced"] == {"worker 2": 1}
    numbers = [len(script.saved(epoch, 3)) for epoch in range(6)]
    assert numbers == sorted(numbers) and numbers[0] == 2 and numbers[-1] == 3
    for epoch in range(6):
        marks = [state["servers"]["mark"] for state in script.saved(epoch, 3)]
        assert all(mark == marks[0] for mark in marks) and marks[0][2] == (epoch + 1 << 32) + 1


def test_one_that_saves_alone_waits_for_the_others_to_finish(tmp_path: Path) -> None:
    """Its state is that of the end: the servers have all that was pushed."""

    def script() -> None:
        here = pr.init()
        model: Any = mlp()
        optimizer: Any = MOMENTUM(model.parameters())
        model, optimizer = here.prepare(model, optimizer)
        for _ in range(1 + here.rank):
            model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
        if here.rank == 0:
            torch.save(here.state_dict(), tmp_path / "alone.pt")

    summary = run_in("simulated", script, strategy="async", workers=3, servers=2, runs=tmp_path)
    states = torch.load(tmp_path / "alone.pt", weights_only=True)["worker"]["servers"]["states"]
    found, final = [part for state in states for part in state["shard"]["parameters"]], trained(summary)
    names = [name for name, _ in mlp().named_parameters()]
    assert torch.equal(torch.cat(found), torch.cat([final[name].flatten() for name in names]))
    assert [state["shard"]["version"] for state in states] == [1 + 2 + 3] * 2


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync", "ssp:2", "dana-zero", "easgd:5"])
@pytest.mark.parametrize("forgets", [0, 2])
def test_a_worker_that_does_not_load_is_refused_by_servers(
    tmp_path: Path, strategy: str, forgets: int
) -> None:
    """Before it can push an update that was computed on other parameters."""
    run_in("simulated", Saving(tmp_path, end=3, saves=(3,)), strategy=strategy, servers=2)
    with pytest.raises(UsageError, match=rf"worker {forgets} has taken a step already: all workers call"):
        run_in("simulated", Saving(tmp_path, begin=3, forgets=forgets), strategy=strategy, servers=2)


def test_states_of_different_steps_are_refused_by_servers(tmp_path: Path) -> None:
    run_in("simulated", Saving(tmp_path, end=4, saves=(2, 4)), strategy="async")
    shutil.copy(tmp_path / "1 2.pt", tmp_path / "1 4.pt")
    with pytest.raises(UsageError, match="worker 1 resumed from a different checkpoint than worker 0; load"):
        run_in("simulated", Saving(tmp_path, begin=4), strategy="async")


def test_resuming_without_the_state_of_the_servers_is_refused(tmp_path: Path) -> None:
    run_in("simulated", Saving(tmp_path, end=2, saves=(2,)), strategy="async", workers=2)
    shutil.copy(tmp_path / "1 2.pt", tmp_path / "0 2.pt")
    with pytest.raises(UsageError, match=r"no worker loads the state of the servers: .* worker 0 saved"):
        run_in("simulated", Saving(tmp_path, begin=2), strategy="async", workers=2)


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (3, 1)])
def test_resuming_with_another_number_of_nodes_is_refused_by_servers(
    tmp_path: Path, workers: int, servers: int
) -> None:
    run_in("simulated", Saving(tmp_path, end=2, saves=(2,)), strategy="async", workers=3, servers=2)
    with pytest.raises(UsageError, match=rf"saved by 3 workers.* this run has {workers}\b"):
        run_in("simulated", Saving(tmp_path, begin=2), strategy="async", workers=workers, servers=servers)


def test_a_worker_without_a_saved_state_joins_the_resumed_ones(tmp_path: Path) -> None:
    """Its predecessor had died before the others saved: it starts with the servers' parameters."""
    cluster = f'{SPEEDS["equal"]}[[failures]]\nworkers = [2]\nat = "15 ms"\n'
    run_in("simulated", Saving(tmp_path, end=4, saves=(4,)), strategy="ssp:1", cluster=cluster)
    states = [torch.load(tmp_path / f"{rank} 4.pt", weights_only=True) for rank in (0, 1, 1)]
    states[2]["session"]["worker"] = {}
    for rank, state in enumerate(states):
        assert state["session"].pop("lost") == ["worker 2"]  # or a session refuses it
        torch.save(state, tmp_path / f"{rank} 4.pt")
    resumed = Saving(tmp_path, begin=4)
    summary = run_in("simulated", resumed, strategy="ssp:1", cluster=SPEEDS["equal"], runs=tmp_path)
    assert summary["steps"] == 3 * (STEPS - 4)
    assert applied(summary, 0)[0][2] == 4 + 4 + 1 + 1


def test_a_resumed_server_knows_how_far_each_worker_is() -> None:
    """By leases workers take different numbers of steps, and a bound on staleness compares them."""
    clocks = Clocks([0, 1, 2])
    for worker in (0, 0, 0, 1, 2, 2):
        clocks.tick(worker)
    resumed = Clocks([0, 1, 2, 3])
    resumed.load_state_dict(clocks.state_dict())
    assert [resumed[worker] for worker in range(4)] == [3, 1, 2, 1]  # the new one starts with the slowest
