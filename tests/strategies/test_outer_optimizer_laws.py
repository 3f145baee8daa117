"""The laws of outer optimizers, SlowMo and DiLoCo in both forms: exact where they are exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.model.vectors import split
from tests.support.programs import (
    ADAM,
    MOMENTUM,
    SGD,
    Script,
    distance,
    events,
    same,
    trained,
)
from tests.support.traces import SLOW, Numbers, Trace, close, drift, mean

# --- slow momentum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", ",momentum=average", ",momentum=reset"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_slowmo_without_momentum_is_local(simulate: Any, more: str, optimizer: Any) -> None:
    """alpha = 1, beta = 0 has the bits of local SGD."""
    script = Script(optimizer=optimizer, size=50, groups=True, epochs=3)
    slow = simulate(script, f"slowmo:3,alpha=1,beta=0{more}", 3)
    assert slow["digest"] == simulate(script, f"local:3{more}", 3)["digest"]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (0.7, 0.9), (0.5, 0.0)])
def test_slowmo_by_hand(simulate: Any, alpha: float, beta: float) -> None:
    """u <- beta u + (w_prev - w_mean) / lr, w <- w_prev - alpha lr u, also while the learning rate falls."""

    def rate(step: int) -> float:
        return 0.1 * 0.9**step

    def schedule(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rate(step)

    trace = Trace(12, before=schedule)
    simulate(trace, f"slowmo:4,alpha={alpha},beta={beta}", 3)
    w_prev = trace.begin
    x, u = [w_prev] * 3, torch.zeros_like(w_prev)
    for step in range(1, 13):
        x = [x[rank] - rate(step) * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0:
            u = beta * u + (w_prev - mean(x)) / rate(step)
            w_prev = w_prev - alpha * rate(step) * u
            x = [w_prev] * 3
        assert all(close(x[rank], trace.x[rank][step - 1]) for rank in range(3))


def test_slowmo_steps_by_the_mean_rate(simulate: Any) -> None:
    """Where one worker's schedule lowers its rate, all still take the same slow step, and show the same."""
    rates = [0.1, 0.02, 0.03]

    def lower(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rates[rank] if step > 2 else 0.1

    trace = Trace(8, before=lower, look=True)
    simulate(trace, "slowmo:4,beta=0.5", 3, check_replicas=0)  # rates differ on purpose
    w_prev = trace.begin
    x, u = [w_prev] * 3, torch.zeros_like(w_prev)
    for step in range(1, 9):
        x = [x[rank] - (rates[rank] if step > 2 else 0.1) * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0:
            u = 0.5 * u + (w_prev - mean(x)) / 0.05
            w_prev = w_prev - 0.05 * u
            x = [w_prev] * 3
            assert all(torch.equal(trace.x[rank][step - 1], trace.x[0][step - 1]) for rank in range(3))
        assert all(close(x[rank], trace.x[rank][step - 1]) for rank in range(3))
        assert all(torch.equal(trace.shown[rank][step - 1], trace.shown[0][step - 1]) for rank in range(3))


def test_slowmo_stands_a_learning_rate_of_zero(simulate: Any) -> None:
    """A schedule that ends, or begins, at 0 leaves numbers, and not infinities."""

    def zero(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if step in (1, 6) else 0.1

    assert trained(simulate(Trace(6, before=zero), "slowmo:1", 2))["x"].isfinite().all()


# --- DiLoCo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
def test_diloco_with_a_plain_outer_step_is_local(simulate: Any, optimizer: Any) -> None:
    """lr = 1, beta = 0 is theta - (theta - mean), which is the mean up to rounding."""
    script = Script(optimizer=optimizer, size=50, epochs=3)
    found, law = (trained(simulate(script, each, 3)) for each in ("diloco:3,lr=1,beta=0", "local:3"))
    assert distance(found, law) < 1e-12


def test_diloco_and_local_round_alike_in_short_floats(simulate: Any) -> None:
    """In float32 a few elements differ, and those by a last bit."""
    begin = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    noise = [torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    trace = Trace(4, lambda rank, x: noise[rank], partial(torch.optim.SGD, lr=1e-3), begin)
    found, law = (trained(simulate(trace, each, 2))["x"] for each in ("diloco:4,lr=1,beta=0", "local:4"))
    assert 0 < (found != law).float().mean() < 0.1
    assert (found - law).abs().max() <= 2**-23 * begin.abs().max()


@pytest.mark.parametrize("workers", [1, 3])
def test_diloco_each_step_is_nesterov(simulate: Any, workers: int) -> None:
    """H = 1 with inner SGD(eta) is synchronous Nesterov with learning rate eta * lr; alone too, not plain."""
    inner = Script(size=48, epochs=3)
    outer = replace(inner, optimizer=partial(torch.optim.SGD, lr=0.1 * 0.7, momentum=0.9, nesterov=True))
    found, law = trained(simulate(inner, "diloco:1", workers)), trained(simulate(outer, "allreduce", workers))
    assert distance(found, law) < 1e-12
    assert distance(found, trained(simulate(inner, "allreduce", workers))) > 1e-3


@pytest.mark.parametrize("codec", ["", "+fp16", "+bf16"])
def test_diloco_by_hand(simulate: Any, codec: str) -> None:
    """delta = mean(theta - theta_i), m <- beta m + delta, theta <- theta - lr (delta + beta m)."""
    trace, rounding = Trace(14), {"": 1e-12, "+fp16": 2e-2, "+bf16": 1e-1}[codec]
    found = trained(simulate(trace, f"diloco:4,lr=0.5,beta=0.8{codec}", 3))["x"]
    theta = trace.begin
    x, m = [theta] * 3, torch.zeros_like(theta)
    for step in range(1, 15):
        x = [x[rank] - 0.1 * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0 or step == 14:
            delta = theta - mean(x)
            m = 0.8 * m + delta
            theta = theta - 0.5 * (delta + 0.8 * m)
            x = [theta] * 3
    assert close(found, theta, rounding)
    assert close(found, theta) == (not codec)


def test_diloco_applies_weight_decay_in_the_inner_steps_only(simulate: Any) -> None:
    """Without a gradient the inner decay shrinks the parameters, and the outer step adds none of its own."""
    trace = Trace(3, lambda rank, x: torch.zeros_like(x), partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    found = trained(simulate(trace, "diloco:3,lr=1,beta=0", 2))["x"]
    assert close(found, trace.begin * 0.95**3)


def test_a_failed_exchange_leaves_theta_and_momentum(simulate: Any) -> None:
    """A worker whose exchange fails still has the parameters of the last one, in theta and in the model."""
    kept: list[bool] = []

    def main() -> None:
        here = pr.init()
        numbers = Numbers(torch.ones(4, dtype=torch.float64))
        numbers, optimizer = here.prepare(numbers, SGD(numbers.parameters()))
        worker = here._worker
        for step in range(1, 9):
            if step == 5:
                agreed, m = numbers.x.detach().clone(), worker.m[0].clone()
            if step == 8 and here.rank == 1:  # it is elsewhere, and there first
                here._node.everyone.all_reduce(torch.ones(1))
            numbers.x.grad = drift(here.rank, numbers.x.detach())
            try:
                optimizer.step()
            except PolyrhythmError:
                kept.extend([step == 8, torch.equal(worker.theta[0], agreed), torch.equal(numbers.x, agreed)])
                kept.extend([torch.equal(worker.m[0], m), bool(m.abs().min() > 0)])
                raise

    with pytest.raises(PolyrhythmError, match="worker 1 is in all_reduce"):
        simulate(main, "diloco:4", 2)
    assert kept == [True] * 5


# --- streaming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["", "+bf16"])
@pytest.mark.parametrize("period", [1, 3, 100])
def test_streaming_in_one_fragment_is_diloco(simulate: Any, period: int, codec: str) -> None:
    """P = 1, tau = 0, mix = 0 has the bits of DiLoCo."""
    script = Script(optimizer=ADAM, size=50, groups=True, epochs=3)
    streaming = simulate(script, f"streaming-diloco:{period},fragments=1,overlap=0,mix=0{codec}", 3)
    law = simulate(script, f"diloco:{period}{codec}", 3)
    assert streaming["digest"] == law["digest"] and streaming["bytes_sent"] == law["bytes_sent"]


@pytest.mark.parametrize(
    ("period", "fragments", "overlap", "mix"),
    [(4, 2, 1, 0.5), (6, 3, 0, 0.25), (12, 3, 3, 0.0), (5, 5, 0, 0.5), (6, 1, 4, 0.9)],
)
def test_streaming_by_hand(simulate: Any, period: int, fragments: int, overlap: int, mix: float) -> None:
    """theta_p makes its outer step tau steps after delta_p was taken; w_p <- (1 - mix) theta_p + mix w_p."""
    trace = Trace(40)
    simulate(
        trace, f"streaming-diloco:{period},fragments={fragments},overlap={overlap},mix={mix}", 3
    )  # fmt: skip
    theta, m = trace.begin.clone(), torch.zeros_like(trace.begin)
    x, every = [trace.begin.clone() for _ in range(3)], period // fragments
    under_way: list[tuple[int, slice, Tensor]] = []
    for step in range(1, 41):
        x = [x[rank] - 0.1 * drift(rank, x[rank]) for rank in range(3)]
        if step % every == 0:
            part = slice(*split(12, fragments)[(step // every - 1) % fragments])
            under_way.append((step + overlap, part, theta[part] - mean(x)[part]))
        if under_way and under_way[0][0] == step:
            _, part, delta = under_way.pop(0)
            m[part] = 0.9 * m[part] + delta
            theta[part] = theta[part] - 0.7 * (delta + 0.9 * m[part])
            for each in x:
                each[part] = (1 - mix) * theta[part] + mix * each[part]
        assert all(close(x[rank], trace.x[rank][step - 1], 1e-11) for rank in range(3)), step


def test_each_fragment_has_its_turn_once(simulate: Any) -> None:
    """With mix = 0 a fragment, and only it, is the same everywhere in the step that joins it: once per H."""
    trace = Trace(24)
    simulate(trace, "streaming-diloco:6,fragments=3,overlap=1,mix=0", 2)
    for step in range(1, 25):
        equal = trace.x[0][step - 1] == trace.x[1][step - 1]
        turn = [False] * 12
        if step >= 3 and step % 2:
            start, stop = split(12, 3)[(step // 2 - 1) % 3]
            turn[start:stop] = [True] * 4
        assert equal.tolist() == turn, step


@pytest.mark.parametrize(
    ("overlap", "size", "waits"),
    [(0, 80, 0.040), (1, 80, 0.030), (3, 80, 0.010), (3, 40, 0.0), (2, 40, 0.0), (1, 40, 0.010)],
)
def test_streaming_waits_for_what_steps_do_not_hide(
    simulate: Any, overlap: int, size: int, waits: float
) -> None:
    """A fragment takes half the vector's time, and of that tau steps of 10 ms are for nothing."""
    trace = Trace(17, begin=torch.ones(size, dtype=torch.float64))
    strategy = f"streaming-diloco:8,fragments=2,overlap={overlap}"
    for line in events(simulate(trace, strategy, 2, cluster=SLOW), "step"):
        joins = line["step"] >= 4 and line["step"] % 4 == overlap
        assert line["wait_s"] == pytest.approx(waits * joins, abs=1e-9), line["step"]


def test_streaming_on_real_processes_is_as_simulated(tmp_path: Path) -> None:
    """What is begun and joined later comes out the same on processes, with a look in between."""
    script = Script(optimizer=ADAM, size=50, epochs=5)
    strategy = "streaming-diloco:6,fragments=2,overlap=2,mix=0.3"
    found, law = (
        trained(how(script, workers=3, strategy=strategy, runs=tmp_path, threads=1))
        for how in (pr.run, pr.simulate)
    )
    assert same(found, law)
