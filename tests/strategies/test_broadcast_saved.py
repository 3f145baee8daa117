"""The laws of saving `broadcast`: all workers save the same state, and no pulse counts twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_broadcast_laws import RANDOM, SHAPES, Watch, digests, watch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.strategies.broadcast.delivery_log import digest
from polyrhythm.strategies.broadcast.strategy import BroadcastWorker
from tests.support.combine import each_value
from tests.support.programs import MOMENTUM, Examples, mlp
from tests.support.runs import run_in
from tests.support.saving import CLUSTERS, went_on_and_resumed

__all__ = ["watch"]  # a fixture

every_shape = pytest.mark.parametrize("shape", SHAPES)


@dataclass
class Saving:
    """Trains some epochs and saves after each; resumes from the last save unless it begins with epoch 0."""

    folder: Path
    begin: int
    end: int
    forgets: int = -1
    workers: dict[int, BroadcastWorker] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        optimizer = MOMENTUM(model.parameters())
        loader = DataLoader(Examples(96), batch_size=4, shuffle=True)
        path = self.folder / f"{here.rank}.pt"
        saved = torch.load(path, weights_only=True) if self.begin else None
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model, optimizer, loader = here.prepare(model, optimizer, loader)
        if saved and here.rank != self.forgets:
            here.load_state_dict(saved["session"])
        self.workers[here.rank] = here._worker  # type: ignore[attr-defined]
        for epoch in range(self.begin, self.end):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            parts = {"model": model, "optimizer": optimizer, "session": here}
            state = {name: each.state_dict() for name, each in parts.items()}
            torch.save(state, path)
            torch.save(state, self.folder / f"{here.rank}.{epoch}.pt")


def kept(folder: Path, workers: int, epoch: int) -> list[dict[str, Any]]:
    states = [torch.load(folder / f"{rank}.{epoch}.pt", weights_only=True) for rank in range(workers)]
    return [state["session"]["worker"] for state in states]


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(mine, theirs)
        for name in ("base", "counts")
        for mine, theirs in zip(one[name], other[name], strict=True)
    )


def sent(watch: Watch) -> Tensor:
    """All pulses that all workers have sent, by parameter."""
    return torch.stack([each.sent[0] for steps in watch.emitted.values() for each in steps]).sum(0)


@every_shape
def test_resumed_broadcast_run_counts_every_pulse_once(watch: Watch, tmp_path: Path, shape: str) -> None:
    """All workers save the same k, the sum of all sent pulses, and each resumes with its residual. In the end
    all have all pulses that were sent before and after."""
    text = f"broadcast:0.004,{shape}"
    run_in("simulated", Saving(tmp_path, 0, 2), strategy=text, workers=5, runs=tmp_path, cluster=RANDOM)
    before, waited = sent(watch), {origin: steps[-1].after for origin, steps in watch.emitted.items()}
    first, *others = kept(tmp_path, 5, 1)
    assert all(alike(first, each) for each in others)
    assert torch.equal(first["counts"][0], before.to(torch.int32)) and before.any()
    assert not alike(first, kept(tmp_path, 5, 0)[0])

    watch.emitted.clear()
    watch.codes.clear()
    script = Saving(tmp_path, 2, 4)
    summary = run_in("simulated", script, strategy=text, workers=5, runs=tmp_path, cluster=RANDOM)
    for origin, steps in watch.emitted.items():
        assert all(map(torch.equal, waited[origin], steps[0].before))
    assert len(set(digests(summary).values())) == 1 and len(digests(summary)) == 5
    for worker in script.workers.values():
        assert torch.equal(worker.broadcast.log.counts[0], before + sent(watch))
        assert torch.equal(worker.base[0], first["base"][0])


@each_value(
    ("shape", [*SHAPES, "warmup=6", "warmup=6,first=2"]),
    ("stop", [4, 8]),
    ("workers", [2, 4]),
    ("cluster", CLUSTERS),
)
def test_resumed_broadcast_run_has_the_bits_of_the_run_that_went_on(
    tmp_path: Path, shape: str, stop: int, workers: int, cluster: str
) -> None:
    """In a cluster without latency: otherwise messages are on their way when workers continue.

    A save ends the warm-up, so that all workers come to the place where they save.
    """
    strategy = f"broadcast:0.004,reduce=mean,{shape}"
    went_on, resumed = went_on_and_resumed(strategy, tmp_path, stop, workers, cluster)
    assert went_on["digest"] == resumed["digest"]


@each_value(("shape", SHAPES), ("seed", range(4)))
def test_saving_broadcast_state_never_deadlocks_despite_crashes(
    tmp_path: Path, shape: str, seed: int
) -> None:
    """Workers die and are replaced while others save: the run ends, and all agree."""
    at = 60 + 45 * seed
    deaths = "".join(
        f'[[failures]]\nworkers = [{who}]\nat = "{at + more} ms"\n{back}'
        for who, more, back in ((seed % 4, 0, f'back = "{at + 70} ms"\n'), ((seed + 1) % 4, 25, ""))
    )
    summary = run_in(
        "simulated",
        Saving(tmp_path, 0, 4),
        strategy=f"broadcast:0.004,{shape}",
        workers=4,
        runs=tmp_path,
        cluster=RANDOM + deaths,
    )
    assert len(summary["lost"]) == 2 and len(set(digests(summary).values())) == 1


@pytest.mark.parametrize("back", [150, 200, 210, 320])
def test_broadcast_replacement_saves_the_same_state_as_the_others(tmp_path: Path, back: int) -> None:
    """Even if no data is left in the epoch in which it joins: it shares the next ones."""
    dies = f'[[failures]]\nworkers = [2]\nat = "120 ms"\nback = "{back} ms"\n'
    script = Saving(tmp_path, 0, 4)
    cluster = '[[hosts]]\nlatency = "1 ms"\nstep_time = "10 ms"\n'
    summary = run_in(
        "simulated", script, strategy="broadcast:0.004", workers=3, runs=tmp_path, cluster=cluster + dies
    )
    assert summary["replaced"] == {"worker 2": 1}
    for epoch in range(4):
        first, *others = (each for each in kept(tmp_path, 3, epoch) if each)
        assert all(alike(first, each) for each in others) and len(others) >= 1 + (epoch > 1)
    assert script.workers[2].replica.steps <= 24
    assert sum(each.replica.steps for each in script.workers.values()) >= 3 * 24


SLOW = '[[hosts]]\nstep_time = { exponential = "10 ms" }\nlatency = "20 ms"\nbandwidth = "60 kbit/s"\n'


@each_value(("shape", [*SHAPES[:2], "warmup=8", "warmup=30"]), ("seed", range(6)))
def test_saved_broadcast_states_agree_though_a_worker_joins_meanwhile(
    tmp_path: Path, shape: str, seed: int
) -> None:
    """Links are so slow that one save takes as long as an epoch. A worker that joins meanwhile, or has waited
    for the warm-up, adds nothing that is in the state of some and not of others."""
    lots = random.Random(seed)
    at = lots.randrange(300, 1500)
    dies = f'[[failures]]\nworkers = [{lots.randrange(4)}]\nat = "{at} ms"\nback = "{at + 100} ms"\n'
    run_in(
        "simulated",
        Saving(tmp_path, 0, 5),
        strategy=f"broadcast:0.002,{shape}",
        workers=4,
        runs=tmp_path,
        cluster=SLOW + dies,
    )
    for epoch in range(5):
        found = [each for each in kept(tmp_path, 4, epoch) if each]
        assert all(alike(found[0], each) for each in found)
    assert len(found) == 4


def test_broadcast_refuses_to_resume_from_different_checkpoints(tmp_path: Path) -> None:
    run_in("simulated", Saving(tmp_path, 0, 2), strategy="broadcast:0.004", workers=3, runs=tmp_path)
    with pytest.raises(UsageError, match="worker 0 continues from a saved state, but worker 1 does not"):
        run_in(
            "simulated",
            Saving(tmp_path, 2, 4, forgets=1),
            strategy="broadcast:0.004",
            workers=3,
            runs=tmp_path,
        )
    torch.save(torch.load(tmp_path / "2.0.pt"), tmp_path / "2.pt")  # older than those of the others
    with pytest.raises(UsageError, match="resumed from a different checkpoint"):
        run_in("simulated", Saving(tmp_path, 2, 4), strategy="broadcast:0.004", workers=3, runs=tmp_path)


def test_a_worker_that_saves_alone_waits_for_the_others_to_finish(tmp_path: Path) -> None:
    """The others never save, but the saved state is that of all workers."""

    def script() -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(96), batch_size=4)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if here.rank == 0:
            torch.save(here.state_dict(), tmp_path / "alone.pt")

    summary = run_in(
        "simulated", script, strategy="broadcast:0.004", workers=3, runs=tmp_path, cluster=RANDOM
    )
    saved = torch.load(tmp_path / "alone.pt", weights_only=True)["worker"]
    assert set(digests(summary).values()) == {digest(*saved["counts"])}


@pytest.mark.parametrize("shape", SHAPES[::2])
def test_saved_broadcast_run_resumes_on_real_processes(tmp_path: Path, shape: str) -> None:
    run = {"workers": 3, "strategy": f"broadcast:0.004,{shape}", "runs": tmp_path, "threads": 1}
    pr.run(Saving(tmp_path, 0, 2), **run)
    first, *others = kept(tmp_path, 3, 1)
    assert all(alike(first, each) for each in others) and first["counts"][0].any()
    summary = pr.run(Saving(tmp_path, 2, 4), **run)
    assert len(set(digests(summary).values())) == 1 and len(digests(summary)) == 3
    later, *others = kept(tmp_path, 3, 3)
    assert all(alike(later, each) for each in others)
    assert torch.equal(later["base"][0], first["base"][0])
    assert not torch.equal(later["counts"][0], first["counts"][0])
