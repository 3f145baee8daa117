"""Prepared schedulers follow the run: a worker's rate is that of a single process after as many batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe
from polyrhythm.session.pace import Pace, Progress
from tests.support.combine import each_value
from tests.support.programs import Examples, mlp
from tests.support.rows import Row
from tests.support.runs import WORLDS, run_in

EPOCHS, BATCH = 3, 4
UNEQUAL = '[[hosts]]\ncount = 1\nspeed = 5.0\n[[hosts]]\nstep_time = { exponential = "10 ms" }\n'


def one_cycle(optimizer: Any, batches: int) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=EPOCHS * batches)


def cosine(optimizer: Any, batches: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=EPOCHS * batches)


def warmed(optimizer: Any, batches: int) -> LRScheduler:
    return SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=7), LambdaLR(optimizer, lambda step: 0.9**step)], [7]
    )


@dataclass
class Scheduled:
    """Trains with a scheduler that is stepped every `every` batches, or once per epoch (0); notes rates."""

    folder: Path
    build: Callable[[Any, int], LRScheduler]
    size: int = 48
    every: int = 1
    shuffle: bool = True
    looks: bool = False  # at a batch before it trains

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Examples(self.size), batch_size=BATCH, shuffle=self.shuffle)
        scheduler: Any = self.build(optimizer, len(loader))
        count, first = len(loader), {float(x[0]): number for number, x in enumerate(self.inputs())}
        model, optimizer, loader, scheduler = here.prepare(model, optimizer, loader, scheduler)
        rates, batches = [], []
        if self.looks:
            next(iter(loader))
        for epoch in range(EPOCHS):
            for number, (x, y) in enumerate(loader, 1):
                rates.append(optimizer.param_groups[0]["lr"])
                batches.append(epoch * count + first[float(x[0, 0])] // BATCH)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if self.every and number % self.every == 0:
                    scheduler.step()
            if not self.every:
                scheduler.step()
        last = scheduler.get_last_lr()[0]
        seen = {"rates": rates, "batches": batches, "last": last, "epoch": scheduler.last_epoch}
        torch.save(seen, self.folder / f"{here.rank}.pt")

    def inputs(self) -> torch.Tensor:
        return Examples(self.size).tensors[0]

    def seen(self, workers: int) -> list[dict[str, Any]]:
        return [torch.load(self.folder / f"{rank}.pt") for rank in range(workers)]

    def alone(self) -> dict[str, Any]:
        self()
        return self.seen(1)[0]


@each_value(("world", WORLDS), ("size", [48, 50]), ("build", [one_cycle, cosine, warmed]))
def test_lockstep_rates_are_those_of_a_single_process(
    world: str, size: int, build: Any, tmp_path: Path
) -> None:
    """Exactly: before each round it is the rate of its first batch, and the last rate is that of alone."""
    script = Scheduled(tmp_path, build, size)
    plain = script.alone()
    run_in(world, script)
    batches = len(plain["rates"]) // EPOCHS
    firsts = [epoch * batches + first for epoch in range(EPOCHS) for first in range(0, batches, 3)]
    for each in script.seen(3):
        assert each["rates"] == [plain["rates"][first] for first in firsts]
        assert (each["last"], each["epoch"]) == (plain["last"], EPOCHS * batches)


LOCKSTEP = [Row(each.name) for each in describe() if pr.parse(each.name).traits.lockstep]
FREE = [Row(each.name) for each in describe() if not pr.parse(each.name).traits.lockstep]


@pytest.mark.parametrize("row", LOCKSTEP, ids=str)
def test_every_lockstep_strategy_ends_with_the_rate_of_a_single_process(row: Row, tmp_path: Path) -> None:
    script = Scheduled(tmp_path, one_cycle, 50)
    plain = script.alone()
    run_in("simulated", script, strategy=row.strategy)
    assert all(each["last"] == plain["last"] for each in script.seen(3))


@pytest.mark.parametrize("row", FREE, ids=str)
def test_asynchronous_batches_have_the_rate_of_a_single_process_on_unequal_hosts(
    row: Row, tmp_path: Path
) -> None:
    """A fast worker takes more than its share of the steps, a slow one few; each batch is trained with the
    rate that it has alone. Only the first of a worker has the first rate. The run ends with the last rate."""
    script = Scheduled(tmp_path, one_cycle, 200, shuffle=False)
    plain = script.alone()
    run_in("simulated", script, strategy=row.strategy, workers=3, cluster=UNEQUAL)
    seen = script.seen(3)
    assert sorted(batch for each in seen for batch in each["batches"]) == plain["batches"]
    if row.strategy == "async":
        assert max(len(each["rates"]) for each in seen) > 1.5 * min(len(each["rates"]) for each in seen)
    for each in seen:
        assert each["rates"] == [
            plain["rates"][batch if number else 0] for number, batch in enumerate(each["batches"])
        ]
        assert each["epoch"] == each["batches"][-1] + 1
    assert max((each["epoch"], each["last"]) for each in seen) == (plain["epoch"], plain["last"])


@pytest.mark.parametrize("strategy", ["async", "gossip"])
def test_the_scheduler_of_a_replacement_continues_where_the_run_is(strategy: str, tmp_path: Path) -> None:
    """It runs the script from the start, without the batches of epochs that are over."""
    script = Scheduled(tmp_path, one_cycle, 200, shuffle=False)
    plain = script.alone()
    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [0]\nat = "200 ms"\nback = "250 ms"\n'
    summary = run_in("simulated", script, strategy=strategy, workers=3, cluster=cluster)
    assert summary["replaced"] == {"worker 0": 1}
    late = script.seen(1)[0]
    assert late["batches"][0] >= 50  # not of the first epoch
    assert late["last"] == [*plain["rates"], plain["last"]][late["epoch"]]
    assert plain["epoch"] - 3 <= late["epoch"] <= plain["epoch"]


def test_a_call_every_few_batches_counts_in_batches_of_a_single_process(tmp_path: Path) -> None:
    """With accumulation a single process would call as often per batch: 24 batches, every 2, are 12 calls."""
    script = Scheduled(tmp_path, cosine, 96, every=2)
    plain = script.alone()
    assert plain["epoch"] == EPOCHS * 12
    run_in("simulated", script, workers=2)
    assert [each["epoch"] for each in script.seen(2)] == [EPOCHS * 12] * 2
    assert all(each["last"] == plain["last"] for each in script.seen(2))


@pytest.mark.parametrize("strategy", ["allreduce", "async", "gossip"])
def test_a_call_per_epoch_is_one_step(strategy: str, tmp_path: Path) -> None:
    script = Scheduled(tmp_path, lambda optimizer, _: StepLR(optimizer, 1, 0.5), every=0)
    run_in("simulated", script, strategy=strategy)
    assert [each["last"] for each in script.seen(3)] == [0.1 * 0.5**EPOCHS] * 3


@pytest.mark.parametrize("looks", [False, True])
def test_a_call_inside_the_last_batch_of_an_epoch_is_one_step(looks: bool, tmp_path: Path) -> None:
    """Of 48 examples in batches of 4 each of 3 workers gets 4 batches."""
    script = Scheduled(tmp_path, lambda optimizer, _: StepLR(optimizer, 1, 0.5), every=4, looks=looks)
    run_in("simulated", script)
    assert [each["last"] for each in script.seen(3)] == [0.1 * 0.5**EPOCHS] * 3


@pytest.mark.parametrize("world", WORLDS)
def test_an_unprepared_scheduler_beyond_its_end_says_what_to_do(world: str, tmp_path: Path) -> None:
    """Built after prepare, for this worker's share of the steps, where it may take more."""

    def main() -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(48), batch_size=4)
        model, optimizer, loader = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        scheduler = OneCycleLR(optimizer, 0.5, total_steps=5)
        for _ in range(10):
            optimizer.step()
            scheduler.step()

    with pytest.raises(UsageError, match=r"^OneCycleLR ends after 5 steps, .* pass it to session\.prepare\("):
        run_in(world, main, strategy="async", workers=2)


def test_alone_the_error_of_pytorch_stays() -> None:
    scheduler = OneCycleLR(torch.optim.SGD(mlp().parameters(), lr=0.1), 0.5, total_steps=2)
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        for _ in range(5):
            scheduler.optimizer.step()
            scheduler.step()


PAST = "ValueError: Tried to step 3 times"


@each_value(("world", WORLDS), ("strategy", ["allreduce", "async"]), ("every", [0, 1]), ("workers", [2, 1]))
def test_a_script_that_steps_past_the_end_alone_ends_in_a_run_as_well(
    world: str, strategy: str, every: int, workers: int, tmp_path: Path
) -> None:
    """By its own calls, once per epoch or per batch. Until then it may be one that counts its own steps."""
    script = Scheduled(tmp_path, lambda optimizer, _: OneCycleLR(optimizer, 0.5, total_steps=2), every=every)
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        script.alone()
    with pytest.raises(pr.PolyrhythmError, match=PAST):
        run_in(world, script, strategy=strategy, workers=workers)


def test_a_script_that_steps_past_the_end_after_it_was_resumed_ends_as_well(tmp_path: Path) -> None:
    """4 calls of 6 were made, of each of 2 workers, and the 12 steps of the schedule are those of 6."""
    saved = {}

    def main(calls: int) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Examples(800), batch_size=4)
        scheduler: Any = OneCycleLR(optimizer, 0.5, total_steps=6)
        model, optimizer, loader, scheduler = here.prepare(model, optimizer, loader, scheduler)
        if here.rank in saved:
            scheduler.load_state_dict(saved[here.rank][0])
            here.load_state_dict(saved[here.rank][1])
        for (x, y), _ in zip(loader, range(calls), strict=False):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        saved[here.rank] = scheduler.state_dict(), here.state_dict()

    for calls in (4, 2):
        run_in("simulated", lambda calls=calls: main(calls), workers=2)
    with pytest.raises(pr.PolyrhythmError, match="Tried to step 7 times"):
        run_in("simulated", lambda: main(1), workers=2)


def test_the_end_of_a_schedule_inside_another_says_what_to_do(tmp_path: Path) -> None:
    def build(optimizer: Any, batches: int) -> LRScheduler:
        first = LinearLR(optimizer, 0.1, total_iters=2)
        return SequentialLR(optimizer, [first, OneCycleLR(optimizer, 0.5, total_steps=12)], [2])

    script = Scheduled(tmp_path, build, every=3)
    script.alone()
    with pytest.raises(UsageError, match=r"^OneCycleLR was built for 12 steps and takes more: a prepared"):
        run_in("simulated", Scheduled(tmp_path, build), workers=3)


def test_a_prepared_scheduler_saves_loads_copies_and_pickles_as_before(tmp_path: Path) -> None:
    """Its state has nothing of the run, and continues with the steps of the run."""

    def main() -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Examples(48), batch_size=4)
        scheduler: Any = StepLR(optimizer, 1, 0.5)
        keys = scheduler.state_dict().keys()
        model, optimizer, loader, scheduler = here.prepare(model, optimizer, loader, scheduler)
        assert isinstance(scheduler, StepLR) and type(scheduler).__name__ == "StepLR"
        assert scheduler.state_dict().keys() == keys
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 7, "_step_count": 8})
        for made in (copy.copy(scheduler), pickle.loads(pickle.dumps(scheduler.state_dict()))):
            assert type(made) in (StepLR, dict)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            break
        assert scheduler.last_epoch == 7 + 2

    run_in("simulated", main, workers=2)


# A metric of all workers


@dataclass
class Plateau:
    """Each worker has a loss of its own, which falls on one of them only."""

    folder: Path
    prepared: bool

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Examples(48), batch_size=4)
        scheduler: Any = ReduceLROnPlateau(optimizer, patience=0)
        if self.prepared:
            scheduler, model, optimizer, loader = here.prepare(scheduler, model, optimizer, loader)
        else:
            model, optimizer, loader = here.prepare(model, optimizer, loader)
        for epoch in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step(10.0 - epoch if here.rank == 0 else 1.0)
        torch.save(scheduler.best, self.folder / f"{here.rank}.pt")


@pytest.mark.parametrize("world", WORLDS)
def test_a_prepared_plateau_scheduler_sees_the_mean_of_all_workers(world: str, tmp_path: Path) -> None:
    run_in(world, Plateau(tmp_path, prepared=True))
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)] == [3.0] * 3


@pytest.mark.parametrize("world", WORLDS)
def test_a_plateau_scheduler_on_a_local_loss_is_found(world: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has lr=.* pass ReduceLROnPlateau to session\.prepare\(\)"):
        run_in(world, Plateau(tmp_path, prepared=False))


@pytest.mark.parametrize("strategy", ["async", "gossip", "hogwild", "adpsgd"])
def test_a_plateau_scheduler_is_refused_where_workers_do_not_wait(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau needs the mean metric .* use allreduce"):
        run_in("simulated", Plateau(tmp_path, prepared=True), strategy=strategy)


def test_a_scheduler_is_prepared_with_its_optimizer_and_once() -> None:
    """In a later call it could have been built for the steps of one worker as well as for those of all."""

    def main(again: bool) -> None:
        here, model = pr.init(), mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        other = optimizer if again else torch.optim.SGD(mlp().parameters(), lr=0.1)
        scheduler = StepLR(other, 1)
        here.prepare(model, optimizer, *(() if again else (scheduler,)))
        here.prepare(scheduler)

    with pytest.raises(UsageError, match=r"StepLR was passed to .* without its optimizer"):
        pr.simulate(lambda: main(again=False), strategy="allreduce")
    with pytest.raises(UsageError, match="pass all models, optimizers and schedulers to one call"):
        pr.simulate(lambda: main(again=True), strategy="allreduce")


def test_pace_without_a_loader_is_that_of_the_worker() -> None:
    assert [Pace([]).steps() for _ in range(3)] == [1, 1, 1]


def test_progress_does_not_go_back() -> None:
    """A batch of a lost worker comes late."""
    progress = Progress()
    for position in (3, 9, 4, 10):
        progress.give(position, 0, 2)
    assert progress.count == (4, 10, 8)


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.1)],
    ids=["momentum", "betas"],
)
@pytest.mark.parametrize("world", WORLDS)
def test_servers_follow_a_momentum_that_cycles(world: str, make: Any, tmp_path: Path) -> None:
    """OneCycleLR sets more than the rate, and servers get all of it with each update."""

    def main() -> None:
        session = pr.init()
        torch.manual_seed(0)
        model = mlp()
        optimizer: Any = make(model.parameters())
        loader = DataLoader(Examples(48), batch_size=BATCH)
        scheduler: Any = OneCycleLR(optimizer, 0.3, total_steps=len(loader))
        model, optimizer, loader, scheduler = session.prepare(model, optimizer, loader, scheduler)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        group = optimizer.param_groups[0]
        torch.save((session.consensus().state_dict(), group.get("betas", group.get("momentum"))), path)

    path = tmp_path / "alone.pt"
    main()
    alone, last = torch.load(path)
    path = tmp_path / "run.pt"
    run_in(world, main, strategy="async", workers=1)
    found, end = torch.load(path)
    assert end == last and all(torch.equal(alone[name], found[name]) for name in alone)
