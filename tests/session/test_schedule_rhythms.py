"""Prepared schedulers in scripts with other rhythms than a call per batch of one loader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset

import polyrhythm as pr
from polyrhythm.session import patches
from polyrhythm.session.pace import Count, Pace, Progress
from polyrhythm.session.schedules import mean_metric
from tests.support.combine import few
from tests.support.programs import Examples, mlp
from tests.support.runs import WORLDS, run_in

BATCH = 4


class Stream(IterableDataset[Any]):
    """48 examples, but it does not say so."""

    def __iter__(self) -> Iterator[Any]:
        return (Examples(48)[index] for index in range(48))


def endless(loader: Any) -> Iterator[Any]:
    """Batches for a script that counts its steps."""
    while True:
        yield from loader


@dataclass
class Counted:
    """Counts steps over an endless loop, and steps the scheduler after every `every`-th."""

    folder: Path
    steps: int  # of a single process
    every: int = 1
    loader: Callable[[], DataLoader[Any]] = lambda: DataLoader(Examples(48), BATCH, shuffle=True)
    batches: Callable[[Any], Iterator[Any]] = endless
    build: Callable[[Any, int], LRScheduler] = CosineAnnealingLR
    alike: bool = True  # the workers together take as many steps as a single process

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = self.build(optimizer, self.steps // self.every)
        model, optimizer, loader, scheduler = here.prepare(model, optimizer, self.loader(), scheduler)
        own = self.steps // here.workers if self.alike else self.steps
        for step, (x, y) in enumerate(itertools.islice(self.batches(loader), own), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % self.every == 0:
                scheduler.step()
        seen = getattr(scheduler, "last_epoch", None), scheduler.get_last_lr()
        torch.save(seen, self.folder / f"{here.rank}.pt")

    def seen(self, workers: int = 3) -> list[Any]:
        return [torch.load(self.folder / f"{rank}.pt") for rank in range(workers)]

    def alone(self) -> Any:
        self()
        return self.seen(1)[0]


@few("every", [3, 8, 1, 5, 20], quick=2)
def test_a_step_counter_goes_across_epochs(every: int, tmp_path: Path) -> None:
    """A worker's epoch has 4 batches: the calls are not one per epoch, even where they come at its end."""
    script = Counted(tmp_path, steps=360, every=every)
    plain = script.alone()
    assert plain[0] == 360 // every
    run_in("simulated", script)
    assert script.seen() == [plain] * 3


def test_a_step_counter_goes_across_epochs_on_real_processes(tmp_path: Path) -> None:
    script = Counted(tmp_path, steps=60, every=5)
    plain = script.alone()
    run_in("real", script)
    assert script.seen() == [plain] * 3


@dataclass
class Accumulated:
    """Steps every few batches of an epoch. What is left over at its end is a step too, or dropped."""

    folder: Path
    batches: int
    every: int
    keeps: bool

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Examples(BATCH * self.batches), BATCH, shuffle=True)
        steps = math.ceil(self.batches / self.every) if self.keeps else self.batches // self.every
        scheduler: Any = OneCycleLR(optimizer, 0.5, total_steps=3 * steps)
        model, optimizer, loader, scheduler = here.prepare(model, optimizer, loader, scheduler)
        for _ in range(3):
            for number, (x, y) in enumerate(loader, 1):
                F.cross_entropy(model(x), y).backward()
                if number % self.every == 0 or (self.keeps and number == len(loader)):
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            optimizer.zero_grad()
        torch.save((scheduler.last_epoch, 3 * steps), self.folder / f"{here.rank}.pt")


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("batches", "every", "workers"), [(10, 4, 2), (11, 4, 2), (13, 4, 2), (14, 2, 3)])
def test_what_accumulation_leaves_over_counts_as_alone(
    strategy: str, keeps: bool, batches: int, every: int, workers: int, tmp_path: Path, capfd: Any
) -> None:
    """Each worker has fewer batches, and another number left over, than a single process."""
    run_in("simulated", Accumulated(tmp_path, batches, every, keeps), strategy=strategy, workers=workers)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(workers)]
    if strategy == "allreduce" and keeps:
        assert all(steps == wanted for steps, wanted in found)
    else:  # a worker knows what the run has used when it makes a call, and not at the end
        assert all(wanted - max(every, workers) <= steps <= wanted for steps, wanted in found)
    assert "takes more" not in capfd.readouterr().err


def test_a_stream_without_a_length_has_a_schedule(tmp_path: Path) -> None:
    script = Counted(tmp_path, steps=60, loader=lambda: DataLoader(Stream(), BATCH))
    plain = script.alone()
    run_in("simulated", script)
    assert script.seen() == [plain] * 3


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "async"])
def test_batches_that_a_script_leaves_out_do_not_count(strategy: str, tmp_path: Path) -> None:
    """It leaves each epoch after 2 of its 4 batches, which are 6 of 12."""

    def parts(loader: Any) -> Iterator[Any]:
        while True:
            for number, batch in enumerate(loader, 1):
                yield batch
                if number == 2:
                    break

    script = Counted(tmp_path, steps=36, batches=parts)
    plain = script.alone()
    run_in("simulated", script, strategy=strategy, cluster='[[hosts]]\nstep_time = "10 ms"\n')
    if strategy == "async":  # the last epoch is still open
        assert all(30 < steps <= 36 for steps, _ in script.seen())
    else:
        assert script.seen() == [plain] * 3


@pytest.mark.parametrize("build", [OneCycleLR, CosineAnnealingLR])
def test_a_schedule_that_ends_too_early_is_noted_once(build: Any, tmp_path: Path, capfd: Any) -> None:
    """Each worker counts the steps of a single process: together they train on 3 times the batches."""

    def made(optimizer: Any, calls: int) -> LRScheduler:
        return (
            OneCycleLR(optimizer, 0.5, calls) if build is OneCycleLR else CosineAnnealingLR(optimizer, calls)
        )

    run_in("simulated", Counted(tmp_path, 12, build=made, alike=False))
    assert capfd.readouterr().err.count(f"{build.__name__} was built for 12 steps and takes more: ") == 1
    run_in("simulated", Counted(tmp_path, 12, build=made))
    assert "takes more" not in capfd.readouterr().err


@pytest.mark.parametrize("chained", [False, True])
def test_the_schedulers_inside_a_prepared_one_are_prepared(chained: bool, tmp_path: Path, capfd: Any) -> None:
    def made(optimizer: Any, calls: int) -> LRScheduler:
        inner: list[LRScheduler] = [LinearLR(optimizer, 0.1, total_iters=7), StepLR(optimizer, 9, 0.5)]
        return ChainedScheduler(inner) if chained else SequentialLR(optimizer, inner, [7])

    script = Counted(tmp_path, steps=36, build=made)
    run_in("simulated", script)
    assert "stepped once per batch" not in capfd.readouterr().err


# --- loaders ----------------------------------------------------------------------------------------


UNEQUAL = '[[hosts]]\ncount = 1\nspeed = 5.0\n[[hosts]]\nstep_time = { exponential = "10 ms" }\n'


@pytest.mark.parametrize(("world", "strategy"), [("simulated", "async"), *((w, "allreduce") for w in WORLDS)])
def test_a_schedule_follows_a_loader_that_is_prepared_later(
    world: str, strategy: str, tmp_path: Path
) -> None:
    def main() -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = OneCycleLR(optimizer, 0.5, total_steps=100)
        model, optimizer, scheduler = here.prepare(model, optimizer, scheduler)
        data = Examples(200)
        loader, _ = here.prepare(DataLoader(data, BATCH), evaluate=DataLoader(data, BATCH))
        place = {float(x[0]): number // BATCH for number, x in enumerate(data.tensors[0])}
        seen = []
        for epoch in range(2):
            for x, y in loader:
                seen.append((epoch * 50 + place[float(x[0, 0])], scheduler.last_epoch))
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
        torch.save((seen, scheduler.last_epoch), tmp_path / f"{here.rank}.pt")

    options = {"cluster": UNEQUAL} if world == "simulated" else {}
    run_in(world, main, strategy=strategy, **options)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert max(last for _, last in found) == 100
    for seen, _ in found:
        if strategy == "async":
            assert all(batch == step for batch, step in seen[1:])
        else:  # rounds of three batches, whose examples are divided
            assert [step for _, step in seen] == [
                epoch * 50 + first for epoch in range(2) for first in range(0, 50, 3)
            ]


class Given:
    """A loader of 9 batches of which a test gives batches."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.progress.begin()

    def __len__(self) -> int:
        return 9

    def trained(self) -> Count:
        return self.progress.count


def test_two_loaders_in_step_do_not_count_twice() -> None:
    """Outside lockstep: each batch that the script gets of either calls the pace."""
    loaders = [Given(), Given()]
    pace, at = Pace(loaders), 0
    for loader in loaders:
        loader.progress.on_batch.append(lambda loader=loader: caught.append(pace.catch_up(loader)))  # type: ignore[misc]
    for position in (2, 5, 6, 11):
        caught: list[int] = []
        for loader in loaders:
            loader.progress.give(position, 0, 1)
        if at:
            assert (at + sum(caught)) == position - 1
        at += sum(caught) + pace.steps()
        assert at == position


# --- the mean of a metric ---------------------------------------------------------------------------


def test_a_metric_is_weighted_by_what_it_can_be_about() -> None:
    """By the examples of evaluation, or else of training. A worker without examples does not count."""
    assert mean_metric([(1.0, 3, 5), (5.0, 1, 5)]) == 2.0
    assert mean_metric([(1.0, 0, 3), (5.0, 0, 1)]) == 2.0
    assert mean_metric([(1.0, 0, 0), (5.0, 0, 0)]) == 3.0
    assert mean_metric([(1.0, 2, 5), (math.nan, 0, 5)]) == 1.0


@pytest.mark.parametrize("world", WORLDS)
def test_a_plateau_scheduler_sees_the_mean_of_all_examples(world: str, tmp_path: Path) -> None:
    """The loss of 3 workers on 10 examples in batches of 8: the third has none, and 0 / 0 of a loss."""

    def main() -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = ReduceLROnPlateau(optimizer)
        model, optimizer, loader, scheduler, tested = here.prepare(
            model, optimizer, DataLoader(Examples(48), BATCH), scheduler, evaluate=DataLoader(Examples(10), 8)
        )
        best = []
        for _ in range(2):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                total = sum((float(F.cross_entropy(model(x), y, reduction="sum")) for x, y in tested), 0.0)
                count = sum(len(y) for _, y in tested)
                whole = F.cross_entropy(model(Examples(10).tensors[0]), Examples(10).tensors[1])
            scheduler.best = math.inf
            scheduler.step(total / count if count else math.nan)
            best.append((scheduler.best, float(whole)))
        torch.save(best, tmp_path / f"{here.rank}.pt")

    run_in(world, main)
    for rank in range(3):
        for seen, exact in torch.load(tmp_path / f"{rank}.pt"):
            assert seen == pytest.approx(exact, rel=1e-12)


# --- the functions that are replaced ----------------------------------------------------------------


def test_functions_of_pytorch_are_replaced_only_while_scripts_run(tmp_path: Path) -> None:
    names = [(owner, name) for owner, name, _ in patches._REPLACEMENTS]
    before = [getattr(*each) for each in names]
    run_in("simulated", Counted(tmp_path, steps=12))
    assert [getattr(*each) for each in names] == before
    with patches.installed():
        with patches.installed():
            pass
        assert not any(getattr(*each) is original for each, original in zip(names, before, strict=True))
    assert [getattr(*each) for each in names] == before
