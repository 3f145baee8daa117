"""What the strategies promise, exactly where they promise it exactly."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.worker import Worker
from tests.support.combine import each_value, few
from tests.support.programs import (
    ADAM,
    MOMENTUM,
    NESTEROV,
    SGD,
    SPEEDS,
    Examples,
    Point,
    Script,
    Steps,
    alone,
    distance,
    events,
    mlp,
    odd,
    trained,
)
from tests.support.strategies import stepping

BYTES = 8 * sum(parameter.numel() for parameter in mlp().parameters())
TENSORS = len(list(mlp().parameters()))


# --- synchronous: one machine with the union batch --------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
@pytest.mark.parametrize(
    "optimizer", [SGD, MOMENTUM, NESTEROV, ADAM], ids=["sgd", "momentum", "nesterov", "adam"]
)
@pytest.mark.parametrize("size", [48, 50, 49, 43])
def test_synchronous_is_one_machine_with_the_union_batch(
    simulate: Any, strategy: str, optimizer: Any, size: int
) -> None:
    """G = sum(n_i g_i) / sum(n_i) is the gradient of the union, also when the last round is uneven."""
    script = Script(optimizer=optimizer, size=size, schedule=True)
    union = alone(replace(script, batch=3 * script.batch))
    assert distance(trained(simulate(script, strategy, 3)), union) < 1e-12


@pytest.mark.parametrize("size", [48, 50])
def test_allreduce_clips_the_average(simulate: Any, size: int) -> None:
    """Clipping sees the average of the gradients, as on one machine."""
    script = Script(optimizer=MOMENTUM, size=size, clip=0.1)
    union = alone(replace(script, batch=12))
    assert distance(trained(simulate(script, "allreduce", 3)), union) < 1e-12
    assert distance(alone(replace(script, batch=12, clip=0.0)), union) > 1e-3


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
@pytest.mark.parametrize("size", [48, 46, 43])
def test_accumulation_is_that_of_the_union(simulate: Any, strategy: str, size: int) -> None:
    """Accumulating micro-batches is accumulating the unions of the workers' micro-batches."""
    script = Script(optimizer=MOMENTUM, size=size, accumulate=2)
    union = alone(replace(script, batch=12))
    assert distance(trained(simulate(script, strategy, 3)), union) < 1e-12


@dataclass
class TwoLosses(Script):
    """Two backward passes for each batch."""

    def backward(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        super().backward(model, optimizer, batch)
        (penalty := 0.1 * model(batch[0]).square().mean()).backward()
        return penalty


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "local:1"])
@pytest.mark.parametrize("size", [48, 46, 43])
def test_two_backward_passes_are_those_of_the_union(simulate: Any, strategy: str, size: int) -> None:
    """However many backward passes a batch takes, each is weighted by the samples of the batch."""
    script = TwoLosses(size=size, optimizer=MOMENTUM)
    assert distance(trained(simulate(script, strategy, 3)), alone(replace(script, batch=12))) < 1e-12


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "local:1"])
def test_replicas_stay_equal_without_backward(simulate: Any, strategy: str) -> None:
    """A gradient that the script sets itself is averaged like one that backward() made."""
    summary = simulate(Steps(1, lambda rank, x: torch.full_like(x, rank)), strategy, 3)
    assert trained(summary)["x"].item() == -1.0


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
@pytest.mark.parametrize("world", ["simulated", "real"])
def test_a_worker_without_a_gradient_counts_as_zero(strategy: str, world: str, tmp_path: Path) -> None:
    """A worker that leaves out a backward pass takes the step with the others, and nobody hangs."""

    def main() -> None:
        session = pr.init()
        point = Point(1)
        point, optimizer = session.prepare(point, torch.optim.SGD(point.parameters(), lr=1.0))
        for step in range(3):
            if session.rank != 1 or step != 1:
                point.x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    how = pr.simulate if world == "simulated" else pr.run
    summary = how(main, workers=2, strategy=strategy, runs=tmp_path, threads=1)
    assert trained(summary)["x"].item() == -2.5


@dataclass
class Critic(Script):
    """Another model has backward passes too, on worker 0 only."""

    alone: bool = False

    def backward(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        from polyrhythm.session.context import session

        if not self.alone and session.get().rank == 0:
            torch.nn.functional.cross_entropy(self.critic(batch[0]), batch[1]).backward()
        loss = super().backward(model, optimizer, batch)
        if not self.alone and session.get().rank == 0:
            torch.nn.functional.cross_entropy(self.critic(batch[0]), batch[1]).backward()
        return loss

    def __post_init__(self) -> None:
        self.critic = mlp()


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "local:2"])
def test_other_models_do_not_count(simulate: Any, strategy: str) -> None:
    """A backward pass of a model that was not prepared costs no collective and no virtual time."""
    script = Critic(optimizer=MOMENTUM, size=50)
    found, law = (simulate(each, strategy, 3) for each in (script, replace(script, alone=True)))
    assert found["digest"] == law["digest"]
    assert found["bytes_sent"] == law["bytes_sent"] and found["wall_s"] == law["wall_s"]


def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.01))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("schedule", [False, True])
def test_learning_rates_may_be_tensors(simulate: Any, servers: int, schedule: bool) -> None:
    """A learning rate that is a tensor travels with a push like a number."""
    script = Script(optimizer=tensor_rate, size=50, schedule=schedule)
    allreduce = simulate(script, "allreduce", 3)
    assert simulate(script, "sync", 3, servers)["digest"] == allreduce["digest"]
    assert distance(trained(allreduce), alone(replace(script, batch=12))) < 1e-12


@pytest.mark.parametrize("size", [48, 50])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_sync_is_allreduce(simulate: Any, optimizer: Any, size: int) -> None:
    """A server and a collective compute the same sum: the same bits."""
    script = Script(optimizer=optimizer, size=size, shuffle=True)
    assert simulate(script, "sync", 3)["digest"] == simulate(script, "allreduce", 3)["digest"]


@pytest.mark.parametrize("servers", [2, 3, 7])
@pytest.mark.parametrize(
    "script",
    [
        Script(optimizer=MOMENTUM, size=50, groups=True),
        Script(optimizer=ADAM, size=50),
        Script(model=odd, optimizer=MOMENTUM),
    ],
    ids=["momentum", "adam", "odd"],
)
def test_sync_on_several_servers_gives_the_bits_of_one_server(
    simulate: Any, servers: int, script: Script
) -> None:
    """Cutting the vector, through the middle of tensors, changes no bit of an element-wise optimizer."""
    assert simulate(script, "sync", 3, servers)["digest"] == simulate(script, "sync", 3)["digest"]


# --- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
def test_synchronous_strategies_send_the_expected_bytes(simulate: Any, strategy: str) -> None:
    """A step moves 2(n-1) vectors by all-reduce, and 2n through servers; the start is counted too."""
    workers, rounds = 3, 8
    if strategy == "allreduce":  # each step also tells which parameters have a gradient
        law = (workers - 1) * BYTES + rounds * 2 * (workers - 1) * (BYTES + 4 * TENSORS)
    else:  # the start and the end, and the script looks at the consensus twice
        law = (1 + workers) * BYTES + rounds * 2 * workers * BYTES + 2 * workers * BYTES + BYTES
    assert simulate(Script(), strategy, workers)["bytes_sent"] == law


def single() -> nn.Module:
    return nn.Sequential(Float(), mlp().float())


class Float(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize(("strategy", "servers"), [("sync", 1), ("async", 3)])
def test_16_bit_codecs_halve_the_pushed_bytes(simulate: Any, codec: str, strategy: str, servers: int) -> None:
    """Each push has half the bytes; the parameters come back whole."""
    script = Script(model=single)
    plain, short = (
        simulate(script, f"{strategy}{more}", 3, servers) for more in ("", f"+{codec}:pull=dense")
    )
    whole = [line["bytes"] for line in events(plain, "apply")]
    assert [2 * line["bytes"] for line in events(short, "apply")] == whole
    assert sum(whole) == 24 * BYTES // 2
    assert plain["bytes_sent"] - short["bytes_sent"] == sum(whole) // 2


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_16_bit_codecs_halve_the_allreduce_bytes(simulate: Any, codec: str) -> None:
    """Of an all-reduce both ways are half; which parameters have a gradient is told as before."""
    workers, rounds = 3, 8
    law = (workers - 1) * BYTES // 2 + rounds * 2 * (workers - 1) * (BYTES // 4 + 4 * TENSORS)
    assert simulate(Script(model=single), f"allreduce+{codec}", workers)["bytes_sent"] == law


@pytest.mark.parametrize(("codec", "precision"), [("fp16", 2**-11), ("bf16", 2**-8)])
@pytest.mark.parametrize("strategy", ["allreduce", "sync", "async"])
def test_16_bit_codecs_change_gradients_by_rounding_only(
    simulate: Any, strategy: str, codec: str, precision: float
) -> None:
    """A gradient loses its last bits and no more: the step is off by a few roundings."""
    slope = torch.tensor([0.3, -7.7, 1e-3, 123.4], dtype=torch.float64)
    summary = simulate(Steps(1, lambda rank, x: slope, size=4), f"{strategy}+{codec}", 2)
    steps = 2 if strategy == "async" else 1
    assert torch.allclose(trained(summary)["x"], -steps * slope, rtol=2 * precision, atol=0)


@pytest.mark.parametrize("strategy", ["allreduce+fp16", "sync+fp16", "async+fp16"])
def test_large_gradients_stay_finite(simulate: Any, strategy: str) -> None:
    """What has a place in 16 bits, and so has the mean, does not overflow on the way."""
    summary = simulate(Steps(1, lambda rank, x: torch.full_like(x, 4e4)), strategy, 2)
    assert trained(summary)["x"].item() == -4e4 * (2 if strategy.startswith("async") else 1)


# --- asynchronous -----------------------------------------------------------------------------------


@each_value(("speeds", SPEEDS), ("servers", [1, 3]))
def test_staleness_is_conserved(simulate: Any, speeds: str, servers: int) -> None:
    """On each server, staleness applied plus age in flight is (N-1) T, for any mix of speeds."""
    workers = 5
    script = Script(size=403, batch=2, optimizer=partial(torch.optim.SGD, lr=0.01))
    summary = simulate(script, "async", workers, servers, SPEEDS[speeds])
    for server in range(servers):
        applied = [line for line in events(summary, "apply") if line["node"] == f"server {server}"]
        total = len(applied)
        assert [line["version"] for line in applied] == list(range(1, total + 1))
        pulled = dict.fromkeys(range(workers), 0) | {line["worker"]: line["version"] for line in applied}
        age = sum(total - version for version in pulled.values())
        assert total == 2 * 202
        assert sum(line["staleness"] for line in applied) + age == (workers - 1) * total


def test_staleness_in_the_log_is_that_of_the_definition(simulate: Any) -> None:
    """Staleness is the version at the apply minus the version that the worker's last answer held."""
    summary = simulate(Steps(50), "async", 4, cluster=SPEEDS["heterogeneous"])
    pulled: Counter[int] = Counter()
    for line in events(summary, "apply"):
        assert line["staleness"] == line["version"] - 1 - pulled[line["worker"]]
        pulled[line["worker"]] = line["version"]
    seen = [line["staleness"] for line in events(summary, "apply")]
    assert summary["staleness"]["max"] == max(seen)
    assert summary["staleness"]["mean"] == pytest.approx(sum(seen) / len(seen))


@pytest.mark.parametrize("workers", [2, 5])
def test_equal_speeds_have_equal_staleness(simulate: Any, workers: int) -> None:
    """After the first round, staleness is N-1 exactly."""
    seen = [line["staleness"] for line in events(simulate(Steps(20), "async", workers), "apply")]
    assert seen == [*range(workers), *[workers - 1] * (19 * workers)]


@pytest.mark.slow
def test_exponential_staleness_is_geometric(simulate: Any) -> None:
    """Memoryless step times make staleness geometric with p = 1/N: mean N-1, P(0) = 1/N."""
    workers = 5
    summary = simulate(Steps(1000), "async", workers, cluster=SPEEDS["exponential"])
    counts = Counter(line["staleness"] for line in events(summary, "apply"))
    total = sum(counts.values())
    assert counts[0] / total == pytest.approx(1 / workers, abs=0.02)
    assert counts[1] / total == pytest.approx(1 / workers * (1 - 1 / workers), abs=0.02)


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_max_staleness_bounds_how_far_a_worker_runs_ahead(simulate: Any, bound: int, servers: int) -> None:
    """When a worker goes on, it is at most `max_staleness` steps ahead of the slowest one still there."""
    summary = simulate(Steps(30, size=4), f"async:max_staleness={bound}", 4, servers, SPEEDS["heterogeneous"])
    clocks = {f"server {server}": dict.fromkeys(range(4), 0) for server in range(servers)}
    ahead = []
    for line in events(summary, "apply", "step", "leave"):
        if line["event"] == "apply":
            clocks[line["node"]][line["worker"]] = line["step"]
        elif line["event"] == "leave":
            for clock in clocks.values():
                clock.pop(int(line["peer"].split()[1]) if line["peer"].startswith("worker") else -1, None)
        else:
            ahead += [line["step"] - min(clock.values()) for clock in clocks.values()]
    assert max(ahead) == bound
    assert summary["steps"] == 4 * 30


@pytest.mark.parametrize("group", [2, 3])
def test_softsync_applies_groups(simulate: Any, group: int) -> None:
    """The server takes one step for the mean of `wait_for` pushes; only the last group may be smaller."""
    summary = simulate(Steps(40), f"async:wait_for={group}", 4, cluster=SPEEDS["exponential"])
    sizes = Counter(line["version"] for line in events(summary, "apply"))
    shrunk = [version for version in sizes if sizes[version] != group]
    gone = [line["peer"] for line in events(summary, "leave") if line["peer"].startswith("worker")]
    assert len(gone) == 4 and sum(sizes.values()) == 160
    assert all(version > max(sizes) - 40 for version in shrunk)  # by then fewer are left
    assert trained(summary)["x"].item() == -float(len(sizes))


def test_stale_updates_count_less(simulate: Any) -> None:
    """With weight=1/tau an update that is two versions old moves the parameters by half, exactly."""
    steps = Steps(10)
    full, damped = simulate(steps, "async", 3), simulate(steps, "async:weight=1/tau", 3)
    stale = [line["staleness"] for line in events(damped, "apply")]
    assert stale == [0, 1] + [2] * 28
    assert trained(full)["x"].item() == -30.0
    assert trained(damped)["x"].item() == -sum(1 / max(1, tau) for tau in stale) == -16.0


# --- data that is not just one loader to its end ----------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_two_loaders_are_both_read(simulate: Any, strategy: str) -> None:
    """Each loader that was prepared is shared out for itself."""

    def main() -> None:
        session = pr.init()
        model = mlp()
        loaders = [DataLoader(Examples(size), batch_size=2) for size in (12, 6)]
        model, optimizer, *loaders = session.prepare(model, SGD(model.parameters()), *loaders)
        for loader in loaders:
            for x, _ in loader:
                model(x).mean().backward()
                optimizer.step()

    assert simulate(main, strategy, 2)["samples"] == 12 + 6


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_breaking_out_of_a_loader_ends_the_epoch(simulate: Any, tmp_path: Path, strategy: str) -> None:
    """After a `break` the next loop over the loader begins the next epoch, shuffled anew."""

    def main() -> None:
        session = pr.init()
        model = mlp()
        loader = DataLoader(Examples(64, tmp_path / "seen"), batch_size=2, shuffle=True)
        model, optimizer, loader = session.prepare(model, SGD(model.parameters()), loader)
        for _ in range(5):
            for number, (x, _) in enumerate(loader):
                model(x).mean().backward()
                optimizer.step()
                if number == 3:
                    break

    assert simulate(main, strategy, 2)["steps"] == 2 * 5 * 4
    seen = [int(line) for line in (tmp_path / "seen").read_text().split()]
    assert seen[:16] != seen[16:32] and len(set(seen)) > 16


# --- going on another day ---------------------------------------------------------------------------


@dataclass
class Saved(Script):
    """Begins from a file, if there is one, and worker 0 saves model and optimizer to another in the end."""

    begin: Path | None = None
    end: Path | None = None

    def __call__(self) -> nn.Module:
        session = pr.init()
        model = self.model()
        optimizer = self.optimizer(self.divided(model))
        if self.begin is not None:
            saved = torch.load(self.begin)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        loader = DataLoader(Examples(self.size), batch_size=self.batch)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(self.epochs):
            for batch in loader:
                self.backward(model, optimizer, batch)
                optimizer.step()
        state = optimizer.state_dict()
        if session.rank == 0 and self.end is not None:
            torch.save({"model": model.state_dict(), "optimizer": state}, self.end)
        return model


def equal_states(one: Any, other: Any) -> bool:
    """Whether two state_dicts are equal bit for bit, whatever is nested in them."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


WORLDS = ("world", [pytest.param(pr.simulate, id="simulated"), pytest.param(pr.run, id="real")])
OPTIMIZERS = ("optimizer", [pytest.param(MOMENTUM, id="momentum"), pytest.param(ADAM, id="adam")])


@each_value(WORLDS, OPTIMIZERS)
def test_sync_optimizer_state_dict_equals_that_of_allreduce(
    world: Any, optimizer: Any, tmp_path: Path
) -> None:
    """Under sync, also from servers that cut tensors, state_dict() has the bits it has under allreduce."""
    found = []
    for strategy, servers in (("allreduce", 0), ("sync", 1), ("sync", 3)):
        script = Saved(optimizer=optimizer, size=50, groups=True, end=tmp_path / "end.pt")
        world(script, workers=3, strategy=strategy, servers=servers, runs=None, threads=1)
        found.append(torch.load(tmp_path / "end.pt"))
    law = found[0]
    assert (
        all(entry for entry in law["optimizer"]["state"].values())
        and len(law["optimizer"]["state"]) == TENSORS
    )
    assert [equal_states(each, law) for each in found] == [True] * 3


@pytest.mark.parametrize("servers", [1, 3])
def test_async_optimizer_state_dict_includes_every_push(simulate: Any, servers: int, tmp_path: Path) -> None:
    """The state that is fetched has counted every push so far: none is missing, none twice."""
    script = Saved(optimizer=ADAM, size=40, epochs=1, end=tmp_path / "end.pt")
    simulate(script, "async", 1, servers)
    found = torch.load(tmp_path / "end.pt")
    alone(replace(script, end=tmp_path / "alone.pt"))
    assert equal_states(found, torch.load(tmp_path / "alone.pt"))


@each_value(WORLDS, ("strategy, servers", [("allreduce", 0), ("sync", 2)]), OPTIMIZERS)
def test_a_resumed_run_is_an_uninterrupted_one(
    world: Any, strategy: str, servers: int, optimizer: Any, tmp_path: Path
) -> None:
    """Two epochs, saved, loaded before `prepare`, and two more are four epochs, bit for bit."""

    def train_with(**special: Any) -> str:
        script = Saved(optimizer=optimizer, size=50, groups=True, **special)
        how = {"strategy": strategy, "servers": servers, "runs": None, "threads": 1}
        return str(world(script, workers=3, **how)["digest"])

    half, whole = tmp_path / "half.pt", tmp_path / "whole.pt"
    uninterrupted = train_with(epochs=4, end=whole)
    first = train_with(epochs=2, end=half)
    resumed = train_with(epochs=2, begin=half, end=tmp_path / "resumed.pt")
    assert resumed == uninterrupted != first
    assert equal_states(torch.load(tmp_path / "resumed.pt"), torch.load(whole))


# --- chance -----------------------------------------------------------------------------------------


@dataclass
class Draws:
    """Every worker writes down what it draws before and after it begins to train."""

    folder: Path

    def __call__(self) -> None:
        session = pr.init()
        before = [np.random.random(), random.random(), torch.rand(()).item()]
        point = Point(1)
        _, optimizer = session.prepare(point, SGD(point.parameters()))
        assert torch.equal(*session.gather(torch.rand(3))[:2]), "until then all draw the same"
        optimizer.step()
        after = [np.random.random(), random.random(), torch.rand(()).item()]
        (self.folder / f"{session.rank}.json").write_text(json.dumps([before, after]))


@pytest.mark.parametrize(*WORLDS)
def test_workers_draw_their_own_numbers(world: Any, tmp_path: Path) -> None:
    """All build the same model, then each draws its own, with numpy, Python and torch; a seed repeats it."""

    def drawn(seed: int) -> tuple[list[Any], list[Any]]:
        world(Draws(tmp_path), workers=3, strategy="allreduce", runs=None, threads=1, seed=seed)
        ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
        return [before for before, _ in ranks], [after for _, after in ranks]

    before, after = drawn(0)
    assert before[0] == before[1] == before[2]
    for kind in range(3):
        assert len({each[kind] for each in after} | {before[0][kind]}) == 4
    assert drawn(0) == (before, after)
    assert drawn(1)[1] != after


@pytest.mark.parametrize("fails", [False, True])
def test_a_simulation_restores_the_random_state_of_the_caller(fails: bool, tmp_path: Path) -> None:
    """Whatever its workers draw, and however it ends, the caller goes on with the numbers it would have."""

    def main() -> None:
        Draws(tmp_path)()
        if fails:
            raise RuntimeError("the user's own mistake")

    def state() -> str:
        return repr(
            (
                np.random.get_state()[1].tolist(),
                np.random.get_state()[2],
                random.getstate(),
                torch.get_rng_state().tolist(),
            )
        )

    before = state()
    with pytest.raises(PolyrhythmError) if fails else nullcontext():
        pr.simulate(main, workers=2, strategy="allreduce", threads=1)
    assert state() == before


# --- virtual time -----------------------------------------------------------------------------------


@few("workers", [1, 2, 8], quick=2)
def test_sync_round_time_is_the_harmonic_number(simulate: Any, workers: int) -> None:
    """Synchronous rounds of exponential steps take the harmonic number H_N on average."""
    rounds = 1500
    summary = simulate(
        Steps(rounds), "sync", workers, cluster='[[hosts]]\nstep_time = { exponential = "1 s" }'
    )
    harmonic = sum(1 / k for k in range(1, workers + 1))
    deviation = (sum(1 / k**2 for k in range(1, workers + 1)) / rounds) ** 0.5
    assert summary["wall_s"] / rounds == pytest.approx(harmonic, abs=3 * deviation)


@pytest.mark.slow
def test_async_workers_never_wait(simulate: Any) -> None:
    """Asynchronous workers take as long as their own steps, on average 1."""
    summary = simulate(Steps(1500), "async", 8, cluster='[[hosts]]\nstep_time = { exponential = "1 s" }')
    assert summary["wait_s"] == 0
    assert summary["compute_s"] / summary["steps"] == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_an_allreduce_takes_two_hops(simulate: Any, workers: int) -> None:
    """Two hops of two latencies each, and 2(n-1)/n of the bytes over every link."""
    cluster = '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "1 Gbit/s"\nlatency = "0.1 ms"'
    time = 2 * 2e-4 + 2 * (workers - 1) / workers * (BYTES + 4 * TENSORS) / 125e6
    for line in events(simulate(Script(), "allreduce", workers, cluster=cluster), "step"):
        # The log has whole microseconds.
        assert line["wait_s"] == pytest.approx(time, abs=1e-6)
        assert line["compute_s"] == pytest.approx(0.010, abs=1e-6) or line["step"] == 1


def test_a_push_takes_the_time_of_two_messages(simulate: Any) -> None:
    """There and back: four latencies and twice the bytes at the narrower link, and the server's own time."""
    cluster = (
        '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "1 Mbit/s"\nlatency = "1 ms"\n'
        '[servers]\nstep_time = "3 ms"\nlatency = "2 ms"'
    )
    for line in events(simulate(Steps(5), "async", 1, cluster=cluster), "step"):
        assert line["wait_s"] == pytest.approx(2 * (3e-3 + 8 / 125e3) + 3e-3, rel=1e-9)


def test_stragglers_are_slow_exactly_as_long_as_told(simulate: Any) -> None:
    """A step that begins in the episode takes `slowdown` times as long; no other step, no other worker."""
    cluster = '[[stragglers]]\nworkers = [1]\nfrom = "45 ms"\nto = "95 ms"\nslowdown = 3.0'
    steps = events(simulate(Steps(20), "async", 3, cluster=cluster), "step")
    for line in steps:
        began = line["t"] - line["compute_s"]
        slow = line["node"] == "worker 1" and 0.045 <= began + 1e-9 < 0.095
        assert line["compute_s"] == pytest.approx(0.03 if slow else 0.01), line
    assert sum(line["compute_s"] > 0.02 for line in steps) == 2


# --- what goes wrong is named -----------------------------------------------------------------------


def ending_early(order: tuple[Path, int] | None = None) -> None:
    """Worker 1 takes one step less than worker 0.

    In a real run a file says that a worker has come to where they part, and the other is the `last`.
    """
    session = pr.init()
    model = mlp()
    model, optimizer = session.prepare(model, SGD(model.parameters()))
    for step in range(4):
        if step == 3 and order is not None:
            come, last = order
            while session.rank == last and not come.exists():
                time.sleep(0.01)
            come.touch()
        if step == 3 and session.rank == 1:
            return
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()


def test_a_deadlock_says_who_waits_for_what() -> None:
    """A run in which nothing can happen any more ends, and names those who wait."""

    def crossing() -> None:
        session = pr.init()
        model = mlp()
        session.prepare(model, SGD(model.parameters()))
        session._node.everyone.all_reduce(torch.ones(1)) if session.rank == 0 else session.barrier()

    with pytest.raises(PolyrhythmError, match=r"deadlock at .*worker 0 waits since .* for all_reduce number"):
        pr.simulate(crossing, workers=2, strategy="allreduce")


def test_a_worker_that_takes_fewer_steps_is_named() -> None:
    with pytest.raises(PolyrhythmError, match="worker 1 ended after 3 steps, but worker 0 is at step 4"):
        pr.simulate(ending_early, workers=2, strategy="allreduce")


@pytest.mark.parametrize("last", [0, 1])
def test_a_missing_collective_ends_a_real_run(last: int, tmp_path: Path) -> None:
    """On real processes too the others are told that the one they need is gone, in either order."""
    with pytest.raises(PolyrhythmError, match=r"worker 0 .*worker 1"):
        pr.run(
            partial(ending_early, (tmp_path / "come", last)),
            workers=2,
            strategy="allreduce",
            runs=None,
            threads=1,
        )


@dataclass
class Poisoned(Script):
    """Worker 1 gets a NaN in its third step."""

    def backward(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        from polyrhythm.session.context import session

        self.count = getattr(self, "count", Counter())
        rank = session.get().rank
        self.count[rank] += 1
        if (rank, self.count[rank]) == (1, 3):
            batch = [batch[0] * float("nan"), batch[1]]
        return super().backward(model, optimizer, batch)


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "async", "local"])
def test_error_for_a_nan_gradient_names_worker_layer_and_step(strategy: str) -> None:
    """The error says whose gradient it was, and at which step."""
    with pytest.raises(
        PolyrhythmError, match=r"worker 1: the gradient of 0\.weight and 3 more at step 3 is not finite"
    ):
        pr.simulate(Poisoned(), workers=2, strategy=strategy, threads=1)


def test_error_for_a_nan_gradient_on_real_processes_names_its_worker() -> None:
    """The worker with the NaN speaks first, though it drags the others along."""
    with pytest.raises(
        PolyrhythmError, match=r"worker 1: the gradient of 0\.weight and 3 more at step 3 is not finite"
    ):
        pr.run(Poisoned(), workers=2, strategy="allreduce", runs=None, threads=1)


def wider(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2 + rank))
    return model, SGD(model.parameters())


def deeper(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))
    return model, SGD(model.parameters())


def grouped(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 3)
    groups = [[model.weight, model.bias], []] if rank else [[model.weight], [model.bias]]
    return model, SGD([{"params": group} for group in groups])


DIFFERENT = {
    wider: {0: r"1\.weight \[2, 3\] float32", 1: r"1\.weight \[3, 3\] float32"},
    deeper: {0: "no parameter", 1: r"1\.weight \[2, 2\] float32"},
    grouped: {0: r"bias \[3\] float32 in parameter group 1", 1: r"bias \[3\] float32"},
}


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
@pytest.mark.parametrize("make", DIFFERENT, ids=lambda make: make.__name__)
def test_different_models_are_named(make: Callable[..., Any], strategy: str) -> None:
    """Nodes that built different models are told so before training, with the first difference."""

    def main() -> None:
        session = pr.init()
        session.prepare(*make(session.rank))

    with pytest.raises(PolyrhythmError) as caught:
        pr.simulate(main, workers=2, strategy=strategy)
    kinds = DIFFERENT[make]
    either = [
        rf"\w+ \d and \w+ \d have different models: the first difference is {kinds[mine]} on \w+ {mine} and "
        rf"{kinds[1 - mine]} on \w+ {1 - mine}; every node must build the same model and optimizer"
        for mine in (0, 1)
    ]
    assert any(re.fullmatch(each, str(caught.value)) for each in either), caught.value


def test_different_collectives_are_named() -> None:
    """Workers that meet in different collectives are told which."""

    def step(worker: Worker) -> None:
        worker.group.all_reduce(*worker.replica.parameters, op="sum" if worker.group.rank else "mean")

    try:
        with pytest.raises(PolyrhythmError, match="same collectives in the same order"):
            pr.simulate(Steps(1), workers=2, strategy=stepping("confused", step))
    finally:
        del pr.Strategy.registry["confused"]


def test_sys_exit_0_at_the_end_of_a_script_is_a_success() -> None:
    """`sys.exit()` at the end of a script is the end of that worker, not of the simulator."""

    def main() -> None:
        Steps(1)()
        raise SystemExit(0)

    assert pr.run(main, workers=2, strategy="allreduce", runs=None, threads=1)["steps"] == 2
    assert pr.simulate(main, workers=2, strategy="allreduce", threads=1)["steps"] == 2
