"""Workers that answer requests of each other while they compute."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import PeerLost, PolyrhythmError
from polyrhythm.core.events import Note
from polyrhythm.core.node import others
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import describe
from polyrhythm.core.requests import LeaveRun, Request, StepsDone
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Worker
from polyrhythm.session.context import session
from polyrhythm.strategies.decentralized.base import Decentralized, DecentralizedWorker
from polyrhythm.wire.transport import Transport
from polyrhythm.worlds.processes.node import ProcessNode
from tests.support.combine import each_value
from tests.support.programs import Examples, events, mlp, trained
from tests.support.runs import shorten_waits


@dataclass(frozen=True)
class Nearest(Decentralized):
    """Each reads the parameters of the next worker, and takes the mean with its own."""

    locked: bool = False
    broken: bool = False

    @property
    def traits(self) -> Traits:
        return replace(super().traits, lockstep=self.locked)

    def worker(self, node: Any, replica: Any, group: Any) -> Worker:
        return NearestWorker(self, node, replica, group)


class NearestWorker(DecentralizedWorker):
    strategy: Nearest

    @property
    def ranks(self) -> list[int]:
        return [peer.rank for peer in self.node.members.workers]

    @cached_property
    def theirs(self) -> Any:
        return self.replica.buffer()

    def step(self) -> None:
        node, replica = self.node, self.replica
        with node.lock():
            replica.apply()
        later = [peer for peer in others(node) if peer > node.me] or others(node)
        for peer in later[:1]:
            try:
                node.request(peer, "read", into=self.theirs, start=0, stop=replica.layout.total).wait()
            except PeerLost:
                return
            with node.lock():
                for mine, other in zip(replica.parameters, self.theirs, strict=True):
                    mine.add_(other).div_(2)

    def on_message(self, message: Any) -> None:
        if self.strategy.broken and self.replica.steps == 2:
            raise ValueError("heard too much")
        super().on_message(message)

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        self.node.log(Note("cohort", {"ranks": list(ranks), "number": number}))


@pytest.fixture(autouse=True)
def named() -> Iterator[None]:
    describe()  # so that all others are known before this one
    Nearest.name: ClassVar[str] = "nearest"  # type: ignore[misc]
    Strategy.registry["nearest"] = Nearest
    yield
    del Strategy.registry["nearest"], Nearest.name


def script(dies: dict[int, int], folder: Path, epochs: int = 3, pause: float = 0.0) -> None:
    here = pr.init()
    incarnation = here._node.incarnation
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = here.prepare(model, optimizer, DataLoader(Examples(96), batch_size=4))
    for _ in range(epochs):
        for x, y in loader:
            time.sleep(pause)
            if not incarnation and dies.get(here.rank) == here._replica.steps:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        here.consensus()
    torch.save(model.state_dict(), folder / f"{here.rank} {incarnation}.pt")


def run_nearest(world: str, folder: Path, dies: dict[int, int], strategy: str, **more: Any) -> dict[str, Any]:
    how = pr.simulate if world == "simulated" else pr.run
    program = partial(script, dies, folder, pause=more.pop("pause", 0.0))
    more = {"workers": 3, "threads": 1, "runs": folder / "runs", "name": "run", **more}
    return how(program, strategy=strategy, **more)


@pytest.mark.parametrize("world", ["simulated", "real"])
@pytest.mark.parametrize("locked", ["no", "yes"])
def test_peer_strategy_result_is_the_mean_of_all_replicas(tmp_path: Path, world: str, locked: str) -> None:
    """No worker leaves before one has brought home the mean of all replicas, whenever each ends."""
    summary = run_nearest(world, tmp_path, {}, f"nearest:locked={locked}")
    last = [torch.load(tmp_path / f"{rank} 0.pt") for rank in range(3)]
    assert not torch.equal(last[0]["0.weight"], last[1]["0.weight"])
    for name, value in trained(summary).items():
        mean = torch.stack([state[name] for state in last]).mean(0)
        assert torch.allclose(value, mean, rtol=1e-13, atol=1e-15)
    assert summary["samples"] == 3 * 96


@each_value(("locked", ["no", "yes"]), ("restarts", [0, 1]), ("victim", [0, 2]))
def test_peer_strategy_survivors_continue_after_a_kill(
    tmp_path: Path, locked: str, restarts: int, victim: int
) -> None:
    """A worker is killed: the others continue, with a replacement if there may be one."""
    strategy = f"nearest:locked={locked}"
    summary = run_nearest(
        "real", tmp_path, {victim: 5}, strategy, restarts=restarts, timeout=30.0, pause=0.02
    )
    assert list(summary["lost"]) == [f"worker {victim}"] and summary["joined"] == restarts
    there = [rank for rank in range(3) if rank != victim]
    assert all((tmp_path / f"{rank} 0.pt").exists() for rank in there)
    assert (tmp_path / f"{victim} 1.pt").exists() == bool(restarts)
    cohorts = [line["values"] for line in events(summary, "note")]
    if locked == "no":
        assert not cohorts
    elif not restarts:
        assert {tuple(line["ranks"]) for line in cohorts} == {tuple(there)}


@pytest.mark.parametrize("locked", ["no", "yes"])
@pytest.mark.parametrize("back", ["", 'back = "90 ms"\n'])
def test_peer_strategy_survivors_continue_in_simulation(tmp_path: Path, locked: str, back: str) -> None:
    cluster = tmp_path / "c.toml"
    cluster.write_text(
        '[[hosts]]\nlatency = "1 ms"\nbandwidth = "1 Mbit/s"\n'
        f'[[failures]]\nworkers = [1]\nat = "33 ms"\n{back}'
    )
    one, other = (
        run_nearest("simulated", tmp_path / each, {}, f"nearest:locked={locked}", cluster=cluster)
        for each in ("a", "b")
        if not (tmp_path / each).mkdir()
    )
    assert one["digest"] == other["digest"] and list(one["lost"]) == ["worker 1"]
    if locked == "yes":
        last = events(one, "note")[-1]["values"]
        assert last["number"] == 1 and last["ranks"] == ([0, 1, 2] if back else [0, 2])


@pytest.mark.slow
def test_timeout_at_the_end_of_a_peer_run_names_the_late_worker(tmp_path: Path) -> None:
    """At the end all wait for the last: if that takes too long, the error names it."""
    waits = tmp_path / "worker 2 waits"

    def main() -> None:
        script({}, tmp_path, epochs=1)
        here: Any = session.get()
        if here.rank == 0:
            while not waits.exists():
                time.sleep(0.01)
            shorten_waits(here._node, 1.0)
        elif here.rank == 1:
            time.sleep(600)
        else:
            touch_at_the_end(here, waits)

    with pytest.raises(PolyrhythmError, match="'done'; worker 1 did not arrive"):
        pr.run(main, workers=3, threads=1, strategy="nearest", timeout=60.0)


def touch_at_the_end(here: Any, file: Path) -> None:
    """Makes a file when this worker tells the coordinator that it has taken its last step."""
    request = here._context.request

    def told(which: Request[Any]) -> Any:
        if isinstance(which, StepsDone | LeaveRun):
            file.touch()
        return request(which)

    here._context.request = told


def test_answers_count_that_a_worker_gives_after_its_last_step(tmp_path: Path) -> None:
    """Worker 0 takes its steps while worker 1, whose parameters it reads, waits for the others to be done."""
    steps, waits = 5, tmp_path / "worker 1 waits"

    def main() -> None:
        here = pr.init()
        model = mlp()
        _, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        if here.rank == 1:
            touch_at_the_end(here, waits)
        elif here.rank == 0:
            while not waits.exists():
                time.sleep(0.01)
            for _ in range(steps):
                optimizer.step()

    summary = pr.run(main, workers=3, threads=1, strategy="nearest", runs=None)
    vector = sum(parameter.nbytes for parameter in mlp().parameters())
    assert summary["bytes_sent"] == (2 + steps) * vector  # two to begin with


@pytest.mark.parametrize("world", ["simulated", "real"])
def test_what_a_listener_raises_ends_the_run(tmp_path: Path, world: str) -> None:
    with pytest.raises(PolyrhythmError, match="ValueError: heard too much"):
        run_nearest(world, tmp_path, {}, "nearest:broken=yes")


def test_a_request_to_a_lost_peer_fails_when_it_is_awaited() -> None:
    """So a worker that sends several requests handles lost peers in one place only."""
    transport = Transport(Peer("worker", 0), bytes(32))
    try:
        node = ProcessNode(transport.me, transport, 0, 0.0)
        transport.introduce(Peer("worker", 1), "unix:nobody")
        transport.lost(Peer("worker", 1), "was killed")
        reply = node.request(Peer("worker", 1), "read")
        with pytest.raises(PeerLost, match="worker 1 is gone: was killed"):
            reply.wait()
    finally:
        transport.close()


def paired(side_by_side: bool) -> None:
    """Two loaders, one batch of each at a time, or one after the other."""
    here = pr.init()
    model = mlp()
    loaders = DataLoader(Examples(48), batch_size=4), DataLoader(Examples(24), batch_size=4)
    model, optimizer, *two = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), *loaders)
    for _ in range(4):
        for (x, y), _ in (
            zip(*two, strict=False) if side_by_side else ((each, 0) for one in two for each in one)
        ):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


@each_value(
    ("strategy", ["gossip", "gossip:order=step-then-mix", "push", "noloco:2"]),
    ("side_by_side", [True, False]),
    ("at, back", [(5, 8), (15, 25), (25, 60)]),
)
def test_one_that_comes_back_shares_two_loaders(
    simulate: Any, strategy: str, side_by_side: bool, at: int, back: int
) -> None:
    """A replacement that missed part of the first loader shares the second from where the others are."""
    crash = (
        f'[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [1]\nat = "{at} ms"\nback = "{back} ms"\n'
    )
    summary = simulate(partial(paired, side_by_side), strategy, 3, cluster=crash)
    last = {line["node"] for line in events(summary, "step")[-3:]}
    assert summary["joined"] == 1 and last == {"worker 0", "worker 1", "worker 2"}


@pytest.mark.parametrize("strategy", ["adpsgd", "gossip", "push"])
def test_a_run_fails_if_all_workers_with_parameters_are_gone(simulate: Any, strategy: str) -> None:
    """The trained parameters are lost with the last worker that had them, and the run says so."""
    crash = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [0, 1]\nat = "55 ms"\nback = "80 ms"\n'
    with pytest.raises(PolyrhythmError, match="no worker is left to copy the parameters from"):
        simulate(partial(paired, False), strategy, 2, cluster=crash)
