"""Runs without a server that are saved at an arbitrary step and resumed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value, few
from tests.support.programs import MOMENTUM, Examples, mlp
from tests.support.runs import run_in

STEPS = 12
# No two workers step at the same time. Without latency all leave a snapshot at the same time.
SPEEDS = "".join(f"[[hosts]]\ncount = 1\nspeed = {1 / (1 + 0.137 * rank)}\n" for rank in range(5))
LOCKSTEP = [
    "gossip",
    "gossip:exponential",
    "gossip:order=step-then-mix",
    "gossip:exponential,order=step-then-mix",
    "choco",
    "choco:0.5,topology=complete",
    "choco:0.5+topk:0.3",
    "choco:0.5+randomk:0.4",
    "choco:topology=complete+int4:dense=1d",
    "push",
    "push:2",
    "push:1,fanout=2",
    "noloco:1",
    "noloco:4",
]
ASYNCHRONOUS = ["adpsgd", "adpsgd:ring"]


@dataclass
class Saving:
    """Steps whose batches depend on rank and step; saves after step `at`, or resumes there."""

    folder: Path
    at: int | None = None
    resumed: bool = False
    forgets: int = -1  # this worker does not load its state
    steps: int = STEPS
    looks: bool = False  # calls consensus() before it saves; twice: the first takes time, so replies arrive

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer = MOMENTUM(model.parameters())
        path = self.folder / f"{here.rank}.pt"
        saved = torch.load(path, weights_only=True) if self.resumed else None
        model, optimizer = here.prepare(model, optimizer)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            if here.rank != self.forgets:
                here.load_state_dict(saved["session"])
        for step in range(self.steps + 1):
            if step == self.at and not self.resumed:
                for _ in range(2 if self.looks else 0):
                    here.consensus()
                torch.save({"session": here.state_dict(), "optimizer": optimizer.state_dict()}, path)
            if step == self.steps or (self.resumed and step < (self.at or 0)):
                continue
            self.take(here, model, optimizer, step)

    def take(self, here: Any, model: Any, optimizer: Any, step: int) -> None:
        data = Examples(24)
        places = [(7 * step + 3 * here.rank + number) % 24 for number in range(2)]
        x, y = (torch.stack(each) for each in zip(*(data[place] for place in places), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():  # so that parameters are not what was published last
            model[0].weight.mul_(1 - 0.001 * here.rank)


def digest(script: Callable[[], None], strategy: str, workers: int = 5) -> Any:
    return simulated(script, strategy, workers)["digest"]


def simulated(script: Callable[[], None], strategy: str, workers: int) -> dict[str, Any]:
    folder = script.folder  # type: ignore[attr-defined]
    (folder / "speeds.toml").write_text(SPEEDS)
    return pr.simulate(
        script, workers=workers, strategy=strategy, cluster=folder / "speeds.toml", runs=None, threads=1
    )


@each_value(("strategy", LOCKSTEP), ("at", [0, 1, 2, 5, 7, 10, STEPS]))
def test_a_run_in_lockstep_resumes_from_any_step(strategy: str, at: int, tmp_path: Path) -> None:
    """To the same bits, and saving changes none."""
    saving = digest(Saving(tmp_path, at), strategy)
    assert saving == digest(Saving(tmp_path), strategy)
    assert saving == digest(Saving(tmp_path, at, resumed=True), strategy)


@each_value(("strategy", ["gossip", "gossip:exponential", "gossip:random:2"]), ("at", [0, 1, 2, 5, STEPS]))
def test_gossip_resumes_from_a_state_saved_after_a_consensus(strategy: str, at: int, tmp_path: Path) -> None:
    """To the same bits, though some have differences to their neighbors in place of what they published."""
    saving = digest(Saving(tmp_path, at, looks=True), strategy)
    assert saving == digest(Saving(tmp_path), strategy)
    assert saving == digest(Saving(tmp_path, at, resumed=True), strategy)


@each_value(("strategy", ASYNCHRONOUS), ("at", [0, 1, 2, 5, 7, 10, STEPS]))
def test_an_asynchronous_run_resumes_from_any_step(strategy: str, at: int, tmp_path: Path) -> None:
    """To the same bits as the run that saved and went on, though workers wait for each other nowhere else."""
    assert digest(Saving(tmp_path, at), strategy) == digest(Saving(tmp_path, at, resumed=True), strategy)


# --- snapshots of workers that wait for nobody ------------------------------------------------------


@dataclass
class Averaging:
    """Each worker starts at its rank, and only averages move it. It saves before the step `at`."""

    folder: Path
    at: int
    steps: int = 20

    def __call__(self) -> None:
        here = pr.init()
        model = torch.nn.Linear(3, 1).double()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(here.rank)
        for step in range(self.steps):
            if step == self.at:
                torch.save(here.state_dict(), self.folder / f"{here.rank}.pt")
            model(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()

    def saved(self, workers: int) -> list[torch.Tensor]:
        states = [torch.load(self.folder / f"{rank}.pt")["worker"] for rank in range(workers)]
        return [state["parameters"][0] for state in states]


LINKS = '[[hosts]]\nstep_time = { exponential = "10 ms" }\nlatency = "7 ms"\nbandwidth = "1 Mbit/s"\n'


@each_value(("seed", range(6)), ("topology", ["complete", "ring"]))
def test_adpsgd_snapshots_contain_each_average_on_both_sides(
    simulate: Any, tmp_path: Path, seed: int, topology: str
) -> None:
    """The mean of the saved states is that of the run, though averages were on their way."""
    script = Averaging(tmp_path, at=3 + seed)
    simulate(script, f"adpsgd:{topology}", 5, cluster=LINKS, seed=seed)
    saved = torch.stack(script.saved(5))
    assert (saved.mean(0) - 2).abs().max() < 1e-12 and 0.01 < saved.std(0).max() < 1.5


def test_adpsgd_snapshots_on_real_processes_contain_each_average_on_both_sides(tmp_path: Path) -> None:
    script = Averaging(tmp_path, at=10)
    run_in("real", script, strategy="adpsgd", workers=4, runs=tmp_path)
    assert (torch.stack(script.saved(4)).mean(0) - 1.5).abs().max() < 1e-12


def test_adpsgd_replacement_takes_part_in_later_snapshots(simulate: Any, tmp_path: Path) -> None:
    """It skips the places where the others saved before it joined; no run resumes from those states."""

    def script() -> None:
        here = pr.init()
        model = mlp()
        loader: Any = DataLoader(Examples(60), batch_size=2)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        for epoch in range(4):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            name = f"{epoch}.{here.rank}.{here._node.incarnation}.pt"  # type: ignore[attr-defined]
            torch.save(here.state_dict(), tmp_path / name)

    crash = '[[hosts]]\nlatency = "1 ms"\n[[failures]]\nworkers = [1]\nat = "160 ms"\nback = "180 ms"\n'
    summary = simulate(script, "adpsgd", 3, cluster=crash)
    assert summary["joined"] == 1
    states = {path.stem: torch.load(path)["worker"] for path in tmp_path.glob("?.?.?.pt")}
    assert states["0.1.0"] and not states["0.1.1"]
    assert {states[f"3.{worker}"]["snapshot"] for worker in ("0.0", "1.1", "2.0")} == {(4 << 32) + 1}

    def resumed() -> None:
        here = pr.init()
        model = mlp()
        here.prepare(model, MOMENTUM(model.parameters()), DataLoader(Examples(96), batch_size=4))
        here.load_state_dict(torch.load(tmp_path / f"0.{here.rank}.1.pt"))

    for rank in (0, 2):
        torch.save(torch.load(tmp_path / "0.1.1.pt"), tmp_path / f"0.{rank}.1.pt")
    with pytest.raises(
        UsageError, match="has none of the values that adpsgd saves, so a run cannot resume from it"
    ):
        simulate(resumed, "adpsgd", 3)


# --- what is refused --------------------------------------------------------------------------------

ONE_OF_EACH = ["adpsgd", "gossip", "push:1", "gossip:order=step-then-mix", "choco", "push", "noloco:4"]


@pytest.mark.parametrize("strategy", ONE_OF_EACH)
def test_a_worker_that_does_not_load_its_state_is_refused(strategy: str, tmp_path: Path) -> None:
    """Not left to wait for rounds that never come, nor silently mixed with the others."""
    digest(Saving(tmp_path, 6), strategy, 3)
    with pytest.raises(UsageError, match="either each worker loads the state that it saved itself"):
        digest(Saving(tmp_path, 6, resumed=True, forgets=1), strategy, 3)


@few("strategy", ONE_OF_EACH, quick=3)
def test_states_of_different_steps_are_refused(strategy: str, tmp_path: Path) -> None:
    """One worker loads what it saved earlier, or in an earlier snapshot."""
    early, late = tmp_path / "early", tmp_path / "late"
    early.mkdir()
    late.mkdir()
    digest(Saving(early, 3), strategy, 3)
    digest(Saving(late, 6), strategy, 3)
    other = torch.load(early / "1.pt")
    if strategy == "adpsgd":
        other["session"]["worker"]["snapshot"] = 2
    torch.save(other, late / "1.pt")
    with pytest.raises(UsageError, match="either each worker loads the state that it saved itself"):
        digest(Saving(late, 6, resumed=True), strategy, 3)


@few("strategy", ONE_OF_EACH, quick=2)
def test_resuming_with_another_number_of_workers_is_refused(strategy: str, tmp_path: Path) -> None:
    digest(Saving(tmp_path, 6), strategy, 3)
    with pytest.raises(UsageError, match="saved by 3 workers, but this run has 2: use --workers 3"):
        digest(Saving(tmp_path, 6, resumed=True), strategy, 2)


@few("strategy", ONE_OF_EACH, quick=2)
def test_loading_after_the_first_step_is_refused(strategy: str, tmp_path: Path) -> None:
    class Late(Saving):
        def take(self, here: Any, model: Any, optimizer: Any, step: int) -> None:
            super().take(here, model, optimizer, step)
            here.load_state_dict(torch.load(self.folder / f"{here.rank}.pt")["session"])

    digest(Saving(tmp_path, 6), strategy, 3)
    with pytest.raises(UsageError, match="must be called before the first step"):
        digest(Late(tmp_path, 6, resumed=True), strategy, 3)
