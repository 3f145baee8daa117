"""The laws of workers that step alone and average: exact in simulation, where they are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import PeerLost, UsageError
from polyrhythm.session.context import session
from tests.support.combine import each_value
from tests.support.programs import (
    ADAM,
    FEATURES,
    MOMENTUM,
    NESTEROV,
    SGD,
    Examples,
    Script,
    Steps,
    distance,
    events,
    mlp,
    trained,
)
from tests.support.traces import SLOW, Numbers, Trace, close, drift, mean

FAMILY = [
    "local:3", "local:3,momentum=average", "local:3,momentum=reset", "local:auto", "average:3",
    "postlocal:3,after=5", "slowmo:3", "slowmo:3,alpha=0.8,momentum=average", "diloco:3", "diloco:3+bf16",
    "streaming-diloco:6,fragments=3", "streaming-diloco:8,fragments=2,overlap=3,mix=0.2",
    "streaming-diloco:4,fragments=2,overlap=0,mix=0", "streaming-diloco:6,fragments=2,overlap=2+fp16",
]  # fmt: skip


# --- averaging each step ----------------------------------------------------------------------------


@each_value(
    ("strategy", ["local:1", "local:1,momentum=average"]),
    (
        "optimizer",
        [
            pytest.param(SGD, id="sgd"),
            pytest.param(MOMENTUM, id="momentum"),
            pytest.param(NESTEROV, id="nesterov"),
        ],
    ),
    ("size", [48, 50, 43]),
)
def test_averaging_each_step_is_synchronous_for_linear_optimizers(
    simulate: Any, strategy: str, optimizer: Any, size: int
) -> None:
    """H = 1 equals allreduce if the update is linear in the gradient, whether or not momentum is averaged."""
    script = Script(optimizer=optimizer, size=size, epochs=4)
    law = trained(simulate(script, "allreduce", 3))
    assert distance(trained(simulate(script, strategy, 3)), law) < 1e-12


@each_value(
    ("strategy", ["average:1", "average:1,momentum=average"]),
    ("optimizer, size", [(SGD, 48), (SGD, 50), (SGD, 43), (MOMENTUM, 48), (NESTEROV, 48)]),
)
def test_weighted_averaging_each_step_is_synchronous(
    simulate: Any, strategy: str, optimizer: Any, size: int
) -> None:
    """The same with weights: with plain SGD in uneven rounds too, with momentum where the weights stay."""
    script = Script(optimizer=optimizer, size=size, epochs=4)
    law = trained(simulate(script, "allreduce", 3))
    assert distance(trained(simulate(script, strategy, 3)), law) < 1e-12


def test_averaging_each_step_is_not_synchronous_for_adam(simulate: Any) -> None:
    """Adam is not linear in the gradient."""
    script = Script(optimizer=ADAM, epochs=12)
    law = trained(simulate(script, "allreduce", 3))
    for strategy in ("local:1", "local:1,momentum=average", "average:1"):
        assert distance(trained(simulate(script, strategy, 3)), law) > 0.01


def test_only_the_mean_of_the_momentum_matters(simulate: Any) -> None:
    """Under local:1 the workers' momentum differs a lot, and the steps are those of allreduce."""
    own, law = Trace(20, optimizer=NESTEROV), Trace(20, optimizer=NESTEROV)
    simulate(own, "local:1", 3)
    simulate(law, "allreduce", 3)
    buffers = [own.state[rank][-1]["momentum_buffer"] for rank in range(3)]
    assert (buffers[0] - buffers[1]).abs().max() > 0.5
    assert close(mean(buffers), law.state[0][-1]["momentum_buffer"])
    assert all(close(a, b) for a, b in zip(own.x[2], law.x[2], strict=True))


FIXED = {1: -0.5, 2: -0.457143, 10: -0.197376, 400: 0.0}


@pytest.mark.parametrize(
    "strategy",
    [
        *(f"{name}:{period}" for name in ("local", "average") for period in FIXED),
        *(f"slowmo:{period},beta=0.2" for period in (1, 2, 10)),
        *(f"diloco:{period},beta=0.2" for period in (1, 2, 10)),
    ],
)
def test_local_steps_have_a_biased_fixed_point(simulate: Any, strategy: str) -> None:
    """Quadratics with curvatures h settle at sum((1 - r^H) b) / sum(1 - r^H), where r = 1 - lr h.

    An outer step changes how fast they come there, and not where.
    """
    period = pr.parse(strategy).period
    curvature, best, lr = (1.0, 3.0), (1.0, -1.0), 0.1
    pull = [1 - (1 - lr * h) ** period for h in curvature]
    law = sum(p * b for p, b in zip(pull, best, strict=True)) / sum(pull)
    steps = Steps(400, lambda rank, x: curvature[rank] * (x - best[rank]), lr)
    found = trained(simulate(steps, strategy, 2))["x"].item()
    assert found == pytest.approx(law, abs=1e-9)
    assert found == pytest.approx(FIXED[period], abs=1e-4)


# --- weights ----------------------------------------------------------------------------------------


@dataclass
class Uneven:
    """Epochs in batches of one; each gradient is the number of the worker."""

    size: int
    epochs: int = 1

    def __call__(self) -> None:
        here = pr.init()
        numbers = Numbers(torch.tensor([5.0, 0.1], dtype=torch.float64))
        loader = DataLoader(Examples(self.size), batch_size=1)
        numbers, optimizer, loader = here.prepare(numbers, SGD(numbers.parameters(), lr=1.0), loader)
        for _ in (batch for _ in range(self.epochs) for batch in loader):
            optimizer.zero_grad()
            (numbers.x[0] * (1.0 + here.rank)).backward()
            optimizer.step()


def test_averages_are_weighted_by_examples(simulate: Any) -> None:
    """w = sum(n_i w_i) / sum(n_i): who trained on more counts for more, and what is borrowed for nothing."""
    # Of 5 examples in rounds of 3, worker 0 trains on two and so does worker 1, or worker 0 on both: see the
    # last round. Nobody's gradient is scaled.
    summary = simulate(Uneven(5), "average:2", 3)
    counts = [0, 0, 0]
    for line in events(summary, "step"):
        counts[int(line["node"].split()[1])] += line["samples"]
    assert sum(counts) == 5 and len(set(counts)) > 1
    local = [5.0 - (1 + rank) * count for rank, count in enumerate(counts)]
    law = sum(n * w for n, w in zip(counts, local, strict=True)) / 5
    x = trained(summary)["x"]
    assert x[0].item() == pytest.approx(law, rel=1e-15)
    assert x[1].item() == 0.1  # nobody has moved it


def test_each_average_has_weights_of_its_own(simulate: Any) -> None:
    """The weights of a round are the examples of that round, whatever was trained on before."""
    period = 3
    summary = simulate(Uneven(5, epochs=5), f"average:{period}", 3)
    samples: list[dict[int, int]] = [{} for _ in range(10)]  # two steps per epoch
    for line in events(summary, "step"):
        samples[line["step"] - 1][int(line["node"].split()[1])] = line["samples"]
    law, weights = 5.0, []
    for first in range(0, 10, period):
        counts = [sum(step[rank] for step in samples[first : first + period]) for rank in range(3)]
        law -= sum(n * (1 + rank) * n for rank, n in enumerate(counts)) / sum(counts)
        weights.append([n / sum(counts) for n in counts])
    assert weights[0] != weights[1]
    assert trained(summary)["x"][0].item() == pytest.approx(law, rel=1e-14)


def test_average_is_weighted_though_one_worker_has_weight_one(simulate: Any) -> None:
    """Three, two and one examples: the weight of the second is 1, and yet it is a weighted mean for all."""

    def main() -> None:
        here = pr.init()
        numbers = Numbers(torch.tensor([5.0], dtype=torch.float64))
        loader = DataLoader(Examples(6), batch_sampler=[[0, 1, 2], [3, 4], [5]])
        numbers, optimizer, loader = here.prepare(numbers, SGD(numbers.parameters(), lr=1.0), loader)
        for _ in loader:
            (numbers.x[0] * (1.0 + here.rank)).backward()
            optimizer.step()

    law = (3 * 4.0 + 2 * 3.0 + 1 * 2.0) / 6
    assert trained(simulate(main, "average:1", 3))["x"].item() == pytest.approx(law, rel=1e-15)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("more", ["", ",momentum=average", ",momentum=reset"])
def test_equal_counts_make_a_plain_mean(simulate: Any, optimizer: Any, more: str) -> None:
    """Where all train on as many examples, `average` has the bits of `local`."""
    script = Script(optimizer=optimizer, size=48)
    weighted, plain = (simulate(script, f"{name}:3{more}", 3) for name in ("average", "local"))
    assert weighted["digest"] == plain["digest"]


# --- bytes and looks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "each"),
    [
        ("local:4", 96),
        ("local:4,momentum=average", 2 * 96 + 4),  # and for which parameters there is momentum
        ("local:4,momentum=reset", 96),
        ("average:4", 96 + 3 * 8),  # and the examples of each worker
        ("slowmo:4", 96 + 8),  # and the learning rate
        ("diloco:4", 96),
        ("diloco:4+bf16", 24),
        ("streaming-diloco:12,fragments=3,overlap=0", 32),
        ("streaming-diloco:12,fragments=3,overlap=0+fp16", 8),
    ],
)
def test_between_exchanges_nothing_is_sent(simulate: Any, strategy: str, each: int) -> None:
    """Bytes move in every H-th step only: 2(n-1) times the vector, or a P-th of it."""
    trace = Trace(13, optimizer=MOMENTUM)
    simulate(trace, strategy, 3)
    sent = trace.sent_by_step()
    first = 2 * 2 * 2 * 8 if "=average" in strategy else 0  # where they agree on what there is to average
    assert sent == [2 * 2 * each * (step % 4 == 0) + first * (step == 4) for step in range(2, 14)]


@pytest.mark.parametrize("period", [1, 4, 6, 100])
def test_local_sgd_is_silent_between_averages(simulate: Any, period: int) -> None:
    """It sends the start, and 2(n-1) vectors per average: after every H-th step, and the last one."""
    workers, steps = 3, 8
    summary = simulate(Steps(steps), f"local:{period}", workers)
    averages = -(-steps // period)
    assert summary["bytes_sent"] == 8 * (workers - 1) + averages * 2 * (workers - 1) * 8


@pytest.mark.parametrize("strategy", FAMILY)
def test_consensus_does_not_change_averaging_strategies(simulate: Any, strategy: str) -> None:
    """The consensus shows what the run would bring home if it ended here, the same to all; and it goes on."""
    seen, law = Trace(11, optimizer=MOMENTUM, look=True), Trace(11, optimizer=MOMENTUM)
    assert simulate(seen, strategy, 3)["digest"] == simulate(law, strategy, 3)["digest"]
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(seen.x[rank], law.x[rank], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(seen.shown[rank], seen.shown[0], strict=True))
    for steps in (1, 3, 4, 6, 7, 8, 10, 11):
        ended = trained(simulate(replace(law, count=steps), strategy, 3))["x"]
        assert torch.equal(ended, seen.shown[0][steps - 1]), steps


# --- the period that is chosen ----------------------------------------------------------------------


def chosen(summary: dict[str, Any]) -> list[tuple[int, float, float]]:
    """The periods that were chosen, as worker 0 tells them; the others tell the same."""
    lines = {
        node: [
            (line["period"], line["communication_s"], line["step_s"])
            for line in events(summary, "period")
            if line["node"] == node
        ]
        for node in ("worker 0", "worker 1")
    }
    assert lines["worker 0"] == lines["worker 1"]
    return lines["worker 0"]


@pytest.mark.parametrize(
    ("cluster", "more", "size", "communication", "step", "period"),
    [
        (SLOW, "", 21, 0.025, 0.010, 25),  # 168 bytes and two figures of each worker, once each way
        (SLOW, ",overhead=0.2", 21, 0.025, 0.010, 13),
        (SLOW + 'latency = "1 ms"', "", 21, 0.029, 0.010, 29),  # two hops over two links
        ('[[hosts]]\nlatency = "7 ms"', "", 21, 0.028, 0.010, 28),
        (SLOW, ",momentum=average", 21, 0.025 + 0.0215, 0.010, 47),  # and whether there is momentum
        # Who is fast waits for who is slow, and counts neither that nor its own short steps.
        (SLOW + "count = 1\n[[hosts]]\nspeed = 0.5", "", 21, 0.025, 0.020, 13),
        (SLOW, ",longest=20", 21, 0.025, 0.010, 20),
        (SLOW, ",shortest=40", 21, 0.025, 0.010, 40),
        (SLOW, "", 1996, 2.0, 0.010, 128),
        ("", "", 21, 0.0, 0.010, 1),
        ('[[hosts]]\nstep_time = "0 ms"', ",longest=9", 21, 0.0, 0.0, 9),
    ],
)
def test_auto_period_follows_the_communication_overhead_formula(
    simulate: Any, cluster: str, more: str, size: int, communication: float, step: float, period: int
) -> None:
    """H = ceil(communication / (overhead * step)), between its bounds; it is told once if it stays."""
    begin = torch.ones(size, dtype=torch.float64)
    trace = Trace(200, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5), begin=begin)
    told = chosen(simulate(trace, f"local:auto{more}", 2, cluster=cluster))
    found, measured, steps = told[-1]
    assert len(told) == 1
    assert found == period
    assert measured == pytest.approx(communication, abs=1e-9) and steps == pytest.approx(step, abs=1e-9)


def test_the_period_follows_the_cluster(simulate: Any) -> None:
    """When steps become five times as slow the period becomes a fifth, and nothing depends on chance."""
    cluster = SLOW + '[[stragglers]]\nworkers = [1]\nfrom = "2.1 s"\nslowdown = 5.0'
    trace = Trace(400, begin=torch.ones(21, dtype=torch.float64))
    first, again = (simulate(trace, "local:auto", 2, cluster=cluster) for _ in range(2))
    told = [period for period, _, _ in chosen(first)]
    assert told[0] == 25 and told[-1] == 5 and told == sorted(told, reverse=True)
    assert first["digest"] == again["digest"] and chosen(first) == chosen(again)
    # What averaging takes of the time is what was asked for: 25 ms for each 5 steps of 50 ms.
    late = [line for line in events(first, "step") if line["node"] == "worker 1" and line["t"] > 8]
    share = sum(line["wait_s"] for line in late) / sum(line["compute_s"] for line in late)
    assert share == pytest.approx(0.1, rel=0.05)  # it need not end with a round


def test_auto_period_accounts_for_latency(simulate: Any) -> None:
    """Where latency is all, averaging takes what was asked for, and nothing is exchanged beside it."""
    summary = simulate(Trace(302), "local:auto", 4, cluster='[[hosts]]\nlatency = "25 ms"\n')
    assert [each[0] for each in chosen(summary)] == [100]
    late = [line for line in events(summary, "step") if line["step"] > 2]
    share = sum(line["wait_s"] for line in late) / sum(line["compute_s"] for line in late)
    assert share == pytest.approx(0.1)


@pytest.mark.parametrize("first", [1, 2, 7])
def test_auto_period_ignores_pauses_between_steps(simulate: Any, first: int) -> None:
    """A worker that evaluates or saves now and then, or begins slowly, does not change the period."""

    def pause(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        if rank == 0 and step % 10 == first % 10:
            session.get()._context.advance_time(0.5)

    trace = Trace(200, begin=torch.ones(21, dtype=torch.float64), before=pause)
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW))] == [25]


def test_auto_period_ignores_a_single_slow_round(simulate: Any) -> None:
    """All are slow in one of some rounds: that alone is no reason to change."""
    odd = '[[stragglers]]\nworkers = [0, 1]\nfrom = "2.2 s"\nto = "3.5 s"\nslowdown = 9.0'
    trace = Trace(300, begin=torch.ones(21, dtype=torch.float64))
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW + odd))] == [25]


def test_auto_period_ignores_the_time_of_consensus(simulate: Any) -> None:
    """The consensus takes time on a slow network, and makes no difference to the period."""
    trace = Trace(60, begin=torch.ones(21, dtype=torch.float64), look=True)
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW))] == [25]


def test_the_period_is_chosen_on_real_processes(tmp_path: Path) -> None:
    """All choose the same, within the bounds."""
    script = Script(epochs=4)
    summary = pr.run(script, workers=2, strategy="local:auto,longest=6", runs=tmp_path, threads=1)
    assert all(1 <= period <= 6 for period, _, _ in chosen(summary))
    assert summary["metrics"]["after"] < summary["metrics"]["before"]


# --- post-local -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_postlocal_is_allreduce_and_then_local(simulate: Any, after: int, optimizer: Any) -> None:
    """The first steps have the bits of allreduce; then all step alone and average every H steps."""
    found, law = Trace(14, optimizer=optimizer), Trace(after, optimizer=optimizer)
    simulate(found, f"postlocal:3,after={after}", 3)
    simulate(law, "allreduce", 3)
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found.x[rank], law.x[rank], strict=False))
    numbers = [Numbers(law.x[0][-1]) for _ in range(3)]
    optimizers = [optimizer(each.parameters()) for each in numbers]
    for rank in range(3):
        optimizers[rank].state[numbers[rank].x] = {k: v.clone() for k, v in law.state[0][-1].items()}
    for step in range(after + 1, 15):
        for rank, each in enumerate(numbers):
            each.x.grad = drift(rank, each.x.detach())
            optimizers[rank].step()
        if (step - after) % 3 == 0:
            average = mean([each.x.detach() for each in numbers])
            for each in numbers:
                each.x.data = average.clone()
        assert all(torch.equal(numbers[rank].x, found.x[rank][step - 1]) for rank in range(3)), step


@pytest.mark.parametrize("size", [48, 50])
def test_postlocal_trains_a_model_like_allreduce_before(simulate: Any, size: int) -> None:
    """With accumulation and clipping too, as long as the change has not come."""
    script = Script(optimizer=MOMENTUM, size=size, accumulate=2, clip=0.5)
    law = simulate(script, "allreduce", 3)
    assert simulate(script, "postlocal:3,after=100", 3)["digest"] == law["digest"]
    assert simulate(script, "postlocal:3", 3)["digest"] == law["digest"]  # the learning rate stays


@pytest.mark.parametrize("who", [{0: 5}, {2: 5}, {0: 5, 1: 5, 2: 5}, {0: 8, 1: 5}])
def test_postlocal_workers_switch_in_the_same_step_on_a_lower_lr(simulate: Any, who: dict[int, int]) -> None:
    """One worker's schedule is enough: its next gradient tells all, and that step is the last together."""

    def lower(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step >= who.get(rank, 99) else 0.01 * min(step + 5, 10)

    trace = Trace(12, before=lower)
    simulate(trace, "postlocal:4", 3, check_replicas=0)  # rates differ on purpose
    each = 2 * 2 * (96 + 4 + 8)  # gradients, which there are, and whether one has seen it
    assert trace.sent_by_step() == [*4 * [each], 0, 0, 0, 2 * 2 * 96, 0, 0, 0]


def test_postlocal_averages_all_batches_of_the_switching_step(simulate: Any) -> None:
    """If all hear of the fall in the first of two batches of a step, the second is averaged too."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def main() -> None:
        here = pr.init()
        numbers = Numbers(torch.ones(3, dtype=torch.float64))
        numbers, optimizer = here.prepare(numbers, SGD(numbers.parameters()))
        for step in range(1, 6):
            if step == 3 and here.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.01
            optimizer.zero_grad()
            for batch in (1.0, 2.0):
                (numbers.x * (here.rank + batch)).sum().backward()
            lowered = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = 0.1  # the same for all, that only gradients make a difference
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lowered
            seen[here.rank].append(numbers.x.detach().clone())

    simulate(main, "postlocal:10", 2, check_replicas=0)  # rates differ on purpose
    assert [torch.equal(a, b) for a, b in zip(*seen.values(), strict=True)] == [True] * 3 + [False] * 2


# --- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("local:0", "local:0: period must be 1 or more"),
        ("local:autos", "period takes a whole number or auto, not 'autos'"),
        ("local:8,momentum=forget", "momentum takes keep or average or reset, not 'forget'"),
        ("local:8,longest=9", "shortest, longest and overhead need period=auto"),
        ("local:auto,shortest=9,longest=3", "shortest must be 1 or more, and longest no less than it"),
        ("local:auto,overhead=0", "overhead must be a finite number above 0"),
        ("local:auto,overhead=inf", "overhead must be a finite number above 0"),
        ("average:auto", "period takes a whole number, not 'auto'"),
        ("postlocal:8,after=-1", "after must be a number of steps"),
        ("slowmo:alpha=0", "alpha must be a finite number above 0"),
        ("slowmo:alpha=inf", "alpha must be a finite number above 0"),
        ("slowmo:beta=1", "beta must be 0 or more, and below 1"),
        ("diloco:beta=1", "beta must be 0 or more, and below 1"),
        ("diloco:lr=0", "lr must be a finite number above 0"),
        ("diloco:lr=inf", "lr must be a finite number above 0"),
        ("diloco:momentum=keep", "no field 'momentum'"),
        ("streaming-diloco:10,fragments=4", "fragments must divide period.*4 does not divide 10"),
        (
            "streaming-diloco:8,fragments=4,overlap=2",
            "overlap must be from 0 to 1: a fragment is begun every 2",
        ),
        ("streaming-diloco:8,fragments=0", "fragments must be 1 or more"),
        ("streaming-diloco:mix=1", "mix must be 0 or more, and below 1"),
    ],
)
def test_averaging_strategies_refuse_invalid_settings(text: str, error: str) -> None:
    """Before anything starts, and in words."""
    with pytest.raises(UsageError, match=error):
        pr.parse(text)


@pytest.mark.parametrize("strategy", ["slowmo", "postlocal"])
def test_a_learning_rate_is_needed(strategy: str) -> None:
    """Who counts with the optimizer's lr says so if there is none."""

    class Without(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(UsageError, match=f"{strategy}:.*lr"):
        pr.simulate(Trace(1, optimizer=Without), workers=2, strategy=strategy, threads=1)


def test_a_learning_rate_may_be_a_tensor(simulate: Any) -> None:
    """The slow step and the first fall read it like a number."""

    def tensor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.01))

    for strategy in ("slowmo:3", "postlocal:3"):
        found, law = (
            simulate(Script(optimizer=each, schedule=True), strategy, 2)["metrics"]["after"]
            for each in (tensor, ADAM)
        )
        assert math.isclose(found, law, rel_tol=1e-5)


def test_the_whole_family_trains_a_float32_model(simulate: Any) -> None:
    """Nothing in it needs 64 bits."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp().float()

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == FEATURES
            return self.inner(x.float())

    for strategy in FAMILY:
        summary = simulate(Script(model=Single, optimizer=MOMENTUM, epochs=4), strategy, 3)
        assert summary["metrics"]["after"] < 0.9 * summary["metrics"]["before"], strategy


@dataclass
class FailsToSynchronize:
    """The second exchange of parameters fails everywhere. Worker 0 catches the error and keeps its model."""

    begun: list[Tensor]
    caught: list[Tensor]

    def __call__(self) -> None:
        here = pr.init()
        model: Any = nn.Linear(3, 1, dtype=torch.float64)
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + here.rank, dtype=torch.float64)).sum().backward()
            if step == 3:
                group = here._worker.group  # type: ignore[attr-defined]
                group.begin_all_reduce = group.begin_coded_mean = lose_a_peer
            try:
                optimizer.step()
            except PeerLost:
                if here.rank == 0:
                    self.caught += [each.detach().clone() for each in model.parameters()]
                raise
            if step == 1 and here.rank == 0:
                self.begun += [each.detach().clone() for each in model.parameters()]


def lose_a_peer(*_: Any, **__: Any) -> Any:
    raise PeerLost("worker 1 is gone")


@pytest.mark.parametrize("strategy", ["diloco:2", "slowmo:2+int8", "local:2+int8"])
def test_a_failed_synchronization_leaves_the_model_of_the_start_of_the_round(
    simulate: Any, strategy: str
) -> None:
    """A script that catches the error may save its model: it must not hold displacements."""
    script = FailsToSynchronize([], [])
    with pytest.raises(pr.PolyrhythmError, match="worker 1 is gone"):
        simulate(script, strategy, 2)
    assert script.caught and all(map(torch.equal, script.caught, script.begun))
