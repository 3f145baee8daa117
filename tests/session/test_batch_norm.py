"""What becomes of BatchNorm's statistics: each policy by its law, in both worlds."""

from __future__ import annotations

import copy
import doctest
import json
import os
import pickle
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.cli.entry import main as command
from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import StepsDone
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.batch_norm import policies, pooling
from polyrhythm.session.batch_norm.pooling import pooled
from polyrhythm.session.context import session
from polyrhythm.session.result import digest
from tests.support.combine import each_value, few
from tests.support.programs import (
    CLASSES,
    FEATURES,
    MOMENTUM,
    SGD,
    Examples,
    Script,
    alone,
    distance,
    mlp,
    normed,
    same,
    trained,
)
from tests.support.rows import DEFAULTS, Row
from tests.support.runs import run_in

WORLDS = {"simulated": partial(pr.simulate, threads=1), "real": partial(pr.run, threads=1)}
both_worlds = pytest.mark.parametrize("world", WORLDS)


# The law


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    offset=st.floats(-1e4, 1e4),
    seed=st.integers(0, 1000),
)
def test_pooled_mean_and_variance_equal_those_of_the_union(
    sizes: list[int], offset: float, seed: int
) -> None:
    """Mean and variance of sets that are laid together, whatever their sizes and wherever they lie."""
    generator = torch.Generator().manual_seed(seed)
    sets = [
        torch.randn(size, 3, generator=generator, dtype=torch.float64) * (1 + at) + offset + at
        for at, size in enumerate(sizes)
    ]
    means = torch.stack([each.mean(0) for each in sets])
    variances = torch.stack([each.var(0, correction=0) for each in sets])
    mean, variance = pooled(means, variances, torch.tensor(sizes, dtype=torch.float64))
    union = torch.cat(sets)
    torch.testing.assert_close(mean, union.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance, union.var(0, correction=0), rtol=1e-10, atol=1e-11)


def test_batch_norm_docstring_examples_pass() -> None:
    for module in (norms, pooling):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


def test_pooled_without_examples_weighs_all_alike() -> None:
    mean, variance = pooled(torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [5.0]]), torch.zeros(2))
    assert (mean.item(), variance.item()) == (2.0, 4.0)


# What each worker sees


class Varied(nn.Module):
    """A branch with BatchNorm on both sides, and all that BatchNorm can be set to."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(FEATURES, momentum=None)
        self.lift = nn.Conv1d(1, 4, 3, padding=1)
        self.main = nn.Sequential(
            nn.BatchNorm1d(4), nn.Tanh(), nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        )
        self.side = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, affine=False))
        self.flat = nn.BatchNorm2d(2, track_running_stats=False)
        self.deep = nn.BatchNorm3d(1, momentum=0.3)
        self.last = nn.Linear(4 * FEATURES, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.lift(self.first(x).unsqueeze(1))
        x = self.side(x) + self.main(x)
        x = self.flat(torch.tanh(x).view(-1, 2, 2, FEATURES))
        x = self.deep(x.reshape(-1, 1, 2, 2, FEATURES))
        return self.last(torch.tanh(x).flatten(1))


def varied() -> nn.Module:
    return Varied().double()


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """All buffers, apart from those of the model."""
    return {name: value.clone() for name, value in model.named_buffers()}


@dataclass
class Look:
    """Trains, and saves what each worker sees: its own buffers, the consensus, and its examples."""

    folder: Path
    model: Callable[[], nn.Module] = varied
    size: int = 50
    init: str | None = None
    shuffle: bool = False

    def __call__(self) -> None:
        session = pr.init(batch_norm=self.init)
        examples = Examples(self.size)
        model = self.model()
        loader = DataLoader(examples, batch_size=4, shuffle=self.shuffle)
        model, optimizer, loader = session.prepare(model, MOMENTUM(model.parameters()), loader)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        shown = session.consensus()
        assert shown.training and all(module.training for module in shown.modules())
        seen = {
            "own": statistics(model),
            "shown": statistics(shown),
            "parameters": {name: value.detach().clone() for name, value in shown.named_parameters()},
            "samples": session._replica.samples,  # type: ignore[attr-defined]
        }
        torch.save(seen, self.folder / f"{session.rank}.pt")

    def seen(self, workers: int) -> list[dict[str, Any]]:
        return [torch.load(self.folder / f"{rank}.pt") for rank in range(workers)]


def tracked(state: dict[str, Tensor]) -> list[str]:
    """The names of the modules whose running statistics these are."""
    return [name.removesuffix(".running_mean") for name in state if name.endswith(".running_mean")]


@both_worlds
def test_batch_norm_local_keeps_statistics_per_worker(world: str, tmp_path: Path) -> None:
    """Each shows its own, and the final model has worker 0's."""
    look = Look(tmp_path)
    summary = run_in(world, look, runs=tmp_path, batch_norm="local")
    seen = look.seen(3)
    assert summary["batch_norm"] == "local"
    assert all(same(each["own"], each["shown"]) for each in seen)
    assert not same(seen[0]["own"], seen[1]["own"])
    assert same(seen[0]["own"], {name: trained(summary)[name] for name in seen[0]["own"]})


@each_value(("world", WORLDS), ("strategy", [None, "allreduce", "local:3", "sync", "gossip", "push"]))
def test_batch_norm_rank0_uses_the_statistics_of_worker_0(
    world: str, strategy: str | None, tmp_path: Path
) -> None:
    """So does a run in which nothing is chosen."""
    look = Look(tmp_path)
    policy = None if strategy is None else "rank0"
    summary = run_in(world, look, runs=tmp_path, batch_norm=policy, strategy=strategy)
    seen = look.seen(3)
    assert summary["batch_norm"] == "rank0"
    assert all(same(each["shown"], seen[0]["own"]) for each in seen)
    assert not same(seen[0]["own"], seen[1]["own"])
    assert same(seen[0]["own"], {name: trained(summary)[name] for name in seen[0]["own"]})


@each_value(("world", WORLDS), ("strategy", ["allreduce", "local:3", "sync", "gossip", "noloco:2"]))
def test_batch_norm_mean_pools_by_the_law_of_total_variance(
    world: str, strategy: str, tmp_path: Path
) -> None:
    """Weighted by examples; batches tracked are added up; other buffers are those of worker 0."""
    look = Look(tmp_path)
    summary = run_in(world, look, runs=tmp_path, batch_norm="mean", strategy=strategy)
    seen = look.seen(3)
    weights = torch.tensor([each["samples"] for each in seen], dtype=torch.float64)
    assert weights.sum() == 2 * 50 and len(set(weights.tolist())) > 1
    share = (weights / weights.sum()).unsqueeze(1)
    assert tracked(seen[0]["own"]) == ["first", "main.0", "main.3", "side.1", "deep"]
    for name in tracked(seen[0]["own"]):
        m = torch.stack([each["own"][f"{name}.running_mean"] for each in seen])
        v = torch.stack([each["own"][f"{name}.running_var"] for each in seen])
        mean = (share * m).sum(0)
        variance = (share * (v + m.square())).sum(0) - mean.square()
        batches = sum(each["own"][f"{name}.num_batches_tracked"] for each in seen)
        assert isinstance(batches, Tensor) and batches.dtype == torch.int64 and batches == 2 * 13
        for each in [*(each["shown"] for each in seen), trained(summary)]:
            torch.testing.assert_close(each[f"{name}.running_mean"], mean, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(each[f"{name}.running_var"], variance, rtol=1e-10, atol=1e-14)
            assert torch.equal(each[f"{name}.num_batches_tracked"], batches)
            if name == "first":  # behind others the means hardly differ
                assert (each[f"{name}.running_var"] > 1.001 * (share * v).sum(0)).any()
    assert all(torch.equal(seen[0]["own"]["calls"], each["shown"]["calls"]) for each in seen)


@dataclass
class Plainly:
    """A model that came with statistics, loaded before or after `prepare`; looks before it trains and after.

    Of 10 examples for two workers the last two are worker 0's, far from all others; worker 1 borrows them.
    """

    folder: Path
    late: bool = False

    def __call__(self) -> None:
        session = pr.init()
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=None), nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
        state = {**model.state_dict(), "1.running_mean": torch.full((1,), 5.0)}
        state |= {"1.running_var": torch.full((1,), 9.0), "1.num_batches_tracked": torch.tensor(100)}
        x = torch.arange(10.0, dtype=torch.float64).unsqueeze(1)
        x[8:] = 1000.0
        if not self.late:
            model.load_state_dict(state)
        model, optimizer, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(TensorDataset(x), batch_size=2)
        )
        if self.late:
            model.load_state_dict(state)
        model[1].eval()
        before = statistics(session.consensus())
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        model[1].train()
        pickle.loads(pickle.dumps(copy.deepcopy(model)))(x)
        seen = {"before": before, "after": statistics(session.consensus()), "own": statistics(model)}
        torch.save(seen, self.folder / f"{session.rank}.pt")


@both_worlds
@pytest.mark.parametrize("late", [False, True])
def test_batch_norm_mean_shows_loaded_statistics_before_training(
    world: str, late: bool, tmp_path: Path
) -> None:
    """Nobody has trained on anything: all weigh alike. The batches it came with count once, later too."""
    run_in(world, Plainly(tmp_path, late), runs=tmp_path, batch_norm="mean", workers=2)
    for rank in range(2):
        seen = torch.load(tmp_path / f"{rank}.pt")
        for when in ("before", "after"):
            found = [seen[when][f"1.{name}"].item() for name in policies.NAMES]
            assert found == [5.0, 9.0, 100], when


@each_value(("world", WORLDS), ("policy", ["local", "rank0", "mean", "recompute"]))
def test_borrowed_batches_leave_no_trace(world: str, policy: str, tmp_path: Path) -> None:
    """Neither the examples nor the batch that is borrowed count; `mean` is then of all examples once."""
    run_in(world, Plainly(tmp_path), runs=tmp_path, batch_norm=policy, workers=2)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    own = [
        [each["own"][f"0.{name}"].item() for name in ("running_mean", "num_batches_tracked")] for each in seen
    ]
    assert own == [[pytest.approx((1 + 5 + 1000) / 3), 3], [pytest.approx((2 + 6) / 2), 2]]
    if policy == "mean":
        assert [each["after"]["0.num_batches_tracked"].item() for each in seen] == [5, 5]
        mean = (sum(range(8)) + 2000) / 10
        assert [each["after"]["0.running_mean"].item() for each in seen] == [pytest.approx(mean)] * 2


def test_batch_norm_mean_takes_one_exchange(tmp_path: Path) -> None:
    """However many modules there are: as long as worker 0's statistics take, where latency is all."""
    cluster, took = tmp_path / "cluster.toml", {}
    cluster.write_text('[[hosts]]\nlatency = "5 ms"\n')

    def main() -> None:
        here = pr.init()
        model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(7)))
        model, _ = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        begun = here._node.now()  # type: ignore[attr-defined]
        here.consensus()
        took[here.batch_norm, here.rank] = here._node.now() - begun  # type: ignore[attr-defined]

    for policy in ("rank0", "mean"):
        pr.simulate(main, workers=3, strategy="allreduce", batch_norm=policy, cluster=cluster)
    assert max(took["mean", rank] for rank in range(3)) == pytest.approx(4 * 0.005)


@each_value(("world", WORLDS), ("strategy", ["allreduce", "local:3", "sync", "async", "ssp:2"]))
def test_batch_norm_recompute_equals_the_statistics_of_all_examples(
    world: str, strategy: str, tmp_path: Path
) -> None:
    """With the agreed parameters; here of all examples, each counting once, in rounds of unequal batches."""
    look = Look(tmp_path, normed)
    summary = run_in(world, look, runs=tmp_path, batch_norm="recompute", strategy=strategy)
    examples = Examples(50).tensors[0]
    final = trained(summary)
    for each in [*({**each["shown"], **each["parameters"]} for each in look.seen(3)), final]:
        hidden = F.linear(examples, each["0.weight"], each["0.bias"])
        torch.testing.assert_close(each["1.running_mean"], hidden.mean(0), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(each["1.running_var"], hidden.var(0), rtol=1e-10, atol=1e-12)
        assert each["1.num_batches_tracked"] == 13


@both_worlds
def test_recompute_shows_the_same_on_all_workers(world: str, tmp_path: Path) -> None:
    """In lockstep: they look at the same batches. Buffers that are not BatchNorm's stay as they were."""
    look = Look(tmp_path, shuffle=True)
    summary = run_in(world, look, runs=tmp_path, batch_norm="recompute")
    seen = look.seen(3)
    assert all(same(each["shown"], seen[0]["shown"]) for each in seen)
    assert same(seen[0]["shown"], {name: trained(summary)[name] for name in seen[0]["shown"]})
    assert seen[0]["shown"]["calls"] == seen[0]["own"]["calls"] == 10


def test_recompute_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    """The statistics are part of the result, whichever worker sends it."""
    script = Script(model=normed, size=50, kills={1: 3}, pause=0.01)
    summary = run_in(
        "real", script, runs=tmp_path, batch_norm="recompute", strategy="async", workers=2, restarts=1,
        listen="tcp:127.0.0.1:0",
    )  # fmt: skip
    final = trained(summary)
    hidden = F.linear(Examples(50).tensors[0], final["0.weight"], final["0.bias"])
    assert summary["replaced"] == {"worker 1": 1}
    torch.testing.assert_close(final["1.running_mean"], hidden.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(final["1.running_var"], hidden.var(0), rtol=1e-10, atol=1e-12)


# Where workers continue without one that dies


@dataclass
class Mortal:
    """Trains, and notes after each epoch what each worker has and what it sees of all.

    On real processes `victim` kills itself in the middle of the second epoch, once; at its end, where each
    goes at its own pace, for the others may have taken all of it.
    """

    folder: Path
    victim: int = -1
    epochs: int = 4

    def __call__(self) -> None:
        here = pr.init()
        model = normed()
        loader = DataLoader(Examples(48), batch_size=2)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        late = here._late  # type: ignore[attr-defined]
        dies = here.rank == self.victim and not late
        came = statistics(model)
        for epoch in range(self.epochs):
            for number, (x, y) in enumerate(loader):
                if dies and epoch == 1 and number == 2 and here.strategy.traits.lockstep:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if dies and epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            shown = here.consensus()
            seen = {
                "own": statistics(model), "shown": statistics(shown), "came": came,
                "samples": here._replica.samples,  # type: ignore[attr-defined]
            }  # fmt: skip
            torch.save(seen, self.folder / f"{epoch}.{here.rank}.{int(late)}.pt")

    def seen(self, epoch: int, *workers: str) -> list[dict[str, Any]]:
        return [torch.load(self.folder / f"{epoch}.{worker}.pt") for worker in workers]


LIVING = ["gossip", "choco", "push", "push:1", "noloco:3"]
DIES = '[[hosts]]\nlatency = "1 ms"\nstep_time = "10 ms"\n[[failures]]\nworkers = [{}]\nat = "140 ms"\n'


def union(seen: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Of the running statistics of these workers, by their examples."""
    share = torch.tensor([each["samples"] for each in seen], dtype=torch.float64)
    share = (share / share.sum()).unsqueeze(1)
    m, v = (torch.stack([each["own"][f"1.running_{part}"] for each in seen]) for part in ("mean", "var"))
    mean = (share * m).sum(0)
    return mean, (share * (v + (m - mean).square())).sum(0)


def agrees(shown: dict[str, Tensor], seen: list[dict[str, Any]], policy: str) -> bool:
    """Whether these statistics are of those workers by the policy."""
    if policy == "rank0":
        lowest = next(each for each in seen if each["samples"])
        return all(torch.equal(shown[name], value) for name, value in lowest["own"].items())
    mean, variance = union(seen)
    return torch.allclose(shown["1.running_mean"], mean, rtol=1e-12) and torch.allclose(
        shown["1.running_var"], variance, rtol=1e-12
    )


@each_value(("strategy", LIVING), ("policy, victim", [("rank0", 0), ("mean", 1)]))
def test_batch_norm_statistics_after_a_death_are_those_of_the_survivors(
    simulate: Any, tmp_path: Path, strategy: str, policy: str, victim: int
) -> None:
    """Of three one dies for good: the statistics are those of the two others, on both, to the end."""
    script = Mortal(tmp_path)
    summary = simulate(script, strategy, 3, cluster=DIES.format(victim), batch_norm=policy)
    assert list(summary["lost"]) == [f"worker {victim}"]
    living = [f"{rank}.0" for rank in range(3) if rank != victim]
    first = script.seen(0, "0.0", "1.0", "2.0")
    assert all(agrees(each["shown"], first, policy) for each in first)
    for epoch in range(1, 4):
        seen = script.seen(epoch, *living)
        assert all(agrees(each["shown"], seen, policy) for each in seen)
    assert agrees(trained(summary), script.seen(3, *living), policy)
    if policy == "mean":
        batches = sum(int(each["own"]["1.num_batches_tracked"]) for each in seen)
        assert int(trained(summary)["1.num_batches_tracked"]) == batches


@each_value(("strategy", [*LIVING, "adpsgd", "broadcast"]), ("policy", ["rank0", "mean"]))
def test_a_replacement_starts_with_the_batch_norm_statistics_of_others(
    simulate: Any, tmp_path: Path, strategy: str, policy: str
) -> None:
    """Worker 0 dies and is replaced: the new one does not begin with statistics of nothing."""
    script = Mortal(tmp_path)
    cluster = DIES.format(0) + 'back = "170 ms"\n'
    summary = simulate(script, strategy, 3, cluster=cluster, batch_norm=policy)
    assert summary["replaced"] == {"worker 0": 1}
    late, *others = script.seen(3, "0.1", "1.0", "2.0")
    assert late["samples"] and late["came"]["1.num_batches_tracked"] > 0
    assert agrees(trained(summary), [late, *others], policy)
    assert len({float(each["came"]["1.running_mean"].sum()) for each in others}) == 1


@each_value(("strategy", LIVING), ("policy", ["rank0", "mean"]))
def test_a_replacement_that_has_not_trained_has_no_batch_norm_weight(
    simulate: Any, tmp_path: Path, strategy: str, policy: str
) -> None:
    """It is in the run, and trains from the next epoch on: till then the others' statistics are newer."""
    script = Mortal(tmp_path)
    cluster = DIES.format(0).replace("140", "100") + 'back = "115 ms"\n'
    summary = simulate(script, strategy, 3, cluster=cluster, batch_norm=policy)
    assert summary["replaced"] == {"worker 0": 1}
    late, *others = script.seen(1, "0.1", "1.0", "2.0")
    assert not late["samples"]
    assert all(agrees(each["shown"], others, policy) for each in others)


@pytest.mark.parametrize("strategy", ["gossip", "adpsgd"])
@pytest.mark.parametrize(("policy", "victim", "restarts"), [("rank0", 0, 0), ("mean", 1, 0), ("rank0", 0, 1)])
def test_batch_norm_statistics_of_survivors_agree_on_real_processes(
    tmp_path: Path, strategy: str, policy: str, victim: int, restarts: int
) -> None:
    """The final model has what those have that are there at the end, of whom one may have come late."""
    script = Mortal(tmp_path, victim)
    summary = run_in("real", script, runs=tmp_path, strategy=strategy, batch_norm=policy, restarts=restarts)
    there = [f"{rank}.0" for rank in range(3) if rank != victim]
    if summary["replaced"] and (tmp_path / f"3.{victim}.1.pt").exists():
        there.insert(victim, f"{victim}.1")
    assert list(summary["lost"]) == [f"worker {victim}"]
    assert agrees(trained(summary), script.seen(3, *there), policy)


@both_worlds
def test_workers_waiting_in_warmup_have_no_batch_norm_weight(world: str, tmp_path: Path) -> None:
    """While only worker 0 trains, it looks at the consensus: the others have seen nothing, and say so."""

    def main() -> None:
        here = pr.init()
        model = normed()
        loader = DataLoader(Examples(48), batch_size=2)
        model, optimizer, loader = here.prepare(model, MOMENTUM(model.parameters()), loader)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if here.rank == 0 and here._replica.steps == 3:  # type: ignore[attr-defined]
                shown, own = statistics(here.consensus()), statistics(model)
                assert all(torch.allclose(shown[name], value) for name, value in own.items())

    run_in(world, main, runs=tmp_path, strategy="broadcast:warmup=6", batch_norm="mean")


# One machine with the union batch


@each_value(
    ("world", WORLDS),
    ("size", [48, 50, 53]),
    ("model", [pytest.param(normed, id="plain"), pytest.param(varied, id="varied")]),
)
def test_sync_batch_norm_equals_the_union_batch(world: str, model: Any, size: int, tmp_path: Path) -> None:
    """Parameters and statistics are those of the union batch, to the last round: of 2 examples for three
    workers, where two borrow, and of 3 and 2."""
    script = Script(model=model, size=size, optimizer=MOMENTUM, epochs=3)
    summary = run_in(world, script, runs=tmp_path, batch_norm="sync")
    plain = alone(replace(script, batch=12))
    assert distance(trained(summary), plain) < 1e-10
    assert trained(summary).keys() == plain.keys()
    assert summary["samples"] == 3 * size


@pytest.mark.parametrize("script", [Script(clip=0.1), Script(accumulate=2), Script(closure=True)])
def test_sync_batch_norm_supports_clipping_accumulation_and_closures(script: Script, tmp_path: Path) -> None:
    """Clipping, accumulation and closures."""
    script = replace(script, model=varied, optimizer=MOMENTUM)
    summary = run_in("simulated", script, runs=tmp_path, batch_norm="sync")
    assert distance(trained(summary), alone(replace(script, batch=12))) < 1e-10


@few("strategy", ["allreduce", "sync", "ssp:0", "local:3"], quick=2)
def test_sync_batch_norm_has_the_same_bits_simulated_and_real(strategy: str, tmp_path: Path) -> None:
    """And so do its statistics, on every worker."""
    seen = []
    for world in WORLDS:
        look = Look(tmp_path)
        summary = run_in(world, look, runs=tmp_path, batch_norm="sync", strategy=strategy)
        views = look.seen(3)
        assert all(same(each["own"], views[0]["own"]) and same(each["shown"], each["own"]) for each in views)
        seen.append(trained(summary))
    assert same(*seen)


class Checkpointed(nn.Module):
    """Runs its forward a second time inside the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = varied()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@both_worlds
def test_sync_batch_norm_supports_activation_checkpointing(world: str, tmp_path: Path) -> None:
    """Workers wait for each other in a forward pass that is part of a backward pass."""
    script = Script(model=Checkpointed, size=53)
    summary = run_in(world, script, runs=tmp_path, batch_norm="sync")
    assert distance(trained(summary), alone(replace(script, batch=12))) < 1e-10


def test_sync_batch_norm_over_tcp_equals_the_union_batch(tmp_path: Path) -> None:
    """Where tensors travel as bytes."""
    script = Script(model=varied, size=53)
    summary = run_in("real", script, runs=tmp_path, batch_norm="sync", listen="tcp:127.0.0.1:0")
    assert distance(trained(summary), alone(replace(script, batch=12))) < 1e-10


@pytest.mark.slow
def test_sync_batch_norm_works_with_70_simulated_workers(tmp_path: Path) -> None:
    """Seventy wait for each other in the middle of their backward passes."""
    script = Script(model=varied, size=2 * 140, batch=2, epochs=1)
    summary = run_in("simulated", script, runs=tmp_path, batch_norm="sync", workers=70)
    assert distance(trained(summary), alone(replace(script, batch=140))) < 1e-10


def test_sync_batch_norm_works_with_one_example_per_worker(tmp_path: Path) -> None:
    """What BatchNorm needs two of is in the union."""
    script = Script(model=normed, size=12, batch=1)
    summary = run_in("simulated", script, runs=tmp_path, batch_norm="sync")
    assert distance(trained(summary), alone(replace(script, batch=3))) < 1e-10


def test_sync_batch_norm_keeps_autocast_per_worker(tmp_path: Path) -> None:
    """A worker that waits in the middle of a forward pass does not put the others into autocast."""

    def main() -> None:
        session = pr.init()
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        loader = DataLoader(Examples(24), batch_size=4)
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for x, y in loader:
            assert not torch.is_autocast_enabled("cpu")
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=session.rank == 0):
                out = model(x.float())
                assert out.dtype == (torch.bfloat16 if session.rank == 0 else torch.float32)
            optimizer.zero_grad()
            F.cross_entropy(out.float(), y).backward()
            assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()

    run_in("simulated", main, runs=tmp_path, batch_norm="sync", workers=2)


def test_sync_batch_norm_exchange_counts_as_waiting_time(tmp_path: Path) -> None:
    """On a slow network it is counted as waiting, and the computing stays what it was."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[hosts]]\nstep_time = "10 ms"\nlatency = "5 ms"\n')
    script = Script(model=normed)
    plain, synced = (
        pr.simulate(script, workers=2, strategy="allreduce", cluster=cluster, batch_norm=policy)
        for policy in ("local", "sync")
    )
    assert synced["compute_s"] == pytest.approx(plain["compute_s"])
    assert synced["wait_s"] > 2 * plain["wait_s"] > 0


# What must not change


class Random(TensorDataset):
    """Augments with every source of random numbers."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + np.random.rand() + random.random(), y


@dataclass
class Noisy:
    """Draws random numbers in the model, in the data and between, and shows the consensus all the time."""

    def __call__(self) -> None:
        session = pr.init()
        model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        ).double()
        loader = DataLoader(Random(*Examples(50).tensors), batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare(model, MOMENTUM(model.parameters()), loader)
        session.consensus()
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                noise = np.random.rand() + random.random() + torch.rand(()).item()
                F.cross_entropy(model(x) * (1 + 0.1 * noise), y).backward()
                optimizer.step()
                if number == 1:
                    session.consensus()
            session.consensus().eval()


@each_value(("strategy", ["allreduce", "local:3", "sync"]), ("world", WORLDS))
def test_batch_norm_policies_do_not_change_lockstep_training(
    world: str, strategy: str, tmp_path: Path
) -> None:
    """Whatever is shown, the parameters end with the same bits, after as many examples."""
    ends = {
        (summary["digest"], summary["samples"], summary["steps"])
        for policy in ("local", "rank0", "mean", "recompute")
        for summary in [run_in(world, Noisy(), runs=tmp_path, batch_norm=policy, strategy=strategy)]
    }
    assert len(ends) == 1


@pytest.mark.parametrize("strategy", ["async", "ssp:2", "softsync:2", "easgd"])
def test_recompute_does_not_disturb_training_at_ones_own_pace(strategy: str, tmp_path: Path) -> None:
    """Leases too stay as they were."""
    ends = {
        (summary["digest"], summary["samples"], summary["steps"])
        for policy in ("local", "recompute")
        for summary in [run_in("simulated", Noisy(), runs=tmp_path, batch_norm=policy, strategy=strategy)]
    }
    assert len(ends) == 1


@pytest.mark.parametrize("policy", norms.POLICIES)
def test_a_model_without_batch_norm_pays_nothing(policy: str) -> None:
    def main() -> None:
        Script()()
        assert session.get()._norms is None  # type: ignore[union-attr]

    plain = pr.simulate(Script(), workers=3, strategy="allreduce")
    summary = pr.simulate(main, workers=3, strategy="allreduce", batch_norm=policy)
    assert [summary[key] for key in ("digest", "bytes_sent")] == [plain[k] for k in ("digest", "bytes_sent")]


@pytest.mark.parametrize("policy", ["local", "rank0", "mean", "sync"])
def test_batch_norm_policies_with_one_worker_are_plain_pytorch(policy: str, tmp_path: Path) -> None:
    """Bit for bit, statistics included."""
    script = Script(model=varied, optimizer=MOMENTUM)
    assert same(
        trained(run_in("simulated", script, runs=tmp_path, batch_norm=policy, workers=1)), alone(script)
    )


def test_sync_batch_norm_keeps_names_repr_and_copies_of_the_model(tmp_path: Path) -> None:
    """Names, repr and eval mode are as before; copies, also pickled ones, wait for nobody."""

    def main() -> None:
        session = pr.init()
        model = normed()
        before = repr(model), list(model.state_dict())
        model, _, _ = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Examples(8), batch_size=4)
        )
        x = Examples(8).tensors[0][: 4 + session.rank]
        assert (repr(model), list(model.state_dict())) == before
        assert torch.equal(model.eval()(x), session.consensus()(x))
        model.train()
        plain = normed()
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            expected = plain(x)
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(other(x), expected)  # of its own batch
            assert not torch.allclose(model(x), expected)  # of the union

    run_in("simulated", main, runs=tmp_path, batch_norm="sync", workers=2)


def test_frozen_modules_keep_their_statistics(tmp_path: Path) -> None:
    """A module in eval mode while the model trains is left alone, also if the consensus is taken in eval."""

    def main() -> None:
        session = pr.init()
        model = nn.Sequential(
            nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        ).double()
        model[0].eval()
        model, optimizer, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Examples(24), batch_size=4)
        )
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        shown = session.consensus()
        assert shown[0].num_batches_tracked == 0 and torch.equal(shown[0].running_var, torch.ones(FEATURES))
        assert shown[2].num_batches_tracked == 6 and not shown[2].training

    run_in("simulated", main, runs=tmp_path, batch_norm="recompute", workers=2)


def test_recompute_looks_at_a_hundred_batches_of_many(tmp_path: Path) -> None:
    """Evenly spread over the epoch, so that data in order is seen from end to end."""

    def main() -> None:
        session = pr.init()
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
        x = torch.arange(1000, dtype=torch.float64).unsqueeze(1)
        model, _, _ = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x), batch_size=2)
        )
        shown = session.consensus()
        used = torch.cat([x[10 * number : 10 * number + 2] for number in range(100)])
        assert shown[0].num_batches_tracked == 100
        torch.testing.assert_close(shown[0].running_mean, used.mean(0))
        torch.testing.assert_close(shown[0].running_var, used.var(0))

    run_in("simulated", main, runs=tmp_path, batch_norm="recompute", workers=2)


# What is asked for, and what is wrong with it


@pytest.mark.parametrize("world", WORLDS.values())
def test_unknown_batch_norm_policy_is_refused(world: Any) -> None:
    with pytest.raises(UsageError, match=r"unknown batch_norm policy 'men'; did you mean 'mean'\?"):
        world(mlp, batch_norm="men", runs=None)


def test_unknown_batch_norm_policy_in_the_script_is_refused() -> None:
    with pytest.raises(UsageError, match="Known: local, rank0, mean, sync, recompute"):
        pr.init(batch_norm="everywhere")


@pytest.mark.parametrize("policy", ["mean", "sync"])
@pytest.mark.parametrize("strategy", ["async", "ssp:3", "backup:1", "hogwild"])
def test_batch_norm_policies_that_need_lockstep_are_refused_otherwise(
    policy: str, strategy: str, tmp_path: Path
) -> None:
    """Refused before anything starts, or when the script says so; with what would work."""
    message = rf"batch_norm={policy} needs .* such as allreduce.*use batch_norm=recompute, rank0 or local"
    with pytest.raises(UsageError, match=message):
        pr.run(mlp, workers=3, strategy=strategy, batch_norm=policy, runs=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=message):
        pr.simulate(Look(tmp_path, init=policy), workers=3, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("gossip", "continue without one that dies: use batch_norm=mean"),
        ("choco", "continue without one that dies"),
        ("push", "continue without one that dies"),
        ("noloco:4", "continue without one that dies"),
        ("adpsgd", "each goes at its own pace: use batch_norm=recompute"),
        ("broadcast", "each goes at its own pace"),
    ],
)
def test_sync_batch_norm_is_refused_where_workers_may_continue_alone(
    strategy: str, why: str, tmp_path: Path
) -> None:
    """Nobody can go on in the middle of a pass, so it is refused before anything starts."""
    with pytest.raises(UsageError, match=why):
        pr.run(mlp, workers=3, strategy=strategy, batch_norm="sync", runs=tmp_path)
    assert list(tmp_path.iterdir()) == []


@both_worlds
def test_the_batch_norm_option_overrides_the_script(world: str, tmp_path: Path) -> None:
    """Over what the script says, which wins over the default; both are recorded."""
    for asked, policy in ((None, "mean"), ("rank0", "rank0")):
        look = Look(tmp_path, init="mean")
        summary = run_in(world, look, runs=tmp_path, batch_norm=asked)
        config = json.loads((Path(summary["folder"]) / "config.json").read_text())
        assert summary["batch_norm"] == config["batch_norm"] == policy
        seen = look.seen(3)
        assert same(seen[1]["shown"], seen[0]["own"]) == (policy == "rank0")


def test_cli_batch_norm_option_sets_and_checks_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(Path(__file__).parents[1] / "scripts" / "train.py")
    arguments = ["simulate", script, "-n", "2", "-s", "allreduce", "--runs", str(tmp_path), "-q", "--json"]
    assert command([*arguments, "--batch-norm", "sync"]) == 0
    assert json.loads(capsys.readouterr().out)["batch_norm"] == "sync"
    assert command([*arguments, "--batch-norm", "never"]) == 2
    assert "unknown batch_norm policy 'never'" in capsys.readouterr().err


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_sync_batch_norm_refuses_modules_with_a_custom_forward() -> None:
    script = Script(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 8), Own(8), nn.Linear(8, CLASSES)).double()
    )
    with pytest.raises(UsageError, match=r"does not support Own \(1\)"):
        pr.simulate(script, workers=2, strategy="allreduce", batch_norm="sync")


def test_recompute_needs_a_loader() -> None:
    def main() -> None:
        model = normed()
        pr.init().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UsageError, match="needs the training loader"):
        pr.simulate(main, strategy="allreduce", batch_norm="recompute")


class Two(nn.Module):
    """Takes what it takes by name, and one thing that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, factor: float, *, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(factor * x.flatten(1) + y.unsqueeze(1))


@dataclass
class Called:
    """A script that calls its model in a way of its own."""

    call: Callable[[nn.Module, Any], Tensor]
    early: bool = False

    def __call__(self) -> None:
        session, model = pr.init(), Two()
        x, y = Examples(50).tensors
        data = [{"number": number, "target": y[number], "input": x[number]} for number in range(50)]
        model, optimizer, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
        )
        if self.early:
            assert session.consensus().norm.num_batches_tracked == 0
        assert pickle.loads(pickle.dumps(copy.deepcopy(model))).training
        for batch in loader:
            optimizer.zero_grad()
            self.call(model, batch).square().mean().backward()
            optimizer.step()
        shown = session.consensus()
        used = (2 * x + y.unsqueeze(1)).float()
        torch.testing.assert_close(shown.norm.running_mean, used.mean(0))
        torch.testing.assert_close(shown.norm.running_var, used.var(0))


@both_worlds
def test_recompute_calls_the_model_as_the_script_does(world: str, tmp_path: Path) -> None:
    """Parts of a dict, by name, cast and reshaped, beside a number; and a copy of the model has no hook."""
    call = lambda model, batch: model(2.0, y=batch["target"], x=batch["input"].float().unsqueeze(2))  # noqa: E731
    result = trained(run_in(world, Called(call), runs=tmp_path, batch_norm="recompute"))
    x, y = Examples(50).tensors
    used = (2 * x + y.unsqueeze(1)).float()
    torch.testing.assert_close(result["norm.running_mean"], used.mean(0))
    torch.testing.assert_close(result["norm.running_var"], used.var(0))


def test_batch_norm_recompute_refuses_derived_inputs_in_the_first_step(tmp_path: Path) -> None:
    """In the first step, and not when everything is trained."""
    call = lambda model, batch: model(2.0, y=batch["target"], x=batch["input"].float() / 3)  # noqa: E731
    with pytest.raises(UsageError, match=r"cannot tell how its argument \(a tensor of shape \(4, 5\)\)"):
        run_in("simulated", Called(call), runs=tmp_path, batch_norm="recompute")


class Lengths(TensorDataset):
    """Rows of numbers, how many of them count, and what is the same for all."""

    @staticmethod
    def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Lengths stay a list, as pack_padded_sequence takes them, and each batch has its largest."""
        lengths = [int(length) for _, length in rows]
        return {"lengths": lengths, "most": max(lengths), "x": torch.stack([row for row, _ in rows])}


class Sums(nn.Module):
    """The sum of the first numbers of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: Tensor, lengths: list[int], most: int, factor: float = 1.0) -> Tensor:
        rows = zip(x[:, :most], lengths, strict=True)
        return self.norm(factor * torch.stack([row[:length].sum().view(1) for row, length in rows]))


@dataclass
class Summed:
    """Calls its model with a list and a number from the batch, and with a factor."""

    factor: Callable[[int], float] = lambda step: 2.0
    lengths: Callable[[list[int]], Any] = lambda lengths: lengths

    def __call__(self) -> None:
        session, model = pr.init(), Sums()
        x, lengths = torch.arange(150.0).view(50, 3), torch.arange(50) % 3 + 1
        loader = DataLoader(Lengths(x, lengths), batch_size=4, shuffle=True, collate_fn=Lengths.collate)
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            taken = self.lengths(batch["lengths"])
            model(batch["x"], taken, most=batch["most"], factor=self.factor(step)).sum().backward()
            optimizer.step()
        truth = 2 * torch.stack([row[:length].sum() for row, length in zip(x, lengths, strict=True)])
        shown = session.consensus()
        torch.testing.assert_close(shown.norm.running_mean, truth.mean().view(1))
        torch.testing.assert_close(shown.norm.running_var, truth.var().view(1))


@both_worlds
def test_recompute_takes_lists_and_numbers_out_of_the_batch(world: str, tmp_path: Path) -> None:
    """Those of each batch, and not those of the first; a last batch of two has a shorter list."""
    result = trained(run_in(world, Summed(), runs=tmp_path, batch_norm="recompute"))
    used = 2 * torch.tensor([sum(range(3 * row, 3 * row + row % 3 + 1)) for row in range(50)]).float()
    torch.testing.assert_close(result["norm.running_mean"], used.mean().view(1))
    torch.testing.assert_close(result["norm.running_var"], used.var().view(1))


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (Summed(factor=lambda step: 2.0 + (step == 3)), r"from 2\.0 to 3\.0"),
        (Summed(lengths=lambda lengths: [min(each, 2) for each in lengths]), r"from \[[12, ]*\] to \["),
    ],
)
def test_recompute_refuses_what_changes_without_the_batch(script: Summed, what: str, tmp_path: Path) -> None:
    """As soon as it does: the first value would be wrong for the others."""
    with pytest.raises(UsageError, match=f"an argument that changes, {what}"):
        run_in("simulated", script, runs=tmp_path, batch_norm="recompute")


def test_recompute_refuses_other_arguments(tmp_path: Path) -> None:
    """A call that has more or fewer of them is another call."""
    seen: list[int] = []

    def call(model: nn.Module, batch: Any) -> Tensor:
        seen.append(1)
        more = {} if len(seen) < 7 else {"factor": 1.0}
        return model(*([] if more else [1.0]), y=batch["target"], x=batch["input"].float(), **more)

    with pytest.raises(UsageError, match="the script calls it with different arguments"):
        run_in("simulated", Called(call), runs=tmp_path, batch_norm="recompute", workers=2)


def test_batch_norm_recompute_before_the_first_step_warns(tmp_path: Path) -> None:
    """A model that takes the first part of a batch is shown as ever; for another there is a warning."""
    call = lambda model, batch: model(2.0, y=batch["target"], x=batch["input"].float())  # noqa: E731
    with pytest.warns(UserWarning, match="has taken no step: its BatchNorm statistics are left unchanged"):
        run_in("simulated", Called(call, early=True), runs=tmp_path, batch_norm="recompute")


def test_an_error_in_a_sync_batch_norm_backward_ends_the_simulation() -> None:
    """It is the script's, as ever; the others' passes are unwound and no thread is left."""

    def main() -> None:
        session = pr.init()
        model = normed()
        model, _, loader = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Examples(8), batch_size=4)
        )

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("no such slope")

        for x, y in loader:
            out = model(x)
            if session.rank == 1:
                out.register_hook(fail)
            F.cross_entropy(out, y).backward()

    with pytest.raises(pr.PolyrhythmError, match="worker 1 failed: ArithmeticError: no such slope"):
        pr.simulate(main, workers=3, strategy="allreduce", batch_norm="sync")


def slopes() -> None:
    """Takes a gradient by `torch.autograd.grad`, which no session sees."""
    session = pr.init()
    model = normed()
    model, _, loader = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Examples(8), batch_size=4)
    )
    for x, y in loader:
        torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def test_simulated_sync_batch_norm_refuses_autograd_grad() -> None:
    with pytest.raises(UsageError, match=r"with loss\.backward\(\), and not with torch\.autograd\.grad"):
        pr.simulate(slopes, strategy="allreduce", batch_norm="sync")
    pr.run(slopes, strategy="allreduce", batch_norm="sync", runs=None, threads=1)


# One model


class Counting(nn.Module):
    """BatchNorm beside buffers of other kinds; the mask is a cache, and its shape depends on the worker."""

    calls: Tensor
    seen: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = normed()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(50, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[int(self.calls * len(x) * x[0, 0].abs()) % 50] = True
        self.mask = torch.zeros(len(x) + int(self.calls))
        return self.inner(x)


@dataclass
class Watched:
    """Looks at the consensus before, between and after its epochs, the last time when all have trained."""

    folder: Path

    def __call__(self) -> None:
        here = pr.init()
        model = Counting()
        loader = DataLoader(Examples(50), batch_size=4)
        model, optimizer, loader = here.prepare(model, SGD(model.parameters()), loader)
        shown = [self.hash(here)]
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            shown.append(self.hash(here))
        here._context.request(StepsDone())  # type: ignore[attr-defined]  # of all workers
        shown.append(self.hash(here))
        state = here.consensus().state_dict()
        torch.save(
            {"shown": shown, "last": state, "own": model.state_dict()}, self.folder / f"{here.rank}.pt"
        )

    @staticmethod
    def hash(here: Any) -> str:
        state = here.consensus().state_dict()
        return digest([value.flatten() for _, value in sorted(state.items())])


@pytest.mark.parametrize("row", DEFAULTS, ids=str)
def test_consensus_is_one_model_in_simulation(row: Row, tmp_path: Path) -> None:
    one_model("simulated", row.strategy, tmp_path)


@pytest.mark.parametrize("strategy", ["allreduce", "async", "gossip", "adpsgd"])
def test_consensus_is_one_model_on_real_processes(strategy: str, tmp_path: Path) -> None:
    one_model("real", strategy, tmp_path)


def one_model(world: str, strategy: str, folder: Path) -> None:
    """In lockstep `consensus()` has the same bits on all workers at each call, and otherwise its buffers have
    once nobody trains; the final model has them too. They are those of worker 0."""
    summary = run_in(world, Watched(folder), strategy=strategy, runs=folder)
    seen = [torch.load(folder / f"{rank}.pt") for rank in range(3)]
    final, traits = trained(summary), pr.parse(strategy).traits
    buffers = [name for name in final if name not in dict(Counting().named_parameters())]
    assert len(buffers) == 6 and not same(*(pick(each["own"], buffers) for each in seen[:2]))
    for each in (seen[1]["last"], seen[2]["last"], final):
        assert same(pick(each, buffers), pick(seen[0]["own"], buffers))
    if traits.lockstep:
        assert seen[0]["shown"] == seen[1]["shown"] == seen[2]["shown"]
    elif traits.uses_servers:
        assert seen[0]["shown"][-1] == seen[1]["shown"][-1] == seen[2]["shown"][-1]


def pick(state: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: state[name] for name in names}


def test_a_buffer_that_changes_its_shape_is_named() -> None:
    def main() -> None:
        here = pr.init()
        model = Counting()
        model, _ = here.prepare(model, SGD(model.parameters()))
        model.seen = torch.zeros(3 + here.rank)
        here.consensus()

    with pytest.raises(UsageError, match=r"the buffer seen had the shape \(50,\) .* use batch_norm=local"):
        pr.simulate(main, strategy="allreduce")


@both_worlds
def test_a_model_with_batch_norm_and_no_policy_says_so_once(world: str, capsys: Any, tmp_path: Path) -> None:
    """And what would use the data of all workers, as far as the strategy allows it."""
    script = Script(model=normed, size=16, epochs=1)
    for strategy, names in (("allreduce", "mean or sync or recompute"), ("async", "recompute")):
        for policy, times in ((None, 1), ("rank0", 0)):
            run_in(world, script, runs=tmp_path, strategy=strategy, workers=2, batch_norm=policy)
            assert (
                capsys.readouterr().err.count(f"statistics of worker 0; --batch-norm {names} uses") == times
            )
