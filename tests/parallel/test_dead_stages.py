"""A dead stage ends its model. Where the strategy survives, the other models train on every example."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import JoinRun, LeaveRun, NodeFailed, Prepared, Request, TakeLease
from polyrhythm.launch.console import Console
from tests.support.combine import each_value, few
from tests.support.launchers import SilentLauncher, coordinator, join
from tests.support.programs import CLASSES, FEATURES, Examples, events, trained
from tests.support.runs import run_in

SIZE, BATCH, EPOCHS = 48, 4, 2
PLACES = ("lease", "forward", "backward", "step", "consensus")  # where the script of a worker is when it dies


class Branching(nn.Module):
    """Two branches and what follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([torch.tanh(self.left(x)), torch.tanh(self.right(x))], 1))  # type: ignore[no-any-return]


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@dataclass
class Training:
    """Trains for some epochs; on real processes, first lives of these ranks kill themselves at a place."""

    seen: Path
    branches: bool = False
    killed: tuple[int, ...] = ()
    place: str = ""

    def __call__(self) -> None:
        session: Any = pr.init()
        torch.manual_seed(3)
        model: nn.Module = (Branching() if self.branches else chain()).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(Examples(SIZE, self.seen), batch_size=BATCH)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(EPOCHS):
            for step, (x, y) in enumerate(loader):
                self.die(session, "forward", step)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                self.die(session, "backward", step)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)  # workers of a model exchange its norm
                self.die(session, "step", step)
                optimizer.step()
                self.die(session, "lease", step)
            self.die(session, "consensus")
            session.consensus()

    def die(self, session: Any, place: str, step: int = 1) -> None:
        node = session._context.worker_node
        if place == self.place and step == 1 and node.me.rank in self.killed and not node.incarnation:
            os.kill(os.getpid(), signal.SIGKILL)

    def examples(self) -> set[int]:
        return set(map(int, self.seen.read_text().split()))


def check(summary: dict[str, Any], program: Training, died: int) -> None:
    """The model ended with the dead worker, and the others have trained on all examples."""
    other = died ^ 1
    assert summary["lost"][f"worker {other}"] == (
        f"ended with worker {died}, which held a part of the same model"
    )
    assert program.examples() == set(range(SIZE))
    assert summary["batches_undone"] == 0
    assert summary["samples"] + summary["samples_left_out"] >= EPOCHS * SIZE
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


@each_value(
    (
        "strategy",
        [
            "async@tensor:2",
            "async@pipeline:2",
            "ssp:3@pipeline:2",
            "gossip@pipeline:2",
            "async@branches:2",
            "gossip@tensor:2",
            "ssp:3@tensor:2",
        ],
    ),
    ("died", [1, 2, 0, 3]),
    ("at, back", [(34.1, ""), (61.7, 'back = "95 ms"'), (12.3, ""), (47.9, 'back = "60 ms"'), (103.0, "")]),
)
def test_the_other_models_train_on_every_example(
    strategy: str, died: int, at: float, back: str, tmp_path: Path
) -> None:
    program = Training(tmp_path / "seen", "branches" in strategy)
    cluster = (
        f'[[hosts]]\nstep_time = "10 ms"\nlatency = "1 ms"\n'
        f'[[failures]]\nworkers = [{died}]\nat = "{at} ms"\n{back}\n'
    )
    summary = run_in("simulated", program, strategy=strategy, workers=4, cluster=cluster, runs=tmp_path)
    check(summary, program, died)
    assert summary["lost"][f"worker {died}"] == f"crashed at {at / 1000:.6g} s"
    both = {f"worker {died}": 1, f"worker {died ^ 1}": 1}
    assert summary["replaced"] == (both if back else {})
    if back:  # the next life of the model trains; gossip shares an epoch out when it begins, others lease it
        steps = {line["node"] for line in events(summary, "micro-batch") if line["t"] > 0.095}
        survivor, share = f"worker {2 - died // 2 * 2}", SIZE // BATCH // 2
        [begins] = [
            line["t"]
            for line in events(summary, "step")
            if line["node"] == survivor and line["step"] == share
        ]
        in_time = not strategy.startswith("gossip") or float(back.split()[2].strip('"')) / 1000 < begins
        assert (both.keys() <= steps) == in_time
    if strategy in ("async@pipeline:2", "async@tensor:2"):
        check_server_laws(summary)


@few(
    "world, collective",
    [("simulated", "ring"), ("real", "auto"), ("real", "direct"), ("real", "ring")],
    quick=1,
)
def test_sums_of_a_model_survive_the_death_of_another_by_any_algorithm(
    world: str, collective: str, tmp_path: Path
) -> None:
    real = world == "real"
    program = Training(tmp_path / "seen", killed=(2,) if real else (), place="backward")
    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [2]\nat = "34.1 ms"\nback = "60 ms"\n'
    options: dict[str, Any] = {"restarts": 1, "timeout": 60.0} if real else {"cluster": cluster}
    summary = run_in(
        world, program, strategy="gossip@tensor:2", workers=4, runs=tmp_path, collective=collective, **options
    )
    check(summary, program, 2)


def check_server_laws(summary: dict[str, Any]) -> None:
    """A server has a shard for each place, and applies each push that it takes to one of them, once."""
    pushes = [line for line in events(summary, "deliver") if line["kind"].startswith("push")]
    assert len({(line["sender"], line["sequence"]) for line in pushes}) == len(pushes)
    counts = [sum(line["kind"] == kind for line in pushes) for kind in ("push", "push#1")]
    versions = sorted(line["version"] for line in events(summary, "apply"))
    assert versions == sorted(version for count in counts for version in range(1, count + 1))


def test_the_death_of_the_last_model_ends_the_run(tmp_path: Path) -> None:
    cluster = '[[hosts]]\nstep_time = "10 ms"\n' + "".join(
        f'[[failures]]\nworkers = [{worker}]\nat = "{at} ms"\n' for worker, at in ((0, 20), (3, 35))
    )
    with pytest.raises(pr.PolyrhythmError, match=r"worker 3 crashed at 0\.035 s, and no worker is left"):
        run_in(
            "simulated", Training(tmp_path / "seen"), strategy="async@pipeline:2", workers=4, cluster=cluster
        )


@few("strategy", ["allreduce@pipeline:2", "allreduce@tensor:2"], quick=1)
def test_where_no_model_can_continue_the_error_names_the_dead_stage(strategy: str, tmp_path: Path) -> None:
    cluster = '[[hosts]]\nstep_time = "10 ms"\n[[failures]]\nworkers = [3]\nat = "20 ms"\n'
    with pytest.raises(pr.PolyrhythmError, match=r"worker 3 crashed at 0\.02 s; it held a part of a model"):
        run_in(
            "simulated",
            Training(tmp_path / "seen"),
            strategy=strategy,
            workers=4,
            cluster=cluster,
        )


@few(
    "split, killed, place, restarts",
    [
        ("pipeline", (0, 3), "backward", 0),
        ("tensor", (0, 3), "forward", 0),
        ("tensor", (0, 3), "backward", 2),
        ("pipeline", (0, 3), "forward", 2),
        *(
            (split, (who,), place, restarts)
            for split in ("pipeline", "tensor")
            for who in (2, 1)
            for place in PLACES
            for restarts in (0, 1)
        ),
    ],
    quick=2,
)
def test_real_processes_survive_the_kill_of_a_leader_and_of_a_follower(
    split: str, killed: tuple[int, ...], place: str, restarts: int, tmp_path: Path
) -> None:
    program, output = Training(tmp_path / "seen", killed=killed, place=place), io.StringIO()
    summary = pr.run(
        program, strategy=f"async@{split}:2", workers=6, runs=tmp_path, restarts=restarts, threads=1,
        timeout=60.0, console=Console(output),
    )  # fmt: skip
    for died in killed:
        check(summary, program, died)
        assert summary["lost"][f"worker {died}"] == "was killed by SIGKILL"
        first = died - died % 2
        assert (
            f"worker {died} was killed by SIGKILL, which ends its model on workers {first} and {first + 1}; "
            in (output.getvalue())
        )
    assert len(summary["lost"]) == 2 * len(killed) and "Traceback" not in output.getvalue()
    assert summary["joined"] <= 2 * restarts


# --- the coordinator alone ------------------------------------------------------------------------------

W0, W1, W2, W3 = (Peer("worker", rank) for rank in range(4))
LEASE = TakeLease(loader=0, epoch=0, batches=16, unseen=0, steps=0, samples=0)


class Run:
    """Two models on two workers each, and a server."""

    def __init__(self, restarts: int = 0) -> None:
        self.launcher, self.strategy = SilentLauncher(restarts), "async@pipeline:2"
        self.here = coordinator(self.strategy, 4, self.launcher)
        for request in (join(self.strategy), Prepared("x")):
            for peer in (W0, W1, W2, W3, Peer("server", 0)):
                self.say(peer, request)
        assert self.here.running

    def say(self, peer: Peer, request: Request[Any], incarnation: int = 0) -> list[Any]:
        answers: list[Any] = []
        self.here.handle(peer, request, answers.append, incarnation)
        return answers

    @property
    def joined(self) -> list[int]:
        return [notice.rank for notice in self.launcher.notices if notice.kind == "joined"]


@pytest.mark.parametrize("died", [W2, W3])
def test_a_model_leaves_the_run_as_one(died: Peer) -> None:
    run = Run()
    other = {W2: W3, W3: W2}[died]
    [taken] = run.say(W2, LEASE)
    run.here.died(died, "fell")
    assert run.launcher.ended == [other] and run.here.membership.workers == [W0, W1]
    assert run.here.data.leases.undone == taken.lease.count
    # What the other one still says before its process has ended is of no account.
    for request in (LEASE, NodeFailed("worker 2 is gone", 1), LeaveRun()):
        assert run.say(other, request) == []
    run.here.died(other, "was killed by SIGKILL")
    assert run.here.failure is None and run.here.data.leases.undone == taken.lease.count
    assert run.here.summary()["lost"] == {
        str(died): "fell", str(other): f"ended with {died}, which held a part of the same model"
    }  # fmt: skip
    run.here.died(W1, "fell")
    assert run.here.failure is not None and run.here.failure.message.startswith(
        "worker 1 fell, and no worker"
    )


def test_the_replacements_of_a_model_join_together() -> None:
    run = Run(restarts=2)
    asked: JoinRun = join(run.strategy)
    run.here.died(W3, "fell")
    assert run.here.membership.expected == {W2, W3} and run.launcher.restarts == 1
    run.here.died(W2, "was killed by SIGKILL", incarnation=0)  # the end that the launcher was asked for
    assert run.here.membership.expected == {W2, W3} and run.launcher.restarts == 1
    welcomed: list[Any] = []
    run.here.handle(W2, asked, welcomed.append, 1)
    assert not welcomed  # alone it would not know the address of the other
    run.here.died(W3, "stumbled", incarnation=1)  # before it has joined: both start again
    assert run.here.membership.expected == {W2, W3} and run.launcher.ended == [W2, W2]
    run.here.handle(W2, asked, welcomed.append, 2)
    run.here.handle(W3, asked, welcomed.append, 2)
    assert [[rank for role, rank, _ in each.peers if role == "worker"] for each in welcomed] == [
        [0, 1, 2, 3]
    ] * 2
    prepared: list[Any] = []
    run.here.handle(W3, Prepared("x"), prepared.append, 2)
    assert not prepared and not run.joined
    run.here.handle(W2, Prepared("x"), prepared.append, 2)
    assert len(prepared) == 2 and sorted(run.joined) == [2, 3]
    assert run.here.summary()["replaced"] == {"worker 2": 1, "worker 3": 1}
