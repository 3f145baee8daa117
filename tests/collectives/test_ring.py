"""The ring: the same bits everywhere, in 2(n-1) steps, with exactly the predicted number of bytes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyrhythm as pr
from polyrhythm.collectives import ring
from polyrhythm.collectives.ring import Turn, bounds, sent_elements
from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Event
from polyrhythm.wire import Transport, TransportOptions
from polyrhythm.worlds.processes.node import ProcessNode
from tests.support.runs import shorten_waits
from tests.wire.test_transport import Proxy

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


class DistributedSession:
    """A script of which every worker takes part in rings and keeps what came out."""

    def __init__(self, inputs: list[list[Tensor]], op: str, rounds: int = 1) -> None:
        self.inputs, self.op, self.rounds = inputs, op, rounds
        self.outputs: dict[int, list[Tensor]] = {}
        self.turns: list[Turn] = []
        self.sent: dict[int, int] = {}

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        node: Any = session._node
        tensors = [tensor.clone() for tensor in self.inputs[session.rank]]
        before = node.bytes_sent
        for number in range(self.rounds):
            ring.all_reduce(node, node.members.workers, tensors, self.op, number, self.turns.append)
        self.sent[session.rank] = node.bytes_sent - before
        self.outputs[session.rank] = tensors


def simulated(inputs: list[list[Tensor]], op: str, rounds: int = 1, **more: Any) -> DistributedSession:
    member = DistributedSession(inputs, op, rounds)
    pr.simulate(member, workers=len(inputs), strategy="local", threads=1, **more)
    return member


def by_hand(column: list[Tensor], op: str) -> Tensor:
    """The rule, chunk by chunk: chunk c begins with worker c and is folded along the ring."""
    n, parts = len(column), []
    short = op == "mean" and n > 1 and column[0].element_size() < 4  # whose sum overflows sooner
    column = [each / n for each in column] if short else column
    for chunk in range(n):
        start, stop = bounds(column[0].numel(), n, chunk)
        value = column[chunk][start:stop].clone()
        for after in range(1, n):
            other = column[(chunk + after) % n][start:stop]
            value = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(other, value)
        parts.append(value / n if op == "mean" and n > 1 and not short else value)
    return torch.cat(parts)


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def made(lengths: list[int], dtypes: list[torch.dtype], n: int) -> list[list[Tensor]]:
    return [
        [numbers(c, d, 100 * rank + at) for at, (c, d) in enumerate(zip(lengths, dtypes, strict=True))]
        for rank in range(n)
    ]


cases = st.integers(0, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 40), min_size=count, max_size=count),
        st.lists(st.sampled_from([*FLOATS, *INTEGERS]), min_size=count, max_size=count),
    )
)


@settings(max_examples=60, deadline=None)
@given(
    case=cases,
    n=st.integers(1, 7),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    size=st.integers(8, 64),
)
def test_ring_all_reduce_gives_every_worker_the_expected_bits(case, n, op, size):
    lengths, dtypes = case
    if op == "mean":
        dtypes = [dtype if dtype.is_floating_point else torch.float32 for dtype in dtypes]
    inputs = made(lengths, dtypes, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT", size)  # bytes: a few numbers, so that chunks have many segments
        patch.setattr(ring, "AHEAD", 2)
        member = simulated(inputs, op)
    for rank in range(n):
        for at, result in enumerate(member.outputs[rank]):
            assert torch.equal(result, by_hand([given[at] for given in inputs], op))
    check_bytes_and_steps(member, lengths, dtypes, n)


def check_bytes_and_steps(
    member: DistributedSession, lengths: list[int], dtypes: list[torch.dtype], n: int
) -> None:
    for rank in range(n):
        expected = [sent_elements(count, n, rank) for count in lengths]
        nbytes = sum(c * dtype.itemsize for c, dtype in zip(expected, dtypes, strict=True))
        mine = [turn for turn in member.turns if turn.rank == rank]
        assert member.sent[rank] == nbytes == sum(turn.nbytes for turn in mine)
        assert sum(turn.elements for turn in mine) == sum(expected)
        assert len(mine) == 2 * (n - 1)


def test_the_bytes_of_seventeen_numbers_on_four_workers():
    member = simulated(made([17], [torch.float32], 4), "sum")
    assert [member.sent[rank] // 4 for rank in range(4)] == [26, 25, 25, 26]


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(0, 39))
def test_bytes_are_within_an_element_per_step_of_the_ideal(count, n, rank):
    ideal = 2 * (n - 1) * count / n
    sent = sent_elements(count, n, rank % n)
    assert abs(sent - ideal) <= 2 * (n - 1)
    assert count % n or sent == ideal


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_ring_sends_the_expected_chunk_in_every_step(n):
    member = simulated(made([n], [torch.float64], n), "sum")
    for p in range(n):
        turns = [turn for turn in member.turns if turn.rank == p]
        expected = [("share-reduce", k, (p - k) % n, (p - k - 1) % n) for k in range(n - 1)]
        expected += [("share-only", k, (p + 1 - k) % n, (p - k) % n) for k in range(n - 1)]
        assert [(turn.phase, turn.step, turn.sent, turn.received) for turn in turns] == expected
        assert {turn.to for turn in turns} == {(p + 1) % n}


def test_ring_result_of_a_tensor_does_not_depend_on_other_tensors():
    inputs = made([31, 5, 64], [torch.float32] * 3, 5)
    together = simulated(inputs, "mean").outputs[3]
    for at in range(3):
        alone = simulated([[given[at]] for given in inputs], "mean").outputs[3]
        assert torch.equal(alone[0], together[at])


def test_consecutive_ring_all_reduces_do_not_interfere():
    inputs = made([1000], [torch.int64], 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT", 16)
        member = simulated(inputs, "sum", rounds=3)
    total = sum(given[0] for given in inputs)
    assert all(torch.equal(member.outputs[rank][0], 16 * total) for rank in range(4))


def test_simulated_ring_takes_the_time_of_2_n_minus_1_chunks(tmp_path):
    """2(n-1) turns of a chunk each, over links that carry one thing at a time each way."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[hosts]]\nbandwidth = "8 Mbit/s"\nlatency = "0 s"\n')
    summary = pr.simulate(
        DistributedSession(made([400_000], [torch.float32], 4), "sum"),
        workers=4,
        strategy="local",
        cluster=cluster,
        threads=1,
    )
    assert summary["wall_s"] == pytest.approx(6 * 0.4, rel=0.1)


@pytest.mark.parametrize("op, dtype, message", [
    ("mean", torch.int64, "the mean of torch.int64"),
    ("median", torch.float32, "op is 'median'; it can be sum, mean, max, min"),
])  # fmt: skip
def test_ring_refuses_integer_means_and_unknown_operations(op, dtype, message):
    with pytest.raises(UsageError, match=message):
        simulated(made([3], [dtype], 2), op)


def test_ring_raises_if_workers_have_tensors_of_different_sizes():
    inputs = [[torch.zeros(4)], [torch.zeros(6)]]
    with pytest.raises(pr.PolyrhythmError, match="same sizes and dtypes"):
        simulated(inputs, "sum")


# --- real processes ---------------------------------------------------------------------------------


@dataclass
class Real:
    """A script of real workers: the ring beside what it must give, for tensors here and in shared memory."""

    folder: Path
    sizes: tuple[int, ...] = (0, 1, 2, 17, 1_000_003)
    kill: int = -1  # who dies in the middle
    sleep: int = -1  # or stays silent

    def __call__(self) -> None:
        session = pr.init()
        model = torch.nn.Linear(1, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        node: Any = session._node
        n = len(node.members.workers)
        for number, (size, shared) in enumerate((size, shared) for size in self.sizes for shared in (0, 1)):
            inputs = [
                [numbers(size, torch.float32, rank), numbers(9, torch.int64, rank)] for rank in range(n)
            ]
            tensors = inputs[node.rank]
            if shared:
                tensors = [node.memory.empty(t.numel(), t.dtype).copy_(t) for t in tensors]
            wanted = [by_hand([given[at] for given in inputs], "sum") for at in range(2)]
            before, turns = node.transport.traffic.bytes_sent, []
            workers = list(node.members.workers)
            if number == 3 and node.rank == self.sleep:
                time.sleep(600)
            if number == 3 and self.sleep >= 0:
                shorten_waits(node, 1.0)
            trace = partial(self.die, node) if number == 3 and node.rank == self.kill else turns.append
            ring.all_reduce(node, workers, tensors, "sum", 1_000_000 + number, trace)
            assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
            nbytes = 4 * sent_elements(size, n, node.rank) + 8 * sent_elements(9, n, node.rank)
            assert sum(turn.nbytes for turn in turns) == nbytes and len(turns) == 2 * (n - 1)
            # Beside the ring only the event log is sent, which has no tensors.
            assert node.transport.traffic.bytes_sent - before == nbytes
        (self.folder / f"{node.rank}").touch()

    def die(self, node: Any, turn: Turn) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("n, listen", [(1, "unix:"), (2, "unix:"), (3, "tcp:127.0.0.1:0"), (4, "unix:")])
def test_ring_all_reduce_on_real_processes(n, listen, tmp_path):
    pr.run(Real(tmp_path), workers=n, strategy="local", listen=listen, runs=None, threads=1, timeout=60)
    assert len(list(tmp_path.iterdir())) == n


@pytest.mark.parametrize("listen", ["unix:", "tcp:127.0.0.1:0"])
def test_a_killed_worker_ends_the_run_and_is_named(listen, tmp_path):
    with pytest.raises(pr.PolyrhythmError, match="worker 1"):
        pr.run(
            Real(tmp_path, kill=1),
            workers=3,
            strategy="local",
            listen=listen,
            runs=None,
            threads=1,
            timeout=60,
        )
    assert not list(tmp_path.iterdir())


def test_a_silent_worker_is_named(tmp_path):
    with pytest.raises(pr.PolyrhythmError, match=r"worker \d waited .* worker \d( did not|,|.*to reply)"):
        pr.run(Real(tmp_path, sleep=1), workers=3, strategy="local", runs=None, threads=1, timeout=60)


# --- nodes of this process, over connections that break ----------------------------------------------


class Unlogged(ProcessNode):
    """A node without a coordinator."""

    def log(self, event: Event) -> None:
        pass


@contextlib.contextmanager
def ring_of(
    n: int, wait: float = 30.0, proxied: bool = False
) -> Iterator[tuple[list[ProcessNode], list[Any]]]:
    """Nodes in threads of this process, over plain TCP; they meet through proxies, if wanted."""
    peers = [pr.Peer("worker", rank) for rank in range(n)]
    transports = [
        Transport(peer, bytes(32), TransportOptions("tcp:127.0.0.1", encrypt=False, wait=wait))
        for peer in peers
    ]
    proxies = [Proxy(transport.address) for transport in transports] if proxied else []
    made = [Unlogged(peer, transport, 0, 0.0) for peer, transport in zip(peers, transports, strict=True)]
    for node in made:
        node.meet([
            ("worker", rank, (where.address, "", -1)) for rank, where in enumerate(proxies or transports)
        ])  # fmt: skip
    try:
        yield made, proxies
    finally:
        for node in made:
            node.close()
        for proxy in proxies:
            proxy.close()


def together(nodes: list[ProcessNode], inputs: list[list[Tensor]], op: str = "sum") -> list[Any]:
    """All take part; what each raised, or None."""

    def part(node: ProcessNode) -> Any:
        try:
            ring.all_reduce(node, peers, inputs[node.rank], op, 7)
        except pr.PolyrhythmError as error:
            return error

    peers = list(nodes[0].members.workers)
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(part, nodes))


@pytest.mark.parametrize("seed", range(3))
def test_ring_result_is_the_same_after_broken_connections(seed, monkeypatch):
    monkeypatch.setattr(ring, "SEGMENT", 1 << 14)
    inputs = made([1_000_001, 7], [torch.float32, torch.int64], 3)
    wanted = [by_hand([given[at] for given in inputs], "sum") for at in range(2)]
    with ring_of(3, proxied=True) as (nodes, proxies):
        done, cuts = threading.Event(), []

        def disturb() -> None:
            pauses = random.Random(seed)
            while not done.wait(pauses.uniform(0.01, 0.06)):
                pauses.choice(proxies).cut()
                cuts.append(1)

        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            failures = together(nodes, inputs)
        finally:
            done.set()
            disturber.join()
    assert failures == [None] * 3 and cuts
    assert all(torch.equal(a, b) for given in inputs for a, b in zip(given, wanted, strict=True))


def test_ring_worker_that_learns_of_a_lost_peer_notifies_the_next():
    """Worker 3 of 4 is gone and only worker 0 hears of it; worker 1 and 2 do not wait for worker 3 itself."""
    with ring_of(4, wait=20.0) as (nodes, _):
        inputs = made([100], [torch.float32], 4)
        gone = SimpleNamespace(
            kind="left", fields={"role": "worker", "rank": 3, "reason": "killed", "incarnation": 0}
        )
        nodes[0]._on_notice(gone)  # type: ignore[arg-type]
        peers = list(nodes[0].members.workers)

        def part(node: ProcessNode) -> Any:
            with pytest.raises(pr.PeerLost, match="worker 3, which is gone") as caught:
                ring.all_reduce(node, peers, inputs[node.rank], "sum", 7)
            return str(caught.value)

        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(part, nodes[:2]))
    assert told[0] == told[1] and told[0].startswith("worker 0 waited in 'ring 7 0' for worker 3")


def test_a_silent_neighbour_is_named():
    with (
        ring_of(2, wait=0.3) as (nodes, _),
        pytest.raises(pr.WaitError, match=r"waited 0\.\d+ s .*no data from worker 1"),
    ):
        ring.all_reduce(nodes[0], nodes[0].members.workers, [torch.zeros(8)], "sum", 7)


# --- torch.distributed -------------------------------------------------------------------------------


def over_gloo(rank: int, n: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n
    )
    ring.SEGMENT, turns = 1000, []
    for op in ("sum", "mean", "max", "min"):
        for sizes in ([], [0], [1], [n], [5, 0, 7001], [17, 300]):
            inputs = made(sizes, [torch.float32, torch.float64, torch.bfloat16][: len(sizes)], n)
            wanted = [by_hand([given[at] for given in inputs], op) for at in range(len(sizes))]
            ring.all_reduce_distributed(inputs[rank], op, trace=turns.append)
            assert all(torch.equal(a, b) for a, b in zip(inputs[rank], wanted, strict=True))
            assert len(turns) == 2 * (n - 1)
            turns.clear()
    square = torch.full((3, 5), rank + 1.0)
    ring.all_reduce_distributed(square)
    assert torch.equal(square, torch.full((3, 5), n * (n + 1) / 2))
    if n > 2:  # some of all, in an order of their own
        group = torch.distributed.new_group([0, n - 1])
        if rank in (0, n - 1):
            ring.all_reduce_distributed(square, "max", group)
        else:
            with pytest.raises(UsageError, match="not in the process group"):
                ring.all_reduce_distributed(square, "max", group)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    Path(folder, f"done {rank}").touch()


def left_alone(rank: int, n: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n
    )
    ring.all_reduce_distributed(torch.zeros(10))
    if rank == 1:
        os._exit(0)
    with pytest.raises(pr.PeerLost, match=f"rank {rank} waited for a segment"):
        ring.all_reduce_distributed(torch.zeros(10))
    Path(folder, f"done {rank}").touch()
    os._exit(0)


def spawn(function: Any, n: int, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(rank, n, str(folder))) for rank in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
        process.join()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ring_all_reduce_over_torch_distributed(n, tmp_path):
    spawn(over_gloo, n, tmp_path)
    assert all((tmp_path / f"done {rank}").exists() for rank in range(n))


def test_over_torch_distributed_a_lost_neighbour_is_named(tmp_path):
    spawn(left_alone, 2, tmp_path)
    assert (tmp_path / "done 0").exists()


def test_ring_over_torch_distributed_needs_a_process_group():
    with pytest.raises(UsageError, match="init_process_group"):
        ring.all_reduce_distributed(torch.zeros(3))
