"""The laws of `broadcast`: no pulse is lost or counted twice, no worker waits, and all replicas agree."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.compress.kernels import selection
from polyrhythm.core.errors import PolyrhythmError, UsageError, WireError
from polyrhythm.core.message import Message
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.model.vectors import cloned
from polyrhythm.strategies.broadcast import reliable_broadcast
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog
from polyrhythm.strategies.broadcast.strategy import BroadcastWorker
from polyrhythm.worlds.simulated.node import SimulatedNode
from tests.support.combine import each_value, few
from tests.support.planes import MODELS, Plane, equal
from tests.support.programs import Examples, Script, Steps, Walk, events, mlp, trained
from tests.support.runs import run_in

SHAPES = ["topology=mesh", "topology=tree,fanout=1", "topology=tree,fanout=2", "topology=tree,fanout=3"]
RANDOM = '[[hosts]]\nstep_time = { exponential = "10 ms" }\nlatency = "3 ms"\nbandwidth = "500 kbit/s"\n'

every_shape = pytest.mark.parametrize("shape", SHAPES)


@dataclass
class Emitted:
    """One step of one worker: the residual before it, the update, the sent pulses, the residual after it."""

    before: list[Tensor]
    update: list[Tensor]
    sent: list[Tensor]  # in pulses
    after: list[Tensor]


@dataclass
class Watch:
    """All pulses that workers send, and all messages that they receive, by origin and number."""

    emitted: dict[str, list[Emitted]] = field(default_factory=lambda: defaultdict(list))
    codes: dict[tuple[str, int], tuple[bytes, ...]] = field(default_factory=dict)

    def total(self, worker: BroadcastWorker) -> list[Tensor]:
        """The sum of all messages that a worker says it knows."""
        log, unit = worker.broadcast.log, worker.strategy.unit
        sums = [torch.zeros_like(vector) for vector in log.counts]
        for origin, number in log.known.items():
            for each in range(1, number + 1):
                for place, code in zip(sums, self.codes[origin, each], strict=True):
                    selection.count(torch.frombuffer(bytearray(code), dtype=torch.uint8), place, unit)
        return sums


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Records the pulses and messages of a simulation."""
    seen = Watch()
    emit, add = BroadcastWorker._emit, DeliveryLog.add

    def emitting(self: BroadcastWorker) -> list[Tensor]:
        before, update = cloned(self.residual), cloned(self.update)
        codes = emit(self)
        sent = [torch.zeros(len(part), dtype=torch.int32) for part in update]
        for code, place in zip(codes, sent, strict=False):
            selection.count(code, place, self.strategy.unit)
        seen.emitted[self.broadcast.origin].append(Emitted(before, update, sent, cloned(self.residual)))
        return codes

    def adding(
        self: DeliveryLog, origin: str, number: int, codes: Sequence[Tensor], first: int | None = None
    ) -> str:
        if first in (None, number):
            plain = tuple(code.numpy().tobytes() for code in codes)
            assert seen.codes.setdefault((origin, number), plain) == plain
        return add(self, origin, number, codes, first)

    monkeypatch.setattr(BroadcastWorker, "_emit", emitting)
    monkeypatch.setattr(DeliveryLog, "add", adding)
    return seen


@dataclass
class Training:
    """A short training run in which workers may kill themselves; keeps the worker of each incarnation."""

    epochs: int = 3
    size: int = 96
    pause: float = 0.0
    dies: dict[int, int] = field(default_factory=dict)  # the step before which a worker dies, by rank
    workers: dict[tuple[int, int], BroadcastWorker] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        incarnation = here._node.incarnation
        model = mlp()
        examples = Examples(self.size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = here.prepare(
            model, optimizer, DataLoader(examples, batch_size=4, shuffle=True)
        )
        self.workers[here.rank, incarnation] = here._worker
        if not incarnation:
            here.log(before=Script.loss(model, examples))  # all workers start with the same parameters
        for _ in range(self.epochs):
            for x, y in loader:
                time.sleep(self.pause)
                if not incarnation and self.dies.get(here.rank) == here._replica.steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        here.log(after=Script.loss(here.consensus(), examples))


def digests(summary: dict[str, Any]) -> dict[str, str]:
    """The digest of each worker's counts at the end."""
    return {line["peer"]: line["digest"] for line in events(summary, "replica")}


# --- pulses and residuals --------------------------------------------------------------------------


@pytest.mark.parametrize("pulses", ["one", "many"])
@pytest.mark.parametrize("kind", MODELS)
def test_broadcast_sent_pulses_plus_residual_equal_the_updates(
    watch: Watch, tmp_path: Path, kind: str, pulses: str
) -> None:
    """r + u = r' + tau · sent, bit for bit in each step, and up to rounding over all steps."""
    plane = Plane(12, model=MODELS[kind])
    strategy = pr.parse(f"broadcast:0.3,pulses={pulses}")
    run_in("simulated", plane, strategy=str(strategy), workers=3, runs=tmp_path, cluster=RANDOM)
    tau = strategy.unit
    assert tau == 0.25 and len(watch.emitted) == 3
    for steps in watch.emitted.values():
        assert len(steps) == 12
        for step in steps:
            for r, u, sent, left in zip(step.before, step.update, step.sent, step.after, strict=True):
                assert torch.equal(r + u, left + tau * sent.to(left.dtype))
                assert (left.abs() < tau).all() if pulses == "many" else (sent.abs() <= 1).all()
        for part in range(len(steps[0].update)):
            moved = sum(step.update[part].double() for step in steps)
            sent = sum(step.sent[part].double() for step in steps)
            assert torch.allclose(moved, steps[-1].after[part].double() + tau * sent, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@every_shape
def test_broadcast_replicas_end_with_the_sum_of_all_pulses(
    watch: Watch, tmp_path: Path, kind: str, shape: str
) -> None:
    """At the end every replica is w0 + tau · (all pulses of all), bit for bit, in any order of arrival."""
    plane = Plane(9, model=MODELS[kind])
    summary = run_in(
        "simulated", plane, strategy=f"broadcast:0.25,{shape}", workers=5, runs=tmp_path, cluster=RANDOM
    )
    steps = [step for steps in watch.emitted.values() for step in steps]
    total = [sum(parts) for parts in zip(*(step.sent for step in steps), strict=True)]
    assert len(set(digests(summary).values())) == 1 and len(digests(summary)) == 5
    for worker in plane.workers.values():
        assert equal(worker.broadcast.log.counts, total)
        assert equal(watch.total(worker), total)
    first = plane.workers[0]
    shown = first._write_parameters(first.replica.consensus_vectors())
    for start, count, made in zip(first.base, total, shown, strict=True):
        assert start.element_size() >= 4
        assert torch.equal(made, (start + 0.25 * count.to(start.dtype)).to(made.dtype))
    final = trained(summary)
    layout = first.replica.layout
    for piece in layout.pieces:
        assert torch.equal(final[piece.name], layout.view(shown, piece))


def test_broadcast_with_one_worker_stays_within_tau_of_sgd(watch: Watch, tmp_path: Path) -> None:
    """With one worker w = w0 + the steps of its optimizer - the residual: within tau of plain SGD."""
    walk = Walk(20, lr=0.3, slope=lambda rank, x: torch.full_like(x, 0.7))
    run_in("simulated", walk, strategy="broadcast:0.01", workers=1, runs=tmp_path)
    tau = 2.0**-7
    exact = 1 - 20 * 0.3 * 0.7
    assert abs(walk.points[0].x.item() - exact) < tau
    (steps,) = watch.emitted.values()
    assert steps[-1].after[0].abs().item() < tau and steps[0].after[0].abs().item() > 0


@pytest.mark.parametrize(("pulses", "behind"), [("one", 2.0), ("many", 0.0)])
def test_one_pulse_falls_behind_where_many_do_not(
    watch: Watch, tmp_path: Path, pulses: str, behind: float
) -> None:
    """With steps of 3 tau, one pulse leaves a residual of 2 tau in each step; whole multiples leave none."""
    run_in(
        "simulated", Steps(10, lr=0.75), strategy=f"broadcast:0.25,pulses={pulses}", workers=2, runs=tmp_path
    )
    for steps in watch.emitted.values():
        left = [-step.after[0].item() for step in steps]
        assert left == [0.25 * behind * number for number in range(1, 11)]


def test_broadcast_reduce_sum_moves_n_times_as_far_as_mean(tmp_path: Path) -> None:
    """`sum` moves the parameters N times as far as `mean`."""
    for reduce, far in (("sum", 4.0), ("mean", 1.0)):
        walk = Walk(8, lr=1.0, slope=lambda rank, x: torch.ones_like(x))
        summary = run_in(
            "simulated", walk, strategy=f"broadcast:0.0625,reduce={reduce}", workers=4, runs=tmp_path
        )
        assert trained(summary)["x"].item() == 1 - 8 * far


def test_parameters_stay_while_a_step_is_computed(tmp_path: Path) -> None:
    """Pulses of others are applied between steps only: forward and backward see the same w."""

    def main() -> None:
        here = pr.init()
        model = mlp()
        examples = Examples(40)
        model, optimizer, loader = here.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(examples, batch_size=1)
        )
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            here._node.take_time(0.02)  # others send meanwhile
            loss.backward()
            assert equal(before, [parameter.detach() for parameter in model.parameters()])
            optimizer.step()

    run_in("simulated", main, strategy="broadcast:0.001", workers=4, runs=tmp_path, cluster=RANDOM)


def test_broadcast_accumulates_updates_while_the_network_is_behind(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While too much waits to be sent, updates stay in the residual, and none is lost."""
    monkeypatch.setattr(reliable_broadcast, "MIN_MESSAGES", -1)
    monkeypatch.setattr(reliable_broadcast, "MIN_BYTES", -1)
    monkeypatch.setattr(DeliveryLog, "kept", lambda log, origin: (1 << 20, 1 << 40))  # always too much
    summary = run_in("simulated", Steps(20, lr=1.0), strategy="broadcast:0.25", workers=2, runs=tmp_path)
    for steps in watch.emitted.values():  # the worker sends every 17th time in any case
        assert [step.sent[0].item() for step in steps] == [0] * 16 + [-4 * 17] + [0] * 3
        assert [step.after[0].item() for step in steps] == [*range(-1, -17, -1), 0, -1, -2, -3]
    assert trained(summary)["x"].item() == -34


@every_shape
def test_broadcast_drops_messages_that_every_worker_has(tmp_path: Path, shape: str) -> None:
    """However long a run is, only the messages that are on their way are kept: a few of each origin."""
    plane = Plane(80)
    run_in(
        "simulated",
        plane,
        strategy=f"broadcast:0.25,{shape}",
        workers=5,
        runs=tmp_path,
        cluster=RANDOM.replace("500 kbit/s", "100 Mbit/s"),
    )
    for worker in plane.workers.values():
        log = worker.broadcast.log
        assert len(log.known) == 5 and min(log.known.values()) == 80
        assert max(log.kept(origin)[0] for origin in log.known) < 50


# --- waiting ---------------------------------------------------------------------------------------


@every_shape
def test_nobody_waits_for_a_straggler(tmp_path: Path, shape: str) -> None:
    """The steps of the others end at the same times as without a straggler, to the last bit."""

    def times(cluster: str) -> dict[str, list[float]]:
        lines = events(
            run_in(
                "simulated",
                Plane(20),
                strategy=f"broadcast:0.25,{shape}",
                workers=4,
                runs=tmp_path,
                cluster=cluster,
            ),
            "step",
        )
        assert all(line["wait_s"] == 0 for line in lines)
        found = defaultdict(list)
        for line in lines:
            found[line["node"]].append(line["t"])
        return found

    plain = times(RANDOM)
    slow = times(f"{RANDOM}[[stragglers]]\nworkers = [1]\nslowdown = 10.0\n")
    assert slow.pop("worker 1")[-1] > 5 * plain.pop("worker 1")[-1]
    assert slow == plain


@pytest.mark.parametrize("first", [1, 2])
@every_shape
def test_broadcast_warmup_trains_only_the_first_workers(tmp_path: Path, shape: str, first: int) -> None:
    """The others take no step before worker 0 has taken `warmup` steps, and start from its parameters."""
    plane = Plane(10)
    summary = run_in(
        "simulated",
        plane,
        strategy=f"broadcast:0.25,{shape},warmup=6,first={first}",
        workers=4,
        runs=tmp_path,
        cluster=RANDOM,
    )
    steps = events(summary, "step")
    began = next(line["t"] for line in steps if line["node"] == "worker 0" and line["step"] == 6)
    for rank in range(4):
        mine = [line["t"] for line in steps if line["node"] == f"worker {rank}"]
        assert len(mine) == 10 and (mine[0] > began) == (rank >= first)
    assert len(set(digests(summary).values())) == 1


def test_broadcast_warmup_ends_if_the_first_worker_runs_out_of_data(tmp_path: Path) -> None:
    """With less data than the warm-up needs, the others train on what is left: no worker waits for ever."""
    summary = run_in(
        "simulated",
        Training(epochs=1, size=12),
        strategy="broadcast:0.001,warmup=100",
        workers=3,
        runs=tmp_path,
    )
    assert summary["samples"] == 12


@pytest.mark.parametrize("back", ["", 'back = "60 ms"\n'])
def test_the_first_worker_may_die_before_the_warmup_is_over(tmp_path: Path, back: str) -> None:
    crash = f'[[failures]]\nworkers = [0]\nat = "35 ms"\n{back}'
    summary = run_in(
        "simulated",
        Training(),
        strategy="broadcast:0.001,warmup=8",
        workers=3,
        runs=tmp_path,
        cluster=RANDOM + crash,
    )
    assert summary["samples"] >= 3 * 96 and len(set(digests(summary).values())) == 1


def test_broadcast_replacement_after_warmup_scales_by_all_workers(watch: Watch, tmp_path: Path) -> None:
    """A replacement of worker 0 divides by the number of all workers, from its first step on."""

    def main() -> None:
        here = pr.init()
        late = here._node.incarnation
        model = nn.Linear(1, 1, bias=False).double()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(6 if late else 20):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    crash = '[[failures]]\nworkers = [0]\nat = "105 ms"\nback = "110 ms"\n'
    run_in(
        "simulated",
        main,
        strategy="broadcast:0.0625,reduce=mean,warmup=4",
        workers=4,
        runs=tmp_path,
        cluster=crash,
    )
    assert {step.update[0].item() for step in watch.emitted["0.0"][:4]} == {-1.0}
    assert watch.emitted["0.1"] and {step.update[0].item() for step in watch.emitted["0.1"]} == {-0.25}


# --- messages --------------------------------------------------------------------------------------


@every_shape
def test_each_message_comes_once(tmp_path: Path, shape: str) -> None:
    """Each worker gets every message of every other exactly once, and sends to its neighbors only.

    At the end some messages come again: a worker that is asked if it has all asks for those on their way.
    """
    workers = 11
    plane = Plane(6)
    summary = run_in(
        "simulated", plane, strategy=f"broadcast:0.25,{shape}", workers=workers, runs=tmp_path, cluster=RANDOM
    )
    sent = {line["node"]: line["messages"] for line in events(summary, "residual")}
    lines = [line for line in events(summary, "deliver") if line["kind"] == "pulses"]
    got, receivers = Counter(line["node"] for line in lines), defaultdict(set)
    for line in lines:
        receivers[line["sender"]].add(line["node"])
    extra = got - Counter({node: sum(sent.values()) - sent[node] for node in sent})
    assert all(got[node] >= sum(sent.values()) - sent[node] for node in sent)
    asked = [line for line in events(summary, "deliver") if line["kind"] == "known"]
    done = min(line["t"] for line in events(summary, "residual"))
    assert all(line["t"] >= done for line in asked) and (asked or not extra)
    early = Counter(line["node"] for line in lines if line["t"] < done)
    assert all(early[node] <= sum(sent.values()) - sent[node] for node in sent)
    for worker in plane.workers.values():
        assert worker.broadcast.log.known == {f"{node.split()[1]}.0": sent[node] for node in sent}
    strategy = pr.parse(f"broadcast:{shape}")
    most = workers - 1 if strategy.topology == "mesh" else strategy.fanout + 1
    assert max(map(len, receivers.values())) == most
    assert not [line for line in events(summary, "deliver") if line["kind"] == "snapshot"]


class Wide(nn.Module):
    """A model with 100,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(100_000))


def test_broadcast_sends_a_tenth_of_a_bit_per_parameter_at_1_percent(tmp_path: Path) -> None:
    """If 1 % of the parameters reach tau in a step, messages have about a tenth of a bit per parameter."""

    def main() -> None:
        here = pr.init()
        model = Wide()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        generator = torch.Generator().manual_seed(here.rank)
        for _ in range(5):
            some = torch.rand(100_000, generator=generator) < 0.01
            model.x.grad = some * 0.25
            optimizer.step()

    sent = {
        each: run_in("simulated", main, strategy=each, workers=4, runs=tmp_path)["bytes_sent"]
        for each in ("broadcast:0.25", "allreduce")
    }
    dense = 4 * 3 * 5 * 100_000 * 4 + 3 * 400_000
    messages = 4 * 3 * (5 + 1)  # the last message comes twice at the end
    bits = (sent["broadcast:0.25"] - 3 * 400_000) / (messages * 100_000) * 8
    assert 0.08 < bits < 0.12
    assert 250 * (sent["broadcast:0.25"] - 3 * 400_000) < dense - 3 * 400_000


@few("shape", ["topology=tree,fanout=4", "topology=mesh"], quick=1)
def test_broadcast_sends_every_step_if_the_network_keeps_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str
) -> None:
    """Even if only one worker trains, and the others have few messages to confirm."""
    monkeypatch.setattr(reliable_broadcast, "MIN_BYTES", 0)

    def main() -> None:
        here = pr.init()
        model = Wide()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        generator = torch.Generator().manual_seed(here.rank)
        for _ in range(120 if here.rank == 0 else 1):
            some = torch.rand(100_000, generator=generator) < 0.1
            model.x.grad = some * 0.25
            optimizer.step()

    summary = run_in(
        "simulated", main, strategy=f"broadcast:0.25,warmup=119,{shape}", workers=16, runs=tmp_path
    )
    sent = {line["node"]: line["messages"] for line in events(summary, "residual")}
    assert sent.pop("worker 0") == 120 and set(sent.values()) == {1}


# --- workers that join and leave -------------------------------------------------------------------


def troubled(seed: int) -> tuple[int, str, str]:
    """A random number of workers, strategy, and cluster with crashes, rejoins and stragglers."""
    lots = random.Random(seed)
    workers = lots.choice([2, 3, 5, 8])
    latency, width = lots.choice([0, 1, 7, 30]), lots.choice(["200 kbit/s", "1 Mbit/s", "1 Gbit/s"])
    lines = '[[hosts]]\nstep_time = { exponential = "10 ms" }\n'
    lines += f'latency = "{latency} ms"\nbandwidth = "{width}"\n'
    safe = lots.randrange(workers)
    for _ in range(lots.randrange(2 * workers)):
        worker, at = lots.randrange(workers), lots.uniform(0.001, 1.2 / workers)
        if worker != safe:
            lines += f'[[failures]]\nworkers = [{worker}]\nat = "{at:.4f} s"\n'
            lines += f'back = "{at + lots.uniform(0.001, 0.2):.4f} s"\n' if lots.random() < 0.7 else ""
    if lots.random() < 0.5:
        lines += f"[[stragglers]]\nworkers = [{lots.randrange(workers)}]\nslowdown = 10.0\n"
    fields = [lots.choice(["0.001", "0.01,pulses=one"]), lots.choice(SHAPES), "reduce=mean"]
    fields += lots.choice([[], ["warmup=4"], ["warmup=4,first=2"]])
    return workers, f"broadcast:{','.join(fields)}", lines


@few("seed", range(30), quick=4)
def test_broadcast_replicas_agree_despite_crashes_and_rejoins(
    watch: Watch, tmp_path: Path, seed: int
) -> None:
    """With delays, stragglers, crashes and rejoins, the workers that are left at the end have the same
    messages, each once, and so the same bits. Of 216 steps, each divided by up to 8 workers, some end in the
    residual of a worker that dies, and still the loss falls."""
    workers, strategy, cluster = troubled(seed)
    training = Training(epochs=9)
    summary = run_in(
        "simulated", training, strategy=strategy, workers=workers, runs=tmp_path, cluster=cluster, seed=seed
    )
    assert summary["samples"] >= 9 * 96 and summary["batches_undone"] == 0
    first = next(row["before"] for row in summary.metrics if "before" in row)  # others begin after a warm-up
    assert summary["metrics"]["after"] < 0.85 * first
    ends = digests(summary)
    assert len(set(ends.values())) == 1
    incarnations = dict(sorted(training.workers))  # the last of each rank
    present = [training.workers[rank, incarnations[rank]] for rank in (int(name.split()[1]) for name in ends)]
    for worker in present:
        mine = worker.broadcast
        assert mine.log.known == present[0].broadcast.log.known
        assert equal(mine.log.counts, watch.total(worker))
        assert mine.sent == mine.log.known.get(mine.origin, 0)


def test_broadcast_with_crashes_is_deterministic_for_a_seed(tmp_path: Path) -> None:
    workers, strategy, cluster = troubled(9)
    one, other = (
        run_in("simulated", Training(), strategy=strategy, workers=workers, runs=tmp_path, cluster=cluster)
        for _ in range(2)
    )
    assert one["digest"] == other["digest"] and one["lost"] == other["lost"]


@pytest.mark.parametrize("which", ["some", "the last"])
@every_shape
def test_broadcast_resends_messages_lost_with_a_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str, which: str
) -> None:
    """One message to each peer is lost, in the middle or at the end, and so is the first request for it."""
    send, last, lost = SimulatedNode.send, 40, set()

    def dropping(self: SimulatedNode, to: Peer, kind: str, *tensors: Tensor, **fields: Any) -> None:
        edge = self.me, to
        if kind == "pulses" and fields["number"] == (7 if which == "some" else last) and edge not in lost:
            lost.add(edge)
        elif kind == "known" and which == "some" and ("asked", *edge) not in lost:
            lost.add(("asked", *edge))
        else:
            send(self, to, kind, *tensors, **fields)

    monkeypatch.setattr(SimulatedNode, "send", dropping)
    summary = run_in(
        "simulated", Plane(last), strategy=f"broadcast:0.25,{shape}", workers=4, runs=tmp_path, cluster=RANDOM
    )
    assert lost and len(digests(summary)) == 4 and len(set(digests(summary).values())) == 1


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_broadcast_replicas_agree_on_real_processes(tmp_path: Path, shape: str) -> None:
    summary = pr.run(Training(epochs=6), workers=4, strategy=f"broadcast:{shape}", runs=tmp_path, threads=1)
    ends = digests(summary)
    assert len(ends) == 4 and len(set(ends.values())) == 1
    assert summary["metrics"]["after"] < 0.7 * summary["metrics"]["before"]


@each_value(("victim", [0, 2]), ("shape", ["topology=mesh", "topology=tree"]), ("restarts", [0, 1]))
def test_broadcast_continues_after_one_of_four_workers_is_killed(
    tmp_path: Path, shape: str, restarts: int, victim: int
) -> None:
    """With kill -9, with and without a replacement: the others continue and end equal."""
    summary = pr.run(
        Training(epochs=6, pause=0.01, dies={victim: 8}), workers=4, strategy=f"broadcast:{shape}",
        runs=tmp_path, threads=1, restarts=restarts, timeout=60.0,
    )  # fmt: skip
    assert list(summary["lost"]) == [f"worker {victim}"] and summary["joined"] == restarts
    ends = digests(summary)
    assert len(ends) == 3 + restarts and len(set(ends.values())) == 1
    assert summary["metrics"]["after"] < 0.7 * summary["metrics"]["before"]


# --- the delivery log ------------------------------------------------------------------------------


def messages(origin: str, count: int) -> list[tuple[str, int, tuple[Tensor, ...]]]:
    """The messages of an origin."""
    lots = np.random.default_rng(sum(map(ord, origin)))
    made = []
    for number in range(1, count + 1):
        residual = torch.zeros(40)
        code, _ = selection.pulses(residual, torch.from_numpy(lots.normal(size=40)).float(), 0.5, many=True)
        made.append((origin, number, (code,)))
    return made


def new_log() -> DeliveryLog:
    return DeliveryLog([torch.zeros(40, dtype=torch.int32)], 0.5)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_delivery_logs_agree_whatever_each_has_missed(data: st.DataObject) -> None:
    """Three logs get messages in any order, twice or never, and drop what all have. A fourth starts from a
    snapshot of one. Each sends the next what it lacks, and all agree."""
    everything = [each for origin in ("0.0", "1.0", "1.1") for each in messages(origin, 6)]
    logs = [new_log() for _ in range(3)]
    for each in logs:
        for place in data.draw(st.lists(st.integers(0, len(everything) - 1), max_size=60)):
            origin, number, codes = everything[place]
            known = each.known.get(origin, 0)
            wanted = "new" if number == known + 1 else "known" if number <= known else "gap"
            assert each.add(origin, number, codes) == wanted
    for each in logs:
        for origin in each.known:
            least = min(other.known.get(origin, 0) for other in logs)
            each.drop(origin, least)
            assert each.kept(origin)[0] == each.known[origin] - least
    late, giver = new_log(), data.draw(st.sampled_from(logs))
    snapshot = giver.snapshot()
    late.check(snapshot)
    assert late.install(snapshot)
    if data.draw(st.booleans()):
        logs.remove(giver)  # it dies
    logs.append(late)
    for giver in logs + logs:
        for taker in logs:
            if data.draw(st.booleans()):
                assert taker.install(giver.snapshot())
            missing = giver.missing(taker.known)
            assert missing is not None
            for origin, number in missing:
                entry = giver.message(origin, number)
                assert entry is not None and taker.add(origin, number, entry.codes) == "new"
            assert not taker.lacks(giver.known)
    wanted = new_log()
    for origin, number, codes in everything:
        if number <= logs[0].known.get(origin, 0):
            wanted.add(origin, number, codes)
    for each in logs:
        assert each.known == wanted.known and torch.equal(each.counts[0], wanted.counts[0])
        assert each.digest() == wanted.digest()


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("broadcast:0", "tau must be more than 0"),
        ("broadcast:-0.1", "tau must be more than 0"),
        ("broadcast:inf", "tau must be more than 0"),
        ("broadcast:fanout=0", "fanout must be 1 or more"),
        ("broadcast:warmup=-1", "warmup must be 0 or more"),
        ("broadcast:first=0", "first must be 1 or more"),
        ("broadcast:topology=star", "topology takes mesh or tree"),
        ("broadcast+topk:0.1", "broadcast takes no codec"),
    ],
)
def test_broadcast_refuses_invalid_settings(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pr.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("broadcast:first=9,warmup=5", "first is at most 3, the number of workers"),
        ("broadcast:first=2", "first needs a warmup; set its steps, as in warmup=100"),
        ("broadcast:fanout=3", "fanout needs topology=tree; in a mesh each worker sends to all others"),
    ],
)
def test_broadcast_refuses_settings_that_do_not_fit_three_workers(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"^{text.partition(':')[0]}:.*{why}$"):
        pr.parse(text).check(Plan(pr.parse(text), 3))


@pytest.mark.parametrize("text", ["broadcast:first=3,warmup=5", "broadcast:topology=tree,fanout=9"])
def test_broadcast_accepts_settings_that_fit_three_workers(text: str) -> None:
    strategy = pr.parse(text)
    strategy.check(Plan(strategy, 3))
    assert pr.parse(str(strategy)) == strategy


def test_tau_is_the_next_power_of_two() -> None:
    assert [pr.parse(f"broadcast:{tau}").unit for tau in (0.001, 0.25, 0.3, 3)] == [2**-10, 0.25, 0.25, 4.0]


@pytest.mark.parametrize(
    ("fields", "tensors", "why"),
    [
        ({"origin": "1.0", "number": 1}, (torch.zeros(9, dtype=torch.uint8),), "not a sparse message"),
        ({"origin": "1.0", "number": 1}, (), "received 0 codes for 1 vectors"),
        ({"origin": "1.0", "number": 1}, (torch.zeros(9),), "a sparse message is bytes"),
        ({"number": 1}, (), "without an origin and a number"),
    ],
)
def test_broadcast_error_for_a_malformed_message_names_the_sender(
    tmp_path: Path, fields: dict[str, Any], tensors: tuple[Tensor, ...], why: str
) -> None:
    def main() -> None:
        here = pr.init()
        model = mlp()
        model, _ = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        bad = Message(Peer("worker", 1), "pulses", 1, fields, tensors)
        with pytest.raises(WireError, match=f"worker 1 sent pulses.*{why}"):
            here._worker.on_message(bad)

    run_in("simulated", main, strategy="broadcast", workers=2, runs=tmp_path)


def test_pulses_of_another_size_are_refused() -> None:
    (_, _, codes), *_ = messages("0.0", 1)
    with pytest.raises(WireError, match=r"its pulses are of 0\.5, not of 0\.25"):
        selection.count(codes[0], torch.zeros(40, dtype=torch.int32), 0.25)
    values = selection.pack(torch.ones(40), torch.arange(3), half=True)[0]
    with pytest.raises(WireError, match="it has values in place of pulses"):
        selection.count(values, torch.zeros(40, dtype=torch.int32), 0.25)


def test_broadcast_refuses_load_state_dict_after_prepare(tmp_path: Path) -> None:
    def main() -> None:
        here = pr.init()
        model = mlp()
        model, _ = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        here.consensus().load_state_dict(mlp().state_dict())
        with pytest.raises(UsageError, match=r"call load_state_dict\(\) before session.prepare"):
            model.load_state_dict(mlp().state_dict())

    run_in("simulated", main, strategy="broadcast", workers=2, runs=tmp_path)


def test_broadcast_raises_if_tau_is_too_small_for_32_bit_counts(tmp_path: Path) -> None:
    """It raises before a count overflows."""
    with pytest.raises(
        PolyrhythmError, match=r"pulses from its initial value.* tau \(9\.09e-13\) is too small"
    ):
        run_in("simulated", Steps(80), strategy=f"broadcast:{2.0**-40}", workers=2, runs=tmp_path)


def test_broadcast_raises_if_parameters_become_nan(tmp_path: Path) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.fill_(float("nan"))

    def main() -> None:
        here = pr.init()
        model = mlp()
        model, optimizer = here.prepare(model, Broken(model.parameters(), lr=0.1))
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()

    with pytest.raises(PolyrhythmError, match=r"worker 0, step 1: the parameters of .* are not finite"):
        run_in("simulated", main, strategy="broadcast", workers=2, runs=tmp_path)
