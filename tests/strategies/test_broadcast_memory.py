"""The laws of the messages that `broadcast` keeps: their size is bounded, none is lost or counted twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_broadcast_laws import SHAPES, Training, Watch, digests, messages, new_log, watch
from torch import Tensor, nn

import polyrhythm as pr
from polyrhythm.compress.kernels import selection
from polyrhythm.core.peer import Peer
from polyrhythm.strategies.broadcast import reliable_broadcast
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog
from polyrhythm.strategies.broadcast.reliable_broadcast import ReliableBroadcast
from polyrhythm.worlds.simulated.node import SimulatedNode
from tests.support.combine import few
from tests.support.planes import equal
from tests.support.runs import run_in

__all__ = ["watch"]  # a fixture

STEPS = 150


def is_right(log: DeliveryLog, everything: dict[tuple[str, int], tuple[Tensor, ...]]) -> bool:
    """True if its counts are the sum of all messages that it knows, and it keeps the last of them."""

    def total(origin: str, first: int, last: int) -> Tensor:
        found = torch.zeros(40, dtype=torch.int32)
        for number in range(first, last + 1):
            selection.count(everything[origin, number][0], found, 0.5)
        return found

    wanted = sum((total(origin, 1, last) for origin, last in log.known.items()), torch.zeros(40).int())
    for origin, each in log._logs.items():
        after = log.known[origin] + 1
        for entry in reversed(each.entries):
            kept = torch.zeros(40, dtype=torch.int32)
            selection.count(entry.codes[0], kept, 0.5)
            if entry.last + 1 != after or not torch.equal(kept, total(origin, entry.first, entry.last)):
                return False
            after = entry.first
    return torch.equal(log.counts[0], wanted)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_merged_delivery_logs_count_each_message_once(data: st.DataObject) -> None:
    """Three logs get messages, merge them, and send each other what they lack, in any order. Each has the
    messages that it says it knows, once; and if only one of two has merged any, either gets all from the
    other."""
    origins = ("0.0", "1.0", "2.0")
    everything = {(origin, number): codes for name in origins for origin, number, codes in messages(name, 9)}
    logs = {origin: new_log() for origin in origins}
    merged: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(0, 40))):
        origin = data.draw(st.sampled_from(origins))
        mine = logs[origin]
        what = data.draw(st.sampled_from(["say", "say", "merge", "tell"]))
        if what == "say" and mine.known.get(origin, 0) < 9:
            number = mine.known.get(origin, 0) + 1
            assert mine.add(origin, number, everything[origin, number]) == "new"
        elif what == "merge":
            whose = data.draw(st.sampled_from(origins))
            mine.merge(whose, data.draw(st.sets(st.integers(1, 9))))
            merged[origin] += 1
        elif what == "tell":
            tell(mine, logs[data.draw(st.sampled_from(origins))])
        assert all(is_right(each, everything) for each in logs.values())
    one, other = logs["0.0"], logs["1.0"]
    if not (merged["0.0"] and merged["1.0"]) and not merged["2.0"]:
        for _ in range(2):
            tell(one, other)
            tell(other, one)
        assert one.known == other.known and one.digest() == other.digest()
    assert all(is_right(each, everything) for each in logs.values())


def tell(giver: DeliveryLog, taker: DeliveryLog) -> None:
    """Gives another log what it lacks, by messages or by a snapshot, if that is possible."""
    missing = giver.missing(taker.known)
    if missing is None:
        snapshot = giver.snapshot()
        taker.check(snapshot)
        if taker.lacks(snapshot.known):
            taker.install(snapshot)
        return
    for origin, number in missing:
        entry = giver.message(origin, number)
        assert entry is not None
        assert taker.add(origin, entry.last, entry.codes, entry.first) == "new"


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The most bytes that any worker has kept of an origin, if even short logs are merged."""
    monkeypatch.setattr(reliable_broadcast, "MIN_BYTES", 0)
    monkeypatch.setattr(reliable_broadcast, "PATIENCE", 0)
    found: Counter[str] = Counter()
    merge = ReliableBroadcast._merge

    def merging(self: ReliableBroadcast, origin: str) -> None:
        merge(self, origin)
        found[origin] = max(found[origin], self.log.kept(origin)[1])
        found["waiting"] = max(found["waiting"], *map(len, self.outbox.queues.values()), 0)

    monkeypatch.setattr(ReliableBroadcast, "_merge", merging)
    return found


@few("shape, seed", [*product(SHAPES, range(4))], quick=1)
def test_broadcast_backlog_for_a_stalled_worker_is_bounded(
    watch: Watch, most: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, seed: int
) -> None:
    """Some workers can neither send nor receive while others take hundreds of steps. Of each origin no more
    than a few vectors are kept, and at the end all workers have every pulse once."""
    lots = random.Random(seed)
    stops = [(lots.randrange(5), begin, begin + lots.uniform(0.2, 1.0)) for begin in (0.1, 0.9, 1.4)]
    send = SimulatedNode.send

    def stalling(self: SimulatedNode, to: Peer, kind: str, *tensors: Tensor, **fields: Any) -> None:
        for who, begin, end in stops:
            if who in (self.me.rank, to.rank) and begin <= self.now() < end:
                fiber = self.current()
                self.world.loop.at(end, fiber.resume, None)
                fiber.block("a link", "that is stalled")
        send(self, to, kind, *tensors, **fields)

    monkeypatch.setattr(SimulatedNode, "send", stalling)
    training = Training(epochs=24)
    text = f"broadcast:0.001,reduce=mean,{shape}"
    summary = run_in(
        "simulated",
        training,
        strategy=text,
        workers=5,
        runs=tmp_path,
        cluster='[[hosts]]\nstep_time = { exponential = "10 ms" }\n',
    )
    assert len(digests(summary)) == 5 and len(set(digests(summary).values())) == 1
    for worker in training.workers.values():
        counts = worker.broadcast.log.counts
        assert equal(counts, watch.total(worker))
    vector = sum(part.nbytes for part in counts)
    told: Counter[str] = Counter()
    for (origin, _), codes in watch.codes.items():
        told[origin] += sum(map(len, codes))
    waiting = most.pop("waiting")
    assert max(told.values()) > 10 * vector  # the bytes that would have been kept
    assert max(most.values()) < 4 * vector and waiting < 100


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(100_000))


@dataclass
class Stopped:
    """Worker 2 stops itself; worker 0 continues it after all its own steps."""

    folder: Path

    def __call__(self) -> None:
        reliable_broadcast.PATIENCE = 0
        here = pr.init()
        model = Long()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        log = here._worker.broadcast.log  # type: ignore[attr-defined]
        lots = torch.Generator().manual_seed(here.rank)
        mark, most = self.folder / "stopped", 0
        for step in range(STEPS):
            if step == 10 and here.rank == 2:
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            while step == 20 and here.rank != 2 and not stopped(mark):
                time.sleep(0.01)
            model.x.grad = torch.randint(-1, 2, (100_000,), generator=lots).float()
            optimizer.step()
            most = max(most, *(log.kept(origin)[1] for origin in list(log.known)))
        if here.rank == 0:
            os.kill(int(mark.read_text()), signal.SIGCONT)
        here.log(**{f"most {here.rank}": most})


def stopped(mark: Path) -> bool:
    return mark.exists() and psutil.Process(int(mark.read_text())).status() == psutil.STATUS_STOPPED


@pytest.mark.slow
def test_broadcast_with_a_sigstopped_worker_keeps_little_and_agrees(tmp_path: Path) -> None:
    """With SIGSTOP: the others continue and keep little for it, and all agree at the end."""
    summary = pr.run(Stopped(tmp_path), workers=3, strategy="broadcast:1", runs=tmp_path, threads=1)
    assert len(digests(summary)) == 3 and len(set(digests(summary).values())) == 1
    sent = STEPS * 100_000 / 5  # bytes of an origin: five parameters to a byte
    assert max(summary["metrics"][f"most {rank}"] for rank in (0, 1)) < 2 << 20 < sent
