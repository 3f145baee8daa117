"""One run on several hosts: launchers that share nothing but an address and a key.

Each launcher is a process with shared memory and a host id of its own, so they are hosts to each other, and
talk over TCP on loopback.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.launch.console import Console
from polyrhythm.session.context import session
from tests.scripts.train import EXAMPLES, Numbered, network, train
from tests.support.combine import few
from tests.support.programs import MOMENTUM, Script, distance, events, same, trained

_fork = multiprocessing.get_context("fork")
SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
START = 60.0  # seconds for a run to begin on a busy machine
SOON = 15.0  # seconds for everything to be over


class Host:
    """A launcher in a process of its own; what it shows, and how it ended."""

    def __init__(self, folder: Path, name: str, start: Callable[[Console], Any]) -> None:
        self.shown, self.outcome = folder / f"{name}.txt", folder / f"{name}.json"
        self.shown.touch()
        self.process = _fork.Process(target=self._live, args=(start,), name=name)
        self.process.start()
        self.family: set[psutil.Process] = set()

    def _live(self, start: Callable[[Console], Any]) -> None:
        os.setsid()
        outcome: dict[str, Any] = {"error": "", "code": 0}
        with self.shown.open("w", buffering=1) as stream:
            try:
                result = start(Console(stream, quiet=True))
                outcome["summary"] = None if result is None else result.summary
            except pr.PolyrhythmError as error:
                outcome |= {"error": str(error), "code": error.exit_code}
            except KeyboardInterrupt:
                outcome |= {"error": "interrupted", "code": 130}
        self.outcome.write_text(json.dumps(outcome))

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def incarnations(self) -> bool:
        return self.process.is_alive()

    @property
    def text(self) -> str:
        return self.shown.read_text()

    def find(self, pattern: str) -> str:
        """The first group of a pattern in what it shows, once it is there."""
        until(lambda: re.search(pattern, self.text) or not self.process.is_alive())
        match = re.search(pattern, self.text)
        assert match, self.text + (self.outcome.read_text() if self.outcome.exists() else "")
        return match[1]

    def note(self) -> None:
        """Remembers its processes, to see later that they are gone."""
        if self.process.is_alive():
            self.family |= set(psutil.Process(self.pid).children(recursive=True))

    def end(self, within: float = START) -> dict[str, Any]:
        """Its outcome, and that nothing of it is left."""
        self.process.join(within)
        assert not self.process.is_alive(), self.text
        until(lambda: not [each for each in self.family if alive(each)], within=4.0)
        self.process.close()
        return json.loads(self.outcome.read_text()) if self.outcome.exists() else {"code": -9}


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], object], within: float = START) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Hosts:
    """Starts launchers: first `run`, which then is at `address`, and those that `join`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, folder / "run.key"
        self.all: list[Host] = []
        self.address = ""

    def run(self, program: Any, *, listen: str = "tcp:127.0.0.1:0", **how: Any) -> Host:
        how = {"runs": self.folder / "runs", "name": "run", "key": self.key, "timeout": 60.0} | how
        host = self._start("a", lambda console: pr.run(program, listen=listen, console=console, **how))
        self.address = host.find(r"polyrhythm[. ]join\W+([\d.:]+)")
        return host

    def join(self, program: Any, workers: int = 1, key: Path | None = None, site: str = "") -> Host:
        name = "bcdefgh"[len(self.all) - 1]
        go = partial(pr.join, self.address, program, workers=workers, key=key or self.key, site=site)
        return self._start(name, lambda console: go(console=console))

    def _start(self, name: str, start: Callable[[Console], Any]) -> Host:
        self.all.append(Host(self.folder, name, start))
        return self.all[-1]

    def note(self) -> None:
        for host in self.all:
            host.note()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    for host in found.all:
        try:
            if host.process.is_alive():
                host.process.kill()
            host.process.join()
        except ValueError:
            pass  # closed: it has ended as it should


def simulated(script: Script, strategy: str, folder: Path, workers: int = 4) -> dict[str, Any]:
    return pr.simulate(
        script, workers=workers, strategy=strategy, runs=folder / "runs", name="simulated", threads=1
    )


# --- they train ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "local:4", "sync"])
def test_lockstep_run_on_two_hosts_gives_the_bits_of_the_simulator(hosts: Hosts, strategy: str) -> None:
    """Sums in rank order give the bits of the simulator, wherever the workers are."""
    script = Script(optimizer=MOMENTUM, shuffle=True)
    begun = hosts.run(script, workers=4, here=2, strategy=strategy, collective="direct")
    joined = hosts.join(script, workers=2)
    assert joined.end()["code"] == 0
    summary = begun.end()["summary"]
    expected = simulated(script, strategy, hosts.folder)
    assert summary["digest"] == expected["digest"]
    assert same(trained(summary), trained(expected))
    assert summary["samples"] == expected["samples"] and summary["lost"] == {}


@pytest.mark.parametrize("first", [2, 1])
def test_two_level_run_on_two_hosts_matches_the_simulator(hosts: Hosts, first: int) -> None:
    """A host may be a site: it shares memory inside, and one of its workers talks to the other host.

    Or a site has workers on two hosts, which exchange as the workers of several hosts do.
    """
    cluster = hosts.folder / "cluster.toml"
    cluster.write_text(f'[[hosts]]\ncount = {first}\nsite = "a"\n[[hosts]]\nsite = "b"\n')
    script = Script(optimizer=MOMENTUM, shuffle=True)
    begun = hosts.run(script, workers=4, here=2, strategy="allreduce / diloco:4", cluster=cluster)
    assert hosts.join(script, workers=2).end()["code"] == 0
    summary = begun.end()["summary"]
    expected = pr.simulate(
        script, workers=4, strategy="allreduce / diloco:4", runs=hosts.folder / "runs", threads=1,
        cluster=cluster,
    )  # fmt: skip
    assert distance(trained(summary), trained(expected)) < 1e-12
    if first == 2:
        assert summary["digest"] == expected["digest"]


def test_a_joining_host_gets_ranks_of_its_own_site(hosts: Hosts) -> None:
    """In any order of joining, a machine gets the ranks of its own site."""
    cluster = hosts.folder / "cluster.toml"
    cluster.write_text(
        "".join(
            f'[[hosts]]\ncount = {count}\nsite = "{name}"\n' for name, count in (("a", 1), ("b", 2), ("c", 1))
        )
    )
    script = Script(optimizer=MOMENTUM, shuffle=True)
    begun = hosts.run(script, workers=4, here=1, strategy="allreduce / local:2", cluster=cluster)
    for site, wrong in [
        ("", r"say with --site at which this host is: b \(2\), c \(1\)"),
        ("d", "the run has no site 'd'; it has: a, b, c"),
        ("a", "1 worker cannot join at a, where 0 are missing"),
    ]:
        refused = hosts.join(script, workers=1, site=site).end()
        assert refused["code"] == 2 and re.search(wrong, refused["error"])
    last = hosts.join(script, workers=1, site="c")
    last.find("joined the run at (.*) with worker 3 at c\n")
    begun.find("waiting for (2) of 4 workers; on another host.*\n.*workers=2.*site='b'")
    assert hosts.join(script, workers=2, site="b").end()["code"] == last.end()["code"] == 0
    assert begun.end()["summary"]["lost"] == {}


def test_default_allreduce_on_three_hosts_matches_the_simulator(hosts: Hosts) -> None:
    """In shared memory inside hosts and by a ring between them, sums differ in the last bits only."""
    script = Script(optimizer=MOMENTUM, shuffle=True)
    begun = hosts.run(script, workers=5, here=2, strategy="allreduce")
    first = hosts.join(script, workers=1)
    first.find("joined the run at (.*) with worker 2\n")
    begun.find("waiting for (2) of 5 workers; on another host.*\n.*workers=2")
    second = hosts.join(script, workers=2)
    assert first.end()["code"] == second.end()["code"] == 0
    summary = begun.end()["summary"]
    expected = simulated(script, "allreduce", hosts.folder, workers=5)
    assert distance(trained(summary), trained(expected)) < 1e-12
    places = {line["node"] for line in events(summary, "step")}
    assert places == {f"worker {rank}" for rank in range(5)}


@pytest.mark.parametrize("strategy", ["async", "ssp:2"])
def test_asynchronous_run_on_two_hosts_trains_on_every_example(hosts: Hosts, strategy: str) -> None:
    """Workers of two hosts push to servers on the first; every example is trained on."""
    begun = hosts.run(partial(train, epochs=2), workers=3, here=1, strategy=strategy, servers=2)
    joined = hosts.join(partial(train, epochs=2), workers=2)
    assert joined.end()["code"] == 0
    summary = begun.end()["summary"]
    assert summary["samples"] == 2 * EXAMPLES and summary["servers"] == 2
    assert {line["node"] for line in events(summary, "step")} == {"worker 0", "worker 1", "worker 2"}
    # What nodes print is shown on their own host.
    assert "[worker 2] worker 2 is done" in joined.text and "worker 2 is done" not in begun.text
    assert "[worker 0] worker 0 is done" in begun.text and "worker 0 is done" not in joined.text


def test_the_first_host_may_run_servers_only(hosts: Hosts) -> None:
    """The host where the run began may have servers only."""
    begun = hosts.run(train, workers=2, here=0, strategy="async")
    assert hosts.join(train, workers=2).end()["code"] == 0
    assert begun.end()["summary"]["samples"] == EXAMPLES


def lending(folder: Path) -> None:
    """Trains, and notes with whom this worker shares memory."""
    train()
    current = session.get()
    assert current is not None
    node = current._context.node
    links = node.transport._links._links.values()
    shares = {str(link.peer): link.channel.bounds.arenas > 0 for link in links if link.channel is not None}
    inside = node._group._shared_memory
    shares["others"] = inside is not None and len(inside._members) - 1
    (folder / f"shares {node.me}").write_text(json.dumps(shares))


def test_shared_memory_is_used_only_between_nodes_of_one_host(hosts: Hosts) -> None:
    """By reference to a neighbour, over whatever connection; as bytes to all who cannot see the memory."""
    program = partial(lending, hosts.folder)
    begun = hosts.run(program, workers=3, here=1, strategy="async")
    joined = hosts.join(program, workers=2)
    assert joined.end()["code"] == begun.end()["code"] == 0
    shares = [json.loads((hosts.folder / f"shares worker {rank}").read_text()) for rank in range(3)]
    assert [each["server 0"] for each in shares] == [True, False, False]
    assert [each["others"] for each in shares] == [0, 1, 1]
    assert [each["coordinator 0"] for each in shares] == [True, False, False]


# --- who may not join ---------------------------------------------------------------------------------------


def test_a_host_with_the_wrong_key_is_refused_and_the_run_continues(hosts: Hosts) -> None:
    """A process with another key learns nothing and disturbs no node."""
    begun = hosts.run(train, workers=2, here=1, strategy="allreduce")
    other = hosts.folder / "other.key"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    refused = hosts.join(train, key=other).end()
    assert refused["code"] == 2
    assert refused["error"] == f"the run at {hosts.address} has another key; copy its file from that host"
    begun.find("(does not have the key of this run)")
    assert hosts.join(train).end()["code"] == 0
    assert begun.end()["code"] == 0


def test_hosts_with_too_many_workers_cannot_join(hosts: Hosts) -> None:
    """Both sides say why; nothing else happens, and machines that fit join."""
    program = partial(patient, hosts.folder)
    begun = hosts.run(program, workers=3, here=1, strategy="async")
    refused = hosts.join(program, workers=3).end()
    assert (refused["code"], refused["error"]) == (
        2, f"cannot join the run at {hosts.address}: 3 workers cannot join where 2 of 3 are missing",
    )  # fmt: skip
    begun.find("(127.0.0.1 cannot join: 3 workers cannot join where 2 of 3 are missing)")
    joined = hosts.join(program, workers=2)
    joined.find("(joined)")
    late = hosts.join(program).end()
    assert late["error"].endswith("the run has all of its 3 workers; no more can join")
    go_on(hosts)
    assert joined.end()["code"] == begun.end()["code"] == 0


def test_a_host_with_another_polyrhythm_version_is_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = hosts.run(train, workers=2, here=1, strategy="allreduce")
    with monkeypatch.context() as patch:
        patch.setattr("polyrhythm.launch.joiner.__version__", "9.9")
        refused = hosts.join(train).end()
    assert (
        refused["error"].endswith(f"the run uses polyrhythm {pr.__version__}, and this host has 9.9")
        and refused["code"] == 2
    )
    assert hosts.join(train).end()["code"] == begun.end()["code"] == 0


def test_hosts_with_different_models_fail_on_both_sides(hosts: Hosts) -> None:
    """The run fails on both hosts, and says that models differ."""
    begun = hosts.run(Script(), workers=2, here=1, strategy="allreduce")
    joined = hosts.join(train).end()
    assert "have different models" in joined["error"] and joined["code"] == 1
    assert begun.end()["error"] == joined["error"]


def test_join_refuses_a_bad_address_or_key_file(tmp_path: Path) -> None:
    key = tmp_path / "run.key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    with pytest.raises(pr.UsageError, match=r"no run listens at 127.0.0.1:1; first start `polyrhythm run"):
        pr.join("127.0.0.1:1", train, key=key)
    with pytest.raises(pr.UsageError, match=r"127.0.0.1 is no address of a run; give HOST:PORT"):
        pr.join("127.0.0.1", train, key=key)
    key.chmod(0o640)
    with pytest.raises(pr.UsageError, match=r"other users can read the key .*chmod 600"):
        pr.join("127.0.0.1:1", train, key=key)
    with pytest.raises(pr.UsageError, match=r"there is no key .*; copy it from the host where"):
        pr.join("127.0.0.1:1", train, key=tmp_path / "none.key")
    key.write_bytes(bytes(31))
    key.chmod(0o600)
    with pytest.raises(pr.UsageError, match="does not have 32 bytes"):
        pr.join("127.0.0.1:1", train, key=key)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"key": None}, "1 of 2 workers run on other hosts, and need the run's key; give --key FILE"),
        ({"listen": "unix:"}, "1 of 2 workers run on other hosts; say with --listen HOST:PORT where"),
        ({"listen": "tcp:0.0.0.0:0"}, "0.0.0.0 tells other hosts nothing; give --listen the address"),
        ({"here": 3}, "here is 3; it must be between 0 and the number of workers, 2"),
        ({"servers": "colocated", "strategy": "async"}, "servers run on this host only"),
        ({"collective": "shared"}, "shared needs all workers on one host; use hierarchical"),
    ],
)
def test_a_multi_host_run_refuses_missing_or_invalid_options(
    tmp_path: Path, how: dict[str, Any], why: str
) -> None:
    given = {"listen": "tcp:127.0.0.1:0", "key": tmp_path / "run.key", "here": 1} | how
    with pytest.raises(pr.UsageError, match=re.escape(why)):
        pr.run(train, workers=2, runs=None, **given)
    assert not list(tmp_path.iterdir())


def test_the_key_is_made_for_its_owner_alone(hosts: Hosts) -> None:
    """A run that nobody joins ends in its time; the key it made is 32 bytes that nobody else can read."""
    begun = hosts.run(train, workers=2, here=1, strategy="allreduce", timeout=1.0)
    status = hosts.key.stat()
    assert (status.st_size, status.st_mode & 0o777) == (32, 0o600)
    assert begun.end(SOON)["error"] == "waited 1 s for another host to bring worker 1; none did"
    secret = hosts.key.read_bytes()
    written = [file for file in hosts.folder.rglob("*") if file.is_file() and file != hosts.key]
    contents = [file.read_bytes() for file in written]
    contents = [gzip.decompress(each) if each[:2] == b"\x1f\x8b" else each for each in contents]
    assert contents and not [each for each in contents if secret in each or secret.hex().encode() in each]


# --- life and death -----------------------------------------------------------------------------------------


def patient(folder: Path) -> None:
    """Trains; every worker waits in its third step until the test has struck."""
    session = pr.init()
    me = session._context.me
    (folder / str(me)).write_text(str(os.getpid()))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for step, (_, x, y) in enumerate(loader, 1):
        if step == 3:
            (folder / f"trains {me.rank}").touch()
            until((folder / "struck").exists)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def begin(
    hosts: Hosts, strategy: str, here: int = 1, workers: int = 3, program: Any = None, **how: Any
) -> tuple[Host, Host]:
    """Two hosts that train, and go on when the test has struck."""
    program = program or partial(patient, hosts.folder)
    begun = hosts.run(program, workers=workers, here=here, strategy=strategy, **how)
    joined = hosts.join(program, workers=workers - here)
    marks = [hosts.folder / f"trains {rank}" for rank in range(workers)]
    until(lambda: all(mark.exists() for mark in marks) or not all(map(Host.incarnations, (begun, joined))))
    hosts.note()
    return begun, joined


def go_on(hosts: Hosts) -> None:
    (hosts.folder / "struck").touch()


def kill(hosts: Hosts, worker: int) -> None:
    os.kill(int((hosts.folder / f"worker {worker}").read_text()), signal.SIGKILL)
    go_on(hosts)


def test_a_killed_remote_worker_ends_lockstep(hosts: Hosts) -> None:
    begun, joined = begin(hosts, "allreduce")
    kill(hosts, 2)
    error = "worker 2 was killed by SIGKILL on 127.0.0.1; under allreduce no worker can continue without it"
    for host in (begun, joined):
        outcome = host.end(SOON)
        assert outcome["code"] == 1 and outcome["error"].startswith(error)
    assert "worker 2 was killed by SIGKILL\n" in joined.text


def test_others_train_on_without_a_killed_remote_worker(hosts: Hosts) -> None:
    begun, joined = begin(hosts, "async")
    kill(hosts, 2)
    assert joined.end()["code"] == 0
    summary = begun.end()["summary"]
    assert summary["lost"] == {"worker 2": "was killed by SIGKILL on 127.0.0.1"}
    assert summary["batches_undone"] == 0
    assert "worker 2 was killed by SIGKILL on 127.0.0.1; the others train on\n" in begun.text


@pytest.mark.slow
def test_a_killed_remote_worker_is_replaced_on_its_host(hosts: Hosts) -> None:
    """More often than there is spare memory for, too."""
    program = partial(train, do="kill", rank=2, epochs=10, pause=0.02, folder=hosts.folder)
    begun, joined = begin(hosts, "async", program=program, restarts=4)
    summary = begun.end()["summary"]
    assert joined.end()["code"] == 0
    assert summary["replaced"]["worker 2"] == 4
    assert summary["lost"] == {"worker 2": "was killed by SIGKILL on 127.0.0.1 5 times"}
    assert joined.text.count("worker 2 was killed by SIGKILL\n") == 5


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_a_killed_remote_launcher_counts_as_the_loss_of_its_workers(hosts: Hosts, strategy: str) -> None:
    """It counts as the death of all its workers, and they die with it."""
    begun, joined = begin(hosts, strategy)
    os.kill(joined.pid, signal.SIGKILL)
    assert joined.end(SOON)["code"] == -9
    go_on(hosts)
    outcome = begun.end()
    lost = "is gone with the launcher on 127.0.0.1 (workers 1 and 2)"
    if strategy == "allreduce":
        assert outcome["error"].startswith(f"worker 1 {lost}; under allreduce no worker can continue")
    else:
        assert outcome["summary"]["lost"] == {"worker 1": lost, "worker 2": lost}
        assert outcome["summary"]["batches_undone"] == 0


def test_a_killed_remote_fork_server_takes_its_workers_out_of_the_run(hosts: Hosts) -> None:
    """Its launcher says so, takes its workers out of the run and leaves nothing."""
    begun, joined = begin(hosts, "allreduce")
    psutil.Process(joined.pid).children()[0].kill()
    why = "the process that forks the nodes is gone; was it killed?"
    assert joined.end(SOON) == {"error": why, "code": 1}
    assert begun.end(SOON)["error"].startswith(f"worker 1 ended ({why}) on 127.0.0.1 (workers 1 and 2); ")


def test_a_new_worker_saves_the_result_if_the_host_of_all_workers_dies(hosts: Hosts) -> None:
    """What servers hold is brought home by one more worker, where the servers are."""
    begun, joined = begin(hosts, "async", here=0, workers=2)
    os.kill(joined.pid, signal.SIGKILL)
    joined.end(SOON)
    go_on(hosts)
    summary = begun.end()["summary"]
    assert set(summary["lost"]) == {"worker 0", "worker 1"} and summary["joined"] == 1
    assert summary["batches_undone"] == 0


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_joined_hosts_end_if_the_first_launcher_is_killed(hosts: Hosts, strategy: str) -> None:
    begun, joined = begin(hosts, strategy)
    os.kill(begun.pid, signal.SIGKILL)
    outcome = joined.end(SOON)
    assert outcome == {"error": f"the run at {hosts.address} is gone: its connection ended", "code": 1}
    begun.end(SOON)


@few("strategy", ["allreduce", "async"], quick=0)
def test_ctrl_c_on_the_first_host_ends_the_run_on_all_hosts(hosts: Hosts, strategy: str) -> None:
    begun, joined = begin(hosts, strategy)
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.end(SOON) == {"error": "interrupted", "code": 130}
    assert joined.end(SOON) == {"error": f"the run at {hosts.address} was interrupted", "code": 130}


@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_ctrl_c_on_a_joined_host_takes_its_workers_out_of_the_run(hosts: Hosts, strategy: str) -> None:
    begun, joined = begin(hosts, strategy)
    os.killpg(joined.pid, signal.SIGINT)
    assert joined.end(SOON) == {"error": "interrupted", "code": 130}
    go_on(hosts)
    outcome = begun.end()
    lost = "was interrupted on 127.0.0.1 (workers 1 and 2)"
    if strategy == "allreduce":
        assert outcome["error"].startswith(f"worker 1 {lost}; under allreduce no worker can continue")
    else:
        assert outcome["summary"]["lost"] == {"worker 1": lost, "worker 2": lost}


def test_another_host_may_replace_one_that_left_before_the_start(hosts: Hosts) -> None:
    """Another may come in its place."""
    begun = hosts.run(train, workers=3, here=1, strategy="allreduce")
    first = hosts.join(train)
    first.find("with worker (1)\n")
    begun.find("(waiting for 1 of 3)")
    os.killpg(first.pid, signal.SIGINT)
    assert first.end(SOON)["code"] == 130
    begun.find("(127.0.0.1 has left before the run began)")
    assert hosts.join(train, workers=2).end()["code"] == 0
    assert begun.end()["code"] == 0


def test_ctrl_c_while_waiting_for_hosts_ends_joined_hosts_too(hosts: Hosts) -> None:
    """Machines that have joined end too."""
    begun = hosts.run(train, workers=3, here=1, strategy="allreduce")
    joined = hosts.join(train)
    begun.find("(waiting for 1 of 3)")
    hosts.note()
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.end(SOON)["code"] == joined.end(SOON)["code"] == 130


def test_an_exception_on_a_remote_host_is_reported_on_both_hosts(hosts: Hosts) -> None:
    """The traceback is shown where it happened, the error on both hosts."""
    program = partial(train, do="raise", rank=2, step=4, folder=hosts.folder)
    begun, joined = begin(hosts, "allreduce", program=program)
    for host in (begun, joined):
        assert host.end(SOON)["error"] == "worker 2 failed: RuntimeError: the user's own mistake"
    assert joined.text.count("Traceback") == 1 and "Traceback" not in begun.text


# --- as a person types it -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_join_command_printed_by_run_works(tmp_path: Path) -> None:
    """The line that `run` shows is the command to type; both end with exit code 0."""
    command = [sys.executable, "-m", "polyrhythm"]
    key, runs = str(tmp_path / "run.key"), str(tmp_path / "runs")
    words = [
        "-n",
        "2",
        "--here",
        "1",
        "--listen",
        "127.0.0.1:0",
        "--key",
        key,
        "--runs",
        runs,
        "-s",
        "local:4",
    ]
    begun = subprocess.Popen(
        [*command, "run", str(SCRIPT), *words, "--json", "--", "--epochs", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert begun.stderr is not None
    assert begun.stderr.readline().startswith("waiting for 1 of 2 workers; on another host, with a copy of")
    shown = begun.stderr.readline().split()
    assert shown[0] == "polyrhythm" and shown[-3:] == ["--", "--epochs", "2"]
    joined = subprocess.run([*command, *shown[1:]], capture_output=True, text=True, check=True, timeout=START)
    output, _ = begun.communicate(timeout=START)
    assert begun.returncode == 0
    assert json.loads(output)["samples"] == 2 * EXAMPLES
    assert joined.stdout.startswith("trained; the result is on the machine of the run, 127.0.0.1:")
    assert "[worker 1] worker 1 is done" in joined.stderr
