"""Laws of saved schedulers: a run that resumes has the rates of the run that went on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.programs import Examples, mlp
from tests.support.runs import run_in
from tests.support.saving import EQUAL, UNEQUAL

EPOCHS, BATCHES, BATCH = 3, 24, 2


@dataclass
class Saved:
    """Trains with a prepared scheduler, saves everything after `stop` steps, and may resume from there.

    `ahead`: it saves when it has got its next batch. `loads` says when the resumed script loads the
    scheduler; "fresh" is not at all.
    """

    folder: Path
    stop: int
    resumes: bool = False
    loads: Literal["before", "after", "fresh"] = "before"
    every: int = 1
    ahead: bool = False
    schedulers: int = 1

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = Examples(BATCHES * BATCH)
        scheduler: Any = OneCycleLR(optimizer, 0.5, total_steps=EPOCHS * BATCHES)
        more: list[LRScheduler] = [StepLR(optimizer, 99) for _ in range(self.schedulers - 1)]
        path = self.folder / f"{here.rank}.pt"
        saved = torch.load(path) if self.resumes else None
        if saved:
            model.load_state_dict(saved["model"])
            if self.loads != "fresh":
                optimizer.load_state_dict(saved["optimizer"])
            if self.loads == "before":
                scheduler.load_state_dict(saved["scheduler"])
        model, optimizer, loader, scheduler, *_ = here.prepare(
            model, optimizer, DataLoader(data, BATCH), scheduler, *more
        )
        if saved:
            here.load_state_dict(saved["session"])
            if self.loads == "after":
                scheduler.load_state_dict(saved["scheduler"])
        place = {float(x[0]): number // BATCH for number, x in enumerate(data.tensors[0])}
        seen, step, first = [], saved["step"] if saved else 0, saved["epoch"] if saved else 0

        def save() -> None:
            if step == self.stop and not self.resumes:
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                state = {name: copy.deepcopy(each.state_dict()) for name, each in parts.items()}
                torch.save({**state, "session": here.state_dict(), "step": step, "epoch": epoch}, path)

        for epoch in range(first, EPOCHS):
            for x, y in loader:
                if self.ahead:
                    save()
                seen.append((epoch * BATCHES + place[float(x[0, 0])], scheduler.last_epoch))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                step += 1
                if step % self.every == 0:
                    scheduler.step()
                if not self.ahead:
                    save()
        torch.save((seen, scheduler.last_epoch), self.folder / f"seen-{here.rank}.pt")

    def seen(self, workers: int = 3) -> list[Any]:
        return [torch.load(self.folder / f"seen-{rank}.pt") for rank in range(workers)]


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [("allreduce", EQUAL), ("gossip", EQUAL), ("async", EQUAL), ("async", UNEQUAL)],
    ids=["allreduce", "gossip", "async", "async unequal"],
)
@pytest.mark.parametrize(
    ("stop", "loads", "every", "ahead"),
    [
        (3, "before", 1, False),
        (5, "after", 1, False),
        (8, "before", 1, False),  # in lockstep the end of an epoch
        (9, "after", 1, True),
        (4, "before", 3, False),
    ],
)
def test_a_resumed_run_has_the_bits_and_rates_of_the_run_that_went_on(
    strategy: str, cluster: str, stop: int, loads: Any, every: int, ahead: bool, tmp_path: Path
) -> None:
    script = Saved(tmp_path, stop, loads=loads, every=every, ahead=ahead)
    whole = run_in("simulated", script, strategy=strategy, cluster=cluster)["digest"]
    went_on = script.seen()
    resumed = run_in("simulated", replace(script, resumes=True), strategy=strategy, cluster=cluster)["digest"]
    for (before, last), (after, end) in zip(went_on, script.seen(), strict=True):
        assert (before[len(before) - len(after) :], last) == (after, end)
    assert resumed == whole


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_real_run_that_resumes_has_the_rates_of_a_single_process(strategy: str, tmp_path: Path) -> None:
    script = Saved(tmp_path, stop=3)
    run_in("real", script, strategy=strategy, workers=2)
    run_in("real", replace(script, resumes=True), strategy=strategy, workers=2)
    for seen, last in script.seen(2):
        assert seen[0][0] > 2  # it resumed
        if strategy == "allreduce":
            assert last == EPOCHS * BATCHES
        else:
            assert all(batch == step for batch, step in seen) and last == seen[-1][0] + 1


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "async"])
def test_a_new_scheduler_in_a_resumed_run_begins_at_its_first_step(strategy: str, tmp_path: Path) -> None:
    """As in a plain script, and at the same batch on all workers: 12 are over, and some more leased."""
    script = Saved(tmp_path, stop=4)
    run_in("simulated", script, strategy=strategy, cluster=EQUAL)
    run_in("simulated", replace(script, resumes=True, loads="fresh"), strategy=strategy, cluster=EQUAL)
    assert all(seen[0][1] == 0 for seen, _ in script.seen())
    if strategy != "async":
        assert [last for _, last in script.seen()] == [EPOCHS * BATCHES - 12] * 3
        return
    first = {batch - step for seen, _ in script.seen() for batch, step in seen if step}
    assert len(first) == 1 and 12 <= first.pop() <= 18


def test_a_replacement_in_a_resumed_run_continues_where_the_run_is(tmp_path: Path) -> None:
    """It loads what worker 0 had saved, which is older than the state of the others."""
    script = Saved(tmp_path, stop=4)
    run_in("simulated", script, strategy="async", cluster=EQUAL)
    cluster = EQUAL + '[[failures]]\nworkers = [0]\nat = "80 ms"\nback = "100 ms"\n'
    summary = run_in("simulated", replace(script, resumes=True), strategy="async", cluster=cluster)
    assert summary["replaced"] == {"worker 0": 1}
    seen, last = script.seen()[0]
    assert last == seen[-1][0] + 1 and all(batch == step for batch, step in seen[1:])


def test_other_schedulers_than_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    script = Saved(tmp_path, stop=4)
    run_in("simulated", script)
    with pytest.raises(UsageError, match=r"saved with 1 schedulers, but session.prepare\(\) got 2: pass the"):
        run_in("simulated", replace(script, resumes=True, schedulers=2))


def test_rates_of_a_resumed_run_are_not_noted_as_different(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each worker loads the rate and the momentum of its own last batch; a prepared scheduler sets both."""
    script = Saved(tmp_path, stop=3)
    run_in("simulated", script, strategy="async", cluster=UNEQUAL)
    rates = {torch.load(tmp_path / f"{rank}.pt")["optimizer"]["param_groups"][0]["lr"] for rank in range(3)}
    assert len(rates) > 1
    run_in("simulated", replace(script, resumes=True), strategy="async", cluster=UNEQUAL)
    assert "if that is not on purpose" not in capfd.readouterr().err
