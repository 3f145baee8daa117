"""All-reduce algorithms: chosen by a table or forced, with equal results; none waits for a dead worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.collectives.choose import ALGORITHMS, RING_CHUNK, choose
from polyrhythm.collectives.shared_memory import BOARD
from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.events import Event
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.wire import Transport, TransportOptions
from polyrhythm.wire.arena import Arenas
from polyrhythm.worlds.processes.node import ProcessNode
from tests.support.combine import few
from tests.support.programs import MOMENTUM, Script, alone, distance, same, trained

REAL = [
    ("auto", "unix:"),
    ("shared", "unix:"),
    ("direct", "unix:"),
    ("ring", "unix:"),
    ("hierarchical", "unix:"),
]
TCP = [("auto", "tcp:127.0.0.1:0"), ("direct", "tcp:127.0.0.1:0"), ("ring", "tcp:127.0.0.1:0")]
real_algorithms = pytest.mark.parametrize(("algorithm", "listen"), [*REAL, *TCP])


# --- choosing ---------------------------------------------------------------------------------------


def test_auto_chooses_the_collective_by_hosts_and_size() -> None:
    """One host shares memory; several hosts do inside and ring across; lonely workers go by size."""
    assert choose("auto", ["a"] * 4, 1) == choose("auto", ["a"] * 2, 1 << 30) == "shared"
    assert (
        choose("auto", ["a", "a", "b"], 1) == choose("auto", ["a", "b", "b", "c"], 1 << 30) == "hierarchical"
    )
    for hosts in (["a", "b"], ["", ""], ["", "", "", ""]):
        algorithms = [choose("auto", hosts, nbytes) for nbytes in (0, 1, 1 << 10, 1 << 20, 1 << 30)]
        assert set(algorithms) == ({"direct", "ring"} if len(hosts) > 2 else {"direct"})
    for n in (3, 4, 64):  # a step of the ring is worth its message
        assert choose("auto", [""] * n, n * RING_CHUNK) == "ring"
        assert choose("auto", [""] * n, n * RING_CHUNK - 1) == "direct"


@pytest.mark.parametrize(
    "algorithm", [algorithm for algorithm in ALGORITHMS if algorithm not in ("auto", "shared")]
)
def test_an_explicit_collective_overrides_the_automatic_choice(algorithm: str) -> None:
    assert choose(algorithm, ["a", "a", "b"], 1) == algorithm


@pytest.mark.parametrize(("how", "options", "message"), [
    (pr.run, {"collective": "rign"}, "there is no collective 'rign'; there are auto, shared"),
    (pr.simulate, {"collective": "rign"}, "there is no collective 'rign'"),
    (pr.simulate, {"collective": "shared"}, "simulated ones have one each"),
    (pr.run, {"collective": "shared", "listen": "tcp:127.0.0.1:0"}, "over TCP there is none; use ring"),
])  # fmt: skip
def test_unavailable_collectives_are_refused(how: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        how(Script(), workers=2, strategy="allreduce", runs=None, **options)


# --- results ----------------------------------------------------------------------------------------


@real_algorithms
def test_every_collective_trains_the_same_model_as_the_simulator(
    tmp_path: Path, algorithm: str, listen: str
) -> None:
    """Bit for bit where sums are taken in rank order; up to rounding around a ring."""
    script = Script(optimizer=MOMENTUM, size=50, shuffle=True)
    options: dict[str, Any] = {"workers": 3, "strategy": "allreduce", "runs": tmp_path, "threads": 1}
    reference = pr.simulate(script, **options)
    result = pr.run(script, collective=algorithm, listen=listen, **options)
    assert distance(trained(reference), trained(result)) < 1e-12
    if algorithm in ("auto", "shared", "direct"):
        assert result["digest"] == reference["digest"] and result["bytes_sent"] == reference["bytes_sent"]


def test_a_simulated_ring_has_the_bits_and_bytes_of_a_real_one(tmp_path: Path) -> None:
    """When the ring is asked for the simulator runs the ring's own code."""
    script = Script(optimizer=MOMENTUM, size=50, shuffle=True)
    results = [
        how(script, workers=4, strategy="allreduce", collective="ring", runs=None, threads=1)
        for how in (pr.simulate, pr.run)
    ]
    for key in ("digest", "bytes_sent", "steps", "metrics"):
        assert results[0][key] == results[1][key], key


# --- several hosts ----------------------------------------------------------------------------------


class Unlogged(ProcessNode):
    """A node without a coordinator to send its log to."""

    def log(self, event: Event) -> None:
        pass


def joined(
    rank: int,
    hosts: Sequence[str],
    arenas: dict[str, Arenas],
    barrier: Any,
    folder: Path,
    algorithm: str,
    coordinator: str = "",
) -> ProcessNode:
    """One worker of several hosts: those of a host have its arenas, the others only TCP."""
    torch.set_num_threads(1)
    me, mine = Peer("worker", rank), hosts[rank]
    local = list(hosts[:rank]).count(mine)
    options = TransportOptions("tcp:127.0.0.1:0", arenas[mine], host=mine, wait=20.0, encrypt=False)
    transport = Transport(me, b"k" * 32, options)
    if coordinator:
        transport.introduce(COORDINATOR, coordinator)
    node = Unlogged(me, transport, 0, time.monotonic(), arenas[mine], local, algorithm)
    (folder / f"address-{rank}").write_text(transport.address)
    barrier.wait(20)
    addresses = [(folder / f"address-{each}").read_text() for each in range(len(hosts))]
    node.meet([
        ("worker", each, (addresses[each], hosts[each], list(hosts[:each]).count(hosts[each])))
        for each in range(len(hosts))
    ])  # fmt: skip
    return node


def member(
    rank: int, hosts: Sequence[str], arenas: dict[str, Arenas], barrier: Any, folder: Path, algorithm: str
) -> None:
    """Takes part in reductions of all kinds, and keeps what came out."""
    node = joined(rank, hosts, arenas, barrier, folder, algorithm)
    results = []
    for op, count in REDUCTIONS:
        for dtype in (torch.float64, torch.float32):
            values = contribution(count, rank, dtype)
            place = node.memory.empty(count, dtype)
            place.copy_(values)
            private = values.clone()  # not in shared memory
            node.everyone.all_reduce(place, private, op=op)
            results += [place.clone(), private]
    places = [node.memory.empty(5, torch.float32).fill_(rank + k) for k in range(10)]
    tasks = [node.everyone.begin_all_reduce(place) for place in places]
    for task in tasks:
        task.join()
    torch.save(results, folder / f"result-{rank}.pt")
    barrier.wait(20)
    node.close()


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abbc", "ab", "aaa"])
def test_auto_all_reduce_across_hosts_gives_all_workers_the_same_result(tmp_path: Path, hosts: str) -> None:
    """The same bits on all workers of all hosts, however many share one, and the right ones."""
    fork = multiprocessing.get_context("fork")
    arenas = {host: Arenas(hosts.count(host), 1 << 28) for host in set(hosts)}
    barrier = fork.Barrier(len(hosts))
    processes = [
        fork.Process(target=member, args=(rank, list(hosts), arenas, barrier, tmp_path, "auto"))
        for rank in range(len(hosts))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    for each in arenas.values():
        each.close()
    assert [process.exitcode for process in processes] == [0] * len(hosts)
    results = [torch.load(tmp_path / f"result-{rank}.pt") for rank in range(len(hosts))]
    for given in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], given, strict=True))
    truth = iter(results[0])
    for op, count in REDUCTIONS:
        for dtype in (torch.float64, torch.float32):
            values = torch.stack([contribution(count, rank, torch.float64) for rank in range(len(hosts))])
            expected = {
                "max": values.amax(0),
                "min": values.amin(0),
                "sum": values.sum(0),
                "mean": values.mean(0),
            }[op]
            for result in (next(truth), next(truth)):  # in shared memory, and elsewhere
                assert result.dtype == dtype
                assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-5)


REDUCTIONS = (("sum", 1000), ("mean", 17), ("max", 300), ("min", 300), ("mean", 400_000))


def contribution(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64).sub_(rank * 7).sin_().to(dtype)


# --- the dead ---------------------------------------------------------------------------------------


class Dies:
    """Worker 1 goes in the middle of a collective; the others write down what they are told, and when."""

    def __init__(self, folder: Path, how: int) -> None:
        self.folder, self.how = folder, how

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Linear(4, 4)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        node: Any = session._node
        vector = node.memory.empty(1 << 20, torch.float32).fill_(1.0)
        node.everyone.all_reduce(vector)
        began = time.monotonic()
        try:
            if session.rank == 1:
                node.everyone.begin_all_reduce(vector[: 1 << 18])
                os.kill(os.getpid(), self.how)
            for _ in range(50):
                node.everyone.all_reduce(vector[: 1 << 18])
                node.everyone.all_reduce(vector)
        except PolyrhythmError as error:
            text = f"{time.monotonic() - began:.1f} {error}"
            (self.folder / f"told-{session.rank}").write_text(text)
            raise


@pytest.mark.slow
@few("algorithm, listen", [*TCP, *REAL], quick=1)
def test_a_stopped_peer_is_named_within_the_timeout(tmp_path: Path, algorithm: str, listen: str) -> None:
    """It lives and says nothing: all others give up in time, and say for whom they waited."""
    with pytest.raises(PolyrhythmError, match=r"waited .* s "):
        pr.run(
            Dies(tmp_path, signal.SIGSTOP), workers=3, strategy="allreduce", collective=algorithm,
            listen=listen, timeout=2.0, runs=None, threads=1,
        )  # fmt: skip
    told = [path.read_text() for path in sorted(tmp_path.glob("told-*"))]
    assert told and all(float(text.split()[0]) < 15 for text in told)
    assert any("worker 1" in text for text in told)


@few("algorithm, listen", [*REAL, *TCP], quick=4)
def test_a_killed_peer_ends_the_run_at_once(tmp_path: Path, algorithm: str, listen: str) -> None:
    """The timeout of half an hour plays no part."""
    began = time.monotonic()
    with pytest.raises(PolyrhythmError, match="worker 1"):
        pr.run(
            Dies(tmp_path, signal.SIGKILL), workers=3, strategy="allreduce", collective=algorithm,
            listen=listen, runs=None, threads=1,
        )  # fmt: skip
    assert time.monotonic() - began < 60


def survivor(
    rank: int,
    hosts: Sequence[str],
    arenas: dict[str, Arenas],
    barrier: Any,
    folder: Path,
    algorithm: str,
    news: str,
) -> None:
    """A worker without a launcher, which would end it: the last one dies, the others keep what they hear."""
    node = joined(rank, hosts, arenas, barrier, folder, algorithm, news)
    vector = node.memory.empty(1 << 16, torch.float32).fill_(1.0)
    node.everyone.all_reduce(vector)
    if rank == len(hosts) - 1:
        node.everyone.begin_all_reduce(vector)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            node.everyone.all_reduce(vector)
    except PolyrhythmError as error:
        (folder / f"told-{rank}").write_text(f"{time.monotonic() - began:.1f} {error}")
    barrier.wait(30)
    node.close()


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [("shared", "aaaa"), ("direct", "aaaa"), ("ring", "aaaa"), ("ring", "abcd"), ("direct", "abcd")]
    + [("hierarchical", hosts) for hosts in ("aabb", "abbb", "aabc")],
)
def test_every_survivor_of_a_collective_gets_an_error_naming_the_dead(
    tmp_path: Path, algorithm: str, hosts: str
) -> None:
    """All others get an error that names the dead, soon, also those that wait for another worker."""
    fork = multiprocessing.get_context("fork")
    arenas = {host: Arenas(hosts.count(host), 1 << 28) for host in set(hosts)}
    barrier, gone = fork.Barrier(len(hosts)), len(hosts) - 1
    # What the launcher does: it hears that a process has ended, and tells the others.
    options = TransportOptions("tcp:127.0.0.1:0", encrypt=False, wait=20.0)
    coordinator = Transport(COORDINATOR, b"k" * 32, options)
    processes = [
        fork.Process(
            target=survivor,
            args=(rank, list(hosts), arenas, barrier, tmp_path, algorithm, coordinator.address),
        )
        for rank in range(len(hosts))
    ]
    for process in processes:
        process.start()
    processes[gone].join(60)
    for rank in range(gone):
        coordinator.introduce(Peer("worker", rank), (tmp_path / f"address-{rank}").read_text())
        fields = {"role": "worker", "rank": gone, "incarnation": 0, "reason": "was killed"}
        coordinator.send(Peer("worker", rank), "left", (), fields)
    threading.Thread(target=barrier.wait, args=(40,)).start()  # in the place of the dead
    for process in processes:
        process.join(60)
    coordinator.close()
    for each in arenas.values():
        each.close()
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(gone)]
    assert all(f"worker {gone}" in text.partition(" waited ")[2] for text in told), told
    assert all(float(text.split()[0]) < 15 for text in told)


@pytest.mark.parametrize(("tensor", "op", "message"), [
    (torch.zeros(4, 4).t()[:2], "sum", "must be contiguous"),
    (torch.zeros(3, dtype=torch.int64), "mean", "the mean of torch.int64"),
    (torch.zeros(3), "median", "op is 'median'; it can be sum, mean, max, min"),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["simulated", "shared", "direct", "ring"])
def test_every_collective_refuses_the_same_invalid_input(
    tensor: torch.Tensor, op: str, message: str, algorithm: str
) -> None:
    with pytest.raises(UsageError, match=message):
        once(Once([tensor, tensor], op), algorithm)


@pytest.mark.parametrize("algorithm", ["simulated", "shared", "direct", "ring"])
def test_every_collective_takes_scalars_and_large_half_precision_means(
    tmp_path: Path, algorithm: str
) -> None:
    """A tensor of no dimension, and the mean of short floats whose sum would overflow."""
    for values in (torch.tensor(2.0), torch.full((5,), 40000.0, dtype=torch.float16)):
        script = Once([values, values], "mean", tmp_path / "result.pt")
        once(script, algorithm)
        assert torch.equal(torch.load(tmp_path / "result.pt"), values)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_one_worker_can_use_every_collective(algorithm: str, tmp_path: Path) -> None:
    script = Script(optimizer=MOMENTUM)
    summary = pr.run(script, workers=1, strategy="allreduce", collective=algorithm, runs=tmp_path, threads=1)
    assert same(trained(summary), alone(script))


class Once:
    """One all-reduce of a tensor of each worker."""

    def __init__(self, values: list[torch.Tensor], op: str, into: Path | None = None) -> None:
        self.values, self.op, self.into = values, op, into

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = self.values[session.rank]
        mine = mine if not mine.is_contiguous() else mine.clone()
        session._node.everyone.all_reduce(mine, op=self.op)  # type: ignore[attr-defined]
        if self.into and not session.rank:
            torch.save(mine, self.into)


def once(script: Once, algorithm: str) -> None:
    options: dict[str, Any] = {"workers": 2, "strategy": "allreduce", "runs": None, "threads": 1}
    if algorithm == "simulated":
        pr.simulate(script, **options)
    else:
        pr.run(script, collective=algorithm, **options)


def test_the_board_is_allocated_at_the_start_of_each_arena() -> None:
    """So everybody knows where everybody's is."""
    arenas = Arenas(2, 1 << 20)
    assert [arenas.allocate(index, BOARD) for index in range(2)] == [0, 0]
    arenas.close()
