"""Workers that die and come back: in simulation, and the coordinator's part of it alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.coordination.leases import Leases
from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Totals, UpdatesLost
from polyrhythm.core.message import Message
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import (
    Farewell,
    LeaveRun,
    NodeFailed,
    Prepared,
    ReleaseMemory,
    Report,
    Request,
    StepsDone,
    TakeLease,
    Welcome,
    WhoIsLate,
    WorkerNames,
)  # fmt: skip
from polyrhythm.worlds.cluster import Cluster, Crash
from tests.support.combine import each_value
from tests.support.launchers import SilentLauncher, coordinator, join
from tests.support.logs import check_laws
from tests.support.programs import Examples, Script, events

SCRIPT = Script(size=240, epochs=3)
W0, W1, W2, SERVER = Peer("worker", 0), Peer("worker", 1), Peer("worker", 2), Peer("server", 0)


def simulate_failures(folder: Path, failures: str, strategy: str = "async", **more: Any) -> dict[str, Any]:
    (folder / "c.toml").write_text(failures)
    given = {"workers": 3, "cluster": folder / "c.toml", "runs": folder / "runs", "name": "run", **more}
    return pr.simulate(given.pop("program", SCRIPT), strategy=strategy, **given)


def crash(workers: list[int], at: str, back: str = "") -> str:
    return f'[[failures]]\nworkers = {workers}\nat = "{at}"\n' + (f'back = "{back}"\n' if back else "")


LINKS = '[[hosts]]\nbandwidth = "1 Mbit/s"\nlatency = "2 ms"\nstep_time = { exponential = "10 ms" }\n'
CASES = {
    "gone": crash([1], "95 ms"),
    "back": crash([1], "95 ms", "200 ms"),
    "the first": crash([0], "95 ms", "200 ms"),
    "while initializing": LINKS + crash([0], "1 ms", "30 ms"),
    "again and again": crash([1], "50 ms", "60 ms") + crash([1], "110 ms", "120 ms") + crash([1], "160 ms"),
    "one after another": crash([0], "50 ms", "90 ms") + crash([1], "60 ms") + crash([2], "70 ms", "75 ms"),
    "all at once": crash([0, 1, 2], "95 ms", "200 ms"),
    "all but one": crash([0, 2], "95 ms"),
    "over slow links": LINKS + crash([0], "500 ms", "700 ms") + crash([2], "501 ms"),
    "at the end": crash([1], "590 ms", "5 s"),
    "while it is away": crash([1], "95 ms", "200 ms") + crash([1], "150 ms", "160 ms"),
    "later than the end": crash([1], "500 s", "501 s"),
}


@each_value(("strategy", ["async", "async:max_staleness=3"]), ("case", CASES), most=6)
def test_simulated_crashes_lose_no_batches_and_keep_the_log_consistent(
    tmp_path: Path, case: str, strategy: str
) -> None:
    one = simulate_failures(tmp_path, CASES[case], strategy)
    assert one["samples"] >= SCRIPT.size * SCRIPT.epochs
    assert one["batches_undone"] == 0
    check_laws(one, at_once=strategy == "async")
    leased = events(one, "lease")
    assert {(line["epoch"], line["first"] + at) for line in leased for at in range(line["count"])} == {
        (epoch, batch) for epoch in range(SCRIPT.epochs) for batch in range(SCRIPT.size // SCRIPT.batch)
    }
    other = simulate_failures(tmp_path, CASES[case], strategy)
    assert {**one, "folder": ""} == {**other, "folder": ""}


def test_summary_reports_lost_and_replaced_workers(tmp_path: Path) -> None:
    calm = simulate_failures(tmp_path, "")
    summary = simulate_failures(tmp_path, CASES["again and again"])
    assert calm["joined"] == 0 and calm["lost"] == {} and calm["replaced"] == {}
    assert summary["joined"] == 2 and summary["replaced"] == {"worker 1": 2}
    assert summary["lost"] == {"worker 1": "crashed at 0.05 s; crashed at 0.11 s; crashed at 0.16 s"}
    assert summary["steps"] >= calm["steps"] and summary["bytes_sent"] > 0
    late = simulate_failures(tmp_path, CASES["later than the end"])
    assert late["lost"] == {} and late["wall_s"] == calm["wall_s"]


@pytest.mark.parametrize("epochs", [True, False])
def test_a_joining_worker_skips_the_epochs_that_are_over(tmp_path: Path, epochs: bool) -> None:
    """It runs through what is over, without a batch, so that its schedulers count on."""

    def script() -> None:
        session, model = pr.init(), SCRIPT.model()
        loader = DataLoader(Examples(SCRIPT.size), batch_size=SCRIPT.batch, shuffle=True)
        model, optimizer, loader = session.prepare(model, SCRIPT.optimizer(model.parameters()), loader)
        for epoch in session.epochs(3) if epochs else range(3):
            steps = 0
            for x, _ in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                steps += 1
            if session.rank == 1:
                counted.append((epoch, steps))

    counted: list[tuple[int, int]] = []
    # An epoch takes 200 ms, and 300 ms without it: it dies in the first and comes back in the second.
    summary = simulate_failures(tmp_path, crash([1], "95 ms", "350 ms"), program=script)
    assert summary["joined"] == 1
    assert [epoch for epoch, _ in counted] == [0, 1, 2]
    assert all((steps > 0) == (epoch > 0) for epoch, steps in counted)


def test_a_crash_runs_none_of_the_script(tmp_path: Path) -> None:
    """What a script does at its end cannot fail the run, or speak to it, when its worker has crashed."""

    def script() -> None:
        session, model = pr.init(), SCRIPT.model()
        loader = DataLoader(Examples(SCRIPT.size), batch_size=SCRIPT.batch, shuffle=True)
        model, optimizer, loader = session.prepare(model, SCRIPT.optimizer(model.parameters()), loader)
        try:
            for x, _ in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        finally:
            session.log(**{f"worker {session.rank} ended": session._node.now()})
            if session.rank == 1:
                raise RuntimeError("in the middle of a crash")

    summary = simulate_failures(tmp_path, crash([1], "95 ms"), program=script)
    assert summary["samples"] >= SCRIPT.size and summary["batches_undone"] == 0
    assert set(summary["metrics"]) == {"worker 0 ended", "worker 2 ended"}


@pytest.mark.parametrize("strategy", ["adpsgd", "noloco:3", "push:1", "gossip", "choco:0.5+topk:0.5"])
def test_replacements_that_start_together_do_not_wait_for_each_other(tmp_path: Path, strategy: str) -> None:
    """With three optimizers each knows of the other before it copies the last parameters."""

    def script() -> None:
        session = pr.init()
        models = [torch.nn.Linear(2, 1) for _ in range(3)]
        for model in models:
            torch.nn.init.ones_(model.weight)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        session.prepare(*models, *optimizers)
        if session._node.incarnation:
            copied.append([bool((model.weight < 1).all()) for model in models])
        for _ in range(20):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    copied: list[list[bool]] = []
    links = '[[hosts]]\nlatency = "2 ms"\nbandwidth = "1 Gbit/s"\nstep_time = "10 ms"\n'
    failures = links + crash([0, 1], "100 ms", "110 ms")
    summary = simulate_failures(tmp_path, failures, strategy, program=script, workers=4)
    assert summary["joined"] == 2 and copied == [[True] * 3] * 2


@pytest.mark.parametrize("strategy", ["allreduce", "sync", "local:4"])
@pytest.mark.parametrize("back", ["", "200 ms"])
def test_lockstep_fails_as_on_processes(tmp_path: Path, strategy: str, back: str) -> None:
    message = f"worker 1 crashed at 0.095 s; under {strategy} no worker can continue without it"
    with pytest.raises(pr.PolyrhythmError, match=re.escape(message)):
        simulate_failures(tmp_path, crash([1], "95 ms", back), strategy)


def test_a_simulated_run_fails_if_all_workers_crash(tmp_path: Path) -> None:
    with pytest.raises(pr.PolyrhythmError, match="no worker is left to send the final parameters"):
        simulate_failures(tmp_path, crash([0, 1, 2], "95 ms"))


# The cluster file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('at = "1 s"', "failures[0]: workers is missing; write, say, workers = [1]"),
        ("workers = [1]", 'failures[0]: at is missing; write, say, at = "0.5 s"'),
        ('workers = 1\nat = "1 s"', "workers = 1: must be a list of ranks, such as [0, 3]"),
        ('workers = [1]\nat = "0 s"', "at = '0 s': must be above 0"),
        ("workers = [1]\nat = 1", "at = 1: must be a text with a number and a unit"),
        ('workers = [1]\nat = "1 s"\nback = "1 s"', "back = '1 s': must be later than at"),
        ('workers = [1]\nat = "1 s"\nbakc = "2 s"', "unknown key 'bakc'; did you mean back?"),
        ('workers = [2]\nat = "1 s"\n[[hosts]]\ncount = 2', "only 2 hosts, so ranks are 0 to 1"),
    ],
)
def test_errors_about_failures_in_cluster_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(f"[[failures]]\n{text}")
    with pytest.raises(UsageError) as caught:
        Cluster.load(tmp_path / "c.toml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_failures_are_read_from_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(crash([1, 2], "500 ms", "1 s") + crash([0], "2 s"))
    assert Cluster.load(tmp_path / "c.toml").failures == (Crash((1, 2), 0.5, 1.0), Crash((0,), 2.0))


# The coordinator alone


@dataclass
class Told:
    """A coordinator that is running with two workers, and a server if any, and what it told and wanted."""

    restarts: int = 0
    strategy: str = "async"

    def __post_init__(self) -> None:
        self.launcher, self.join = SilentLauncher(self.restarts), join(self.strategy)
        self.here = coordinator(self.strategy, 2, self.launcher)
        self.members = self.here.membership
        self.released = self.launcher.freed
        nodes = (W0, W1, SERVER)[: 2 + self.here.plan.servers]
        for request in (self.join, Prepared("x")):
            for peer in nodes:
                self.say(peer, request)
        assert self.here.running

    @property
    def notices(self) -> list[tuple[str, int | None, int | None]]:
        """Kind, rank and incarnation of what nodes were told."""
        return [
            (notice.kind, notice.rank if notice.peer else None, notice.incarnation if notice.peer else None)
            for notice in self.launcher.notices
        ]

    def say(self, peer: Peer, request: Request[Any], incarnation: int = 0) -> Any:
        """The reply; None also if there is none yet."""
        answers: list[Any] = []
        self.here.handle(peer, request, answers.append, incarnation)
        return answers[-1] if answers else None

    def rejoin(self, peer: Peer, incarnation: int) -> Welcome:
        """The next incarnation of a worker joins and prepares."""
        welcome: Welcome = self.say(peer, self.join, incarnation)
        self.say(peer, Prepared("x"), incarnation)
        return welcome


def test_coordinator_names_the_last_worker_only_if_none_is_expected() -> None:
    """A worker that is done while another is expected is not the last."""
    told = Told(restarts=1)
    told.here.died(W1, "fell")
    assert told.members.expected == {W1} and told.notices == [("left", 1, 0)]
    assert told.say(W0, LeaveRun()) == Farewell(last=False)
    assert told.notices[1:] == [("left", 0, 0)] and not told.here.failure
    welcome = told.say(W1, told.join, incarnation=1)
    assert welcome.incarnation == 1 and welcome.workers == 2
    assert [role for role, _, _ in welcome.peers] == ["server", "worker"]
    assert told.notices[2:] == []  # nobody is to wait for one that still loads its data
    told.say(W1, Prepared("x"), incarnation=1)
    assert told.notices[2:] == [("joined", 1, 0)]
    assert told.say(W1, LeaveRun(), incarnation=1) == Farewell(last=True)
    told.here.result(W1, "digest", [], lambda: None)
    assert told.notices[3:] == [("left", 1, 1), ("over", None, None)]
    assert not told.here.finished
    told.say(SERVER, LeaveRun())
    assert told.here.finished and told.here.summary()["joined"] == 1


def test_a_replacement_is_not_told_of_another_that_still_loads_its_data() -> None:
    """It would wait for that one, perhaps in vain: nobody answers before `prepare`."""
    told = Told(restarts=2)
    for peer in (W0, W1):
        told.here.died(peer, "fell")
    first, second = told.say(W1, told.join, 1), told.say(W0, told.join, 1)
    assert [rank for role, rank, _ in first.peers if role == "worker"] == [1]
    assert [rank for role, rank, _ in second.peers if role == "worker"] == [0]
    told.say(W1, Prepared("x"), 1)
    assert told.notices[-1] == ("joined", 1, 0)
    told.here.died(W0, "fell")
    assert not told.members.loading


def test_coordinator_counts_replacements_that_die_before_joining() -> None:
    told = Told(restarts=2)
    told.here.died(W1, "fell")
    told.here.died(W1, "fell")
    assert told.members.expected == {W1} and told.members.incarnations[W1] == 2
    told.here.died(W1, "stumbled")
    assert not told.members.expected and not told.here.failure
    assert told.notices == [("left", 1, 0)]  # the others never knew of it
    assert told.members.lost == {"worker 1": "fell 2 times; stumbled"}
    assert told.released == [(W1, 1), (W1, 2)]
    assert told.say(W0, LeaveRun()) == Farewell(last=True)


def test_coordinator_fails_if_no_worker_is_left_or_expected() -> None:
    told = Told(restarts=1)
    told.here.died(W0, "fell")
    told.here.died(W1, "fell")
    assert told.here.failure is None
    told.here.died(W0, "fell")
    assert told.here.failure is not None and "no worker is left" in told.here.failure.message


def test_a_finished_worker_is_not_lost() -> None:
    told = Told(restarts=1)
    told.say(W1, LeaveRun())
    told.here.died(W1, "ended")
    assert told.members.lost == {} and not told.members.expected


def test_coordinator_ignores_messages_of_a_previous_life() -> None:
    """What a process sent before it died, and that is read after, does nothing to its replacement."""
    told = Told(restarts=1)
    lease = TakeLease(loader=0, epoch=0, batches=8, unseen=0, steps=0, samples=0)
    first = told.say(W1, lease)
    told.here.died(W1, "fell")
    assert told.here.data.leases.undone == first.lease.count
    for request in (lease, LeaveRun(), told.join, NodeFailed("", 1)):
        assert told.say(W1, request, incarnation=0) is None
    assert told.here.data.leases.undone == first.lease.count and W1 not in told.members.members
    assert not told.here.failure
    told.rejoin(W1, 1)
    assert told.say(W1, LeaveRun(), incarnation=0) is None and W1 in told.members.members
    assert told.say(W1, lease, incarnation=1) == first


@pytest.mark.parametrize("dies", ["nobody", "before it is done", "when it is done"])
def test_totals_are_final_when_all_are_done(dies: str) -> None:
    """A worker that is done waits for the others, which may still ask it, also for one in place of another.

    One that dies when it is done has no successor: there is nothing left to do.
    """
    told, answers = Told(restarts=1, strategy="gossip"), list[Any]()
    if dies == "before it is done":
        told.here.died(W1, "fell")
    told.here.handle(W0, StepsDone(), answers.append)
    late = [] if told.members.expected else ["worker 1"]
    assert answers == [] and told.say(W0, WhoIsLate()) == WorkerNames(late)
    if dies == "before it is done":
        told.rejoin(W1, 1)
        assert answers == []
    incarnation = told.members.incarnations[W1]
    if dies == "when it is done":
        told.here.handle(W1, StepsDone(), lambda _: None)
        assert answers == [None]
        told.here.died(W1, "fell")
        assert not told.members.expected
    else:
        told.here.handle(W1, StepsDone(), answers.append, incarnation)
        assert answers == [None, None]
        told.here.handle(W1, LeaveRun(), answers.append, incarnation)
    count = len(answers)
    assert {*answers} == {None} and told.say(W0, LeaveRun()) == Farewell(last=True)
    told.here.result(W0, "digest", [], lambda: None)
    assert told.here.finished and answers[count:] == [Farewell(last=False)] * (dies != "when it is done")


def test_one_that_dies_while_it_waits_for_the_others_has_no_successor() -> None:
    told, answers = Told(restarts=1, strategy="gossip"), list[Any]()
    told.here.handle(W1, StepsDone(), answers.append)
    told.here.died(W1, "fell")
    assert not told.members.expected and told.members.lost == {"worker 1": "fell"}
    told.here.handle(W0, StepsDone(), answers.append)
    assert answers == [None]  # of worker 0: nobody replies to the dead
    assert told.say(W0, LeaveRun()) == Farewell(last=True)


def test_totals_of_all_lives_count() -> None:
    told = Told(restarts=1)
    totals = Totals(steps=5, samples=20, bytes_sent=7, bytes_between=3, compute_s=1.0, wait_s=1.0)
    told.say(W1, Report(totals))
    told.here.died(W1, "fell")
    told.rejoin(W1, 1)
    told.say(W1, Report(msgspec.structs.replace(totals, steps=2, samples=8)), incarnation=1)
    told.say(W1, Report(msgspec.structs.replace(totals, steps=6, samples=24)), incarnation=0)  # read late
    assert told.here.tally.progress() == (8, 32)
    summary = told.here.summary()
    assert (summary["steps"], summary["samples"], summary["bytes_sent"]) == (8, 32, 14)


def test_counts_of_reports_add_up_in_the_summary() -> None:
    """A report tells what happened since the last one, also if none of the events are recorded."""
    told = Told()
    told.say(SERVER, Report(staleness={0: 2, 3: 1}, dropped=1))
    told.say(SERVER, Report(staleness={3: 1}, updates_lost=UpdatesLost(10, 2, 0.2)))
    summary = told.here.summary()
    assert summary["staleness"] == {"mean": 1.5, "p95": 3.0, "max": 3.0} and summary["dropped"] == 1
    assert summary["lost_updates"] == {"counted": 10, "lost": 2, "share": 0.2}


def test_memory_of_a_dead_worker_is_freed_after_all_servers_release_it() -> None:
    told = Told(restarts=1)
    told.here.died(W1, "fell")
    assert told.released == []
    release = ReleaseMemory(rank=1, incarnation=0)
    told.say(W0, release)
    assert told.released == []
    told.say(SERVER, release)
    assert told.released == [(W1, 0)]
    told.say(SERVER, release)
    told.say(SERVER, ReleaseMemory(rank=0, incarnation=0))
    assert told.released == [(W1, 0)]


def test_layouts_are_compared_among_nodes_with_the_same_part_of_the_model() -> None:
    here = coordinator("async", 2, SilentLauncher())
    for peer in (W0, W1, SERVER):
        here.handle(peer, join("async"), lambda _: None)
    for peer, request in (
        (W0, Prepared("x", "stage 0", outline=["a [2]", "b [3]"])),
        (W1, Prepared("y", "stage 1")),
    ):
        here.handle(peer, request, lambda _: None)
    assert here.failure is None
    here.handle(SERVER, Prepared("y", "stage 0", outline=["a [2]"]), lambda _: None)
    assert here.failure is not None and here.failure.message == (
        "server 0 and worker 0 have different models of stage 0: the first difference is no parameter on "
        "server 0 and b [3] on worker 0; every node must build the same model and optimizer"
    )


def test_finished_epochs_have_no_leases_for_a_joining_worker() -> None:
    """Also one that its script left early, with batches to spare; what came back is still handed out."""
    leases = Leases()
    held = leases.take(0, 0, 0, 100, [0, 1], longest=8)
    assert leases.take(1, 0, 1, 100, [0, 1], longest=8) is not None
    assert leases.lose(1) == 8
    leases.enter(1)
    assert leases.take(1, 0, 0, 100, [0, 1], longest=8) is None
    leases.lose(0)
    assert leases.take(1, 0, 0, 100, [0, 1], longest=8) == held  # although a later one came back before it
    assert leases.take(1, 0, 0, 100, [0, 1], longest=8) is None
    assert leases.take(1, 0, 1, 100, [0, 1], longest=8) is not None


def test_message_life_is_encoded_in_its_sequence_number() -> None:
    assert Message(W0, "x", 5).incarnation == 0
    assert Message(W0, "x", (3 << 40) + 5).incarnation == 3
