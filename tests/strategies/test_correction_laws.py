"""The laws of what is done about stale updates: corrections, momentum, elastic averaging."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from tests.support.programs import (
    MOMENTUM,
    NESTEROV,
    SPEEDS,
    Point,
    Script,
    Walk,
    alone,
    distance,
    events,
    pushes,
    same,
    trained,
)

# --- corrections ------------------------------------------------------------------------------------


def test_delay_compensation_by_hand(simulate: Any) -> None:
    """g + lam g*g*(w - w_i), computed by hand for two workers, one step each, lr = 1."""
    slope = lambda rank, x: torch.full_like(x, [1.0, 2.0][rank])  # noqa: E731
    # Worker 0: 1 -> 0. Worker 1 pulled 1: its gradient is 2 + 0.25 * 4 * (0 - 1) = 1, and 0 -> -1.
    first = "[[hosts]]\ncount = 1\nspeed = 2.0\n[[hosts]]"  # worker 0
    summary = simulate(Walk(1, lr=1.0, slope=slope), "dc-asgd:0.25", 2, cluster=first)
    assert trained(summary)["x"].item() == -1.0
    # Adaptive: ms = 0.5 * (0.5 * 1) + 0.5 * 4 = 2.25, lam = 0.375 / 1.5 = 0.25: the same again.
    strategy = "dc-asgd:0.375,adaptive=yes,decay=0.5"
    summary = simulate(Walk(1, lr=1.0, slope=slope), strategy, 2, cluster=first)
    assert trained(summary)["x"].item() == pytest.approx(-1.0, abs=1e-7)


def test_gap_aware_looks_at_the_gap_not_at_the_age(simulate: Any) -> None:
    """However stale, an update of parameters that nobody else moved counts fully: `async`, bit for bit."""
    workers = 5
    slope = lambda rank, x: torch.eye(workers, dtype=torch.float64)[rank] * x  # noqa: E731
    digests = []
    for strategy in ("async", "gap-aware"):
        walk = Walk(20, size=workers, slope=slope)
        summary = simulate(walk, strategy, workers, cluster=SPEEDS["heterogeneous"])
        assert summary["staleness"]["max"] > 3
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gap_aware_by_hand(simulate: Any, decay: float) -> None:
    """P = 1 + |w - w_i| / C with C = lr sqrt(mean of squares): one step each; decay is damped too."""
    slope = lambda rank, x: torch.ones_like(x)  # noqa: E731
    summary = simulate(Walk(1, lr=0.5, slope=slope, decay=decay), "gap-aware", 2)
    moved = 0.5 * (1 + decay)  # worker 0: 1 -> 1 - moved
    penalty = 1 + moved / 0.5  # squares are 1, so C = lr
    w = 1 - moved
    assert trained(summary)["x"].item() == pytest.approx(w - 0.5 * (1 + decay * w) / penalty, rel=1e-6)


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_dana_zero_is_dana_slim(simulate: Any, speeds: str, servers: int, decay: float) -> None:
    """Workers see the same parameters at every step, in any order of arrival, with weight decay too."""
    seen = []
    for strategy in ("dana-zero", "dana-slim"):
        slope = lambda rank, x: (1 + rank) * torch.sin(x) + x / 2  # noqa: E731
        walk = Walk(30, lr=0.02, momentum=0.9, size=3, slope=slope, decay=decay)
        simulate(walk, strategy, 5, servers, SPEEDS[speeds])
        seen.append(walk.seen)
    counts: Counter[int] = Counter()
    for (rank, zero), (other, slim) in zip(*seen, strict=True):
        assert rank == other
        counts[rank] += 1
        if counts[rank] > 30:
            break  # a worker is done, and from here on DANA-Zero leaves out its momentum
        torch.testing.assert_close(zero, slim, rtol=1e-12, atol=1e-13)


def test_dana_of_one_worker_is_nesterov(simulate: Any) -> None:
    """DANA-Slim bit for bit, and what a worker of DANA-Zero sees up to rounding; groups, decay, schedule."""
    script = Script(optimizer=NESTEROV, size=22, groups=True, schedule=True)
    assert same(trained(simulate(script, "dana-slim", 1)), alone(script))
    walks = [Walk(30, lr=0.05, momentum=0.9, nesterov=True, decay=0.1) for _ in range(2)]
    walks[0]()
    simulate(walks[1], "dana-zero", 1)
    for (_, one), (_, two) in zip(walks[0].seen, walks[1].seen, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


DEPARTURES = {
    "leaves": "[[hosts]]\ncount = 1\n[[hosts]]\nspeed = 3.0",
    "dies": '[[failures]]\nworkers = [1]\nat = "35 ms"',
    "comes back": '[[failures]]\nworkers = [1]\nat = "35 ms"\nback = "62 ms"',
}


@pytest.mark.parametrize("cluster", DEPARTURES.values(), ids=DEPARTURES)
def test_who_leaves_takes_its_momentum_out_of_the_sum(simulate: Any, cluster: str) -> None:
    """A worker gets w - lr mu sum_j v_j over those that are there now; one that comes back has v = 0.

    Replays the log of the server, in numbers that floats hold exactly.
    """
    walk = Walk(10, lr=0.5, momentum=0.5, slope=lambda rank, x: torch.full_like(x, float(1 << rank)))
    summary = simulate(walk, "dana-zero", 3, cluster=cluster)
    w, momenta = 1.0, dict[int, float]()
    views: dict[int, list[float]] = {rank: [] for rank in range(3)}
    left = later = 0  # workers, and updates after the first of them
    for line in events(summary, "pull", "apply", "left"):
        if line["node"] != "server 0":
            continue
        if line["event"] == "left":
            left += momenta.pop(int(line["peer"].split()[1]), 0.0) > 0
            continue
        worker = line["worker"]
        if line["event"] == "apply":
            momenta[worker] = 0.5 * momenta.get(worker, 0.0) + (1 << worker)
            w -= 0.5 * momenta[worker]
            later += left > 0
        views[worker].append(w - 0.25 * sum(momenta.values()))
    seen = {rank: [x.item() for who, x in walk.seen if who == rank] for rank in range(3)}
    assert seen[0] == views[0] and seen[2] == views[2]
    assert seen[1] == views[1] and later > 5


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_ordered_momentum_weights_do_not_depend_on_arrival_order(
    simulate: Any, speeds: str, workers: int
) -> None:
    """Every gradient gets the weight 1 + mu + ... + mu^k of the k rounds since its own, whenever it came."""
    slope = lambda rank, x: torch.full_like(x, float(1 + rank))  # noqa: E731
    summary = simulate(Walk(20, lr=0.5, momentum=0.8, slope=slope), "ormo", workers, cluster=SPEEDS[speeds])
    lines = pushes(summary)
    last = (len(lines) - 1) // workers  # the round of the last update
    total = 0.0
    for line in lines:
        own = (line["version"] - 1 - line["staleness"]) // workers
        total += (1 + line["worker"]) * sum(0.8**power for power in range(last - own + 1))
    assert trained(summary)["x"].item() == pytest.approx(1 - 0.5 * total, rel=1e-12)


def test_ordered_momentum_of_one_worker_is_momentum(simulate: Any) -> None:
    script = Script(optimizer=MOMENTUM, size=22, groups=True)
    assert distance(trained(simulate(script, "ormo", 1)), alone(script)) < 1e-13


@pytest.mark.parametrize("workers", [1, 4])
def test_pushes_from_one_point_are_one_nesterov_step(simulate: Any, workers: int) -> None:
    """m <- beta m + mean d; w <- w - lr (mean d + beta m), for N pushes from the same w; twice, in turn."""
    slope = lambda rank, x: torch.full_like(x, float(1 + rank))  # noqa: E731
    mean = statistics.mean(range(1, workers + 1))
    summary = simulate(Walk(2, lr=0.5, slope=slope), "delayed-nesterov:2,lr=0.25,beta=0.5", workers)
    assert trained(summary)["x"].item() == pytest.approx(1 - 0.25 * (mean + 0.5 * mean), rel=1e-14)
    twice = simulate(Walk(4, lr=0.5, slope=slope), "delayed-nesterov:2,lr=0.25,beta=0.5", workers)
    first = mean
    second = 0.5 * first + mean
    moved = 0.25 * (mean + 0.5 * first) + 0.25 * (mean + 0.5 * second)
    assert trained(twice)["x"].item() == pytest.approx(1 - moved, rel=1e-14)


# --- elastic averaging ------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["", ",max_staleness=0", ",max_staleness=2"])
@pytest.mark.parametrize("speeds", SPEEDS)
def test_elastic_exchanges_conserve_the_sum(simulate: Any, bound: str, speeds: str) -> None:
    """Centre plus workers change by the gradients alone: what one gains in an exchange the other loses."""
    workers, count = 3, 6
    walk = Walk(count, lr=1.0, slope=lambda rank, x: torch.full_like(x, float(1 << rank)))
    summary = simulate(walk, f"easgd:1,alpha=0.25{bound}", workers, cluster=SPEEDS[speeds])
    total = trained(summary)["x"].item() + sum(point.x.item() for point in walk.points.values())
    assert total == workers + 1 - count * sum(1 << rank for rank in range(workers))  # all are dyadic: exact


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_elasticity_is_shared_by_the_workers(simulate: Any, workers: int) -> None:
    """alpha is 0.9 / N if not given: c <- c + 0.9 mean_i (x_i - c) when all exchange together."""
    slope = lambda rank, x: torch.full_like(x, float(1 + rank))  # noqa: E731
    summary = simulate(Walk(2, lr=1.0, slope=slope), "easgd:1,max_staleness=0", workers)
    mean = statistics.mean(range(1, workers + 1))
    assert trained(summary)["x"].item() == pytest.approx(1 - 0.9 * mean, rel=1e-14)


def test_easgd_with_alpha_0_trains_workers_independently(simulate: Any) -> None:
    walk = Walk(10, slope=lambda rank, x: (1 + rank) * x)
    summary = simulate(walk, "easgd:2,alpha=0", 3, cluster=SPEEDS["heterogeneous"])
    assert trained(summary)["x"].item() == 1
    for rank, point in walk.points.items():
        assert point.x.item() == pytest.approx((1 - 0.1 * (1 + rank)) ** 10, rel=1e-12)


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("factor", "grows"), [(0.95, False), (1.05, True)])
@pytest.mark.parametrize("workers", [1, 4])
def test_easgd_is_stable_up_to_the_predicted_alpha(
    simulate: Any, rate: float, factor: float, grows: bool, workers: int
) -> None:
    """Workers in turn on x^2/2: stable for alpha up to (4 - 2 lr) / (4 - lr), with four to 1.3 % exactly."""
    walk = Walk(200, lr=rate)
    simulate(walk, f"easgd:1,alpha={factor * (4 - 2 * rate) / (4 - rate)}", workers)
    assert walk.grows == grows


def test_synchronous_elastic_averaging_by_hand(simulate: Any) -> None:
    """All differences are to the same centre: c <- c + alpha sum_i (x_i - c)."""
    slope = lambda rank, x: torch.full_like(x, float(1 + rank))  # noqa: E731
    # The first exchange finds no differences, the second those of one step.
    summary = simulate(Walk(2, lr=1.0, slope=slope), "easgd:1,alpha=0.25,max_staleness=0", 3)
    assert trained(summary)["x"].item() == 1 - 0.25 * (1 + 2 + 3)


# --- uphill, at rest, in short floats ---------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", ["async", "async:push_every=3", "dc-asgd:0.5", "gap-aware", "dana-zero", "dana-slim", "ormo"]
)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_stale_update_corrections_support_maximize(simulate: Any, strategy: str, momentum: float) -> None:
    """maximize=True on f is minimizing -f, under every correction."""
    found = []
    for maximize in (False, True):

        def main(maximize: bool = maximize) -> None:
            here = pr.init()
            point = Point(3)
            with torch.no_grad():
                point.x.fill_(1.0)
            optimizer = torch.optim.SGD(
                point.parameters(), lr=0.05, momentum=momentum, weight_decay=0.1, maximize=maximize
            )
            point, optimizer = here.prepare(point, optimizer)
            for _ in range(12):
                gradient = torch.sin(point.x.detach()) * (1 + here.rank)
                point.x.grad = -gradient if maximize else gradient
                optimizer.step()

        found.append(trained(simulate(main, strategy, 4, cluster=SPEEDS["heterogeneous"]))["x"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "strategy", ["dc-asgd:2,adaptive=yes", "gap-aware", "dana-zero", "dana-slim", "ormo"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_warm_up_from_zero_stays_finite(simulate: Any, strategy: str, dtype: torch.dtype) -> None:
    """A rate that begins at 0 moves nothing at first; nothing is divided by that, in no dtype."""

    def main() -> None:
        here = pr.init()
        model = torch.nn.Linear(5, 3, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=0.01)
        model, optimizer = here.prepare(model, optimizer)
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 0.002 * step
            optimizer.zero_grad()
            model(torch.ones(4, 5, dtype=dtype)).square().sum().backward()
            optimizer.step()

    for value in trained(simulate(main, strategy, 4, cluster=SPEEDS["heterogeneous"])).values():
        assert bool(value.isfinite().all())


def test_gap_aware_measures_by_the_momentum(simulate: Any) -> None:
    """The usual step is lr times the root mean square of the momentum that the server's SGD had before."""
    walk = Walk(6, lr=0.5, momentum=0.5, slope=lambda rank, x: torch.full_like(x, float(1 + rank)))
    summary = simulate(walk, "gap-aware", 3, cluster=SPEEDS["heterogeneous"])
    w, b, square = 1.0, 0.0, 0.0
    pulled = dict.fromkeys(range(3), w)
    for count, line in enumerate(pushes(summary), 1):
        worker = line["worker"]
        g = 1.0 + worker
        square = 0.999 * square + 0.001 * (b if count > 1 else g) ** 2
        if line["staleness"]:
            usual = 0.5 * (square / (1 - 0.999**count)) ** 0.5
            g /= 1 + abs(w - pulled[worker]) / usual
        b = 0.5 * b + g
        w = pulled[worker] = w - 0.5 * b
    assert trained(summary)["x"].item() == pytest.approx(w, rel=1e-6)


def test_ordered_momentum_moves_parameters_without_a_gradient(simulate: Any) -> None:
    """Momentum goes on where a push has no gradient: as if the gradient were zero."""

    def walk(absent: bool) -> Tensor:
        def main() -> None:
            here = pr.init()
            model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.float64) for _ in range(2)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
            model, optimizer = here.prepare(model, optimizer)
            for _ in range(6):
                for rank, parameter in enumerate(model):
                    mine = rank == here.rank
                    parameter.grad = torch.ones(2).double() * mine if mine or not absent else None
                optimizer.step()

        return torch.cat(list(trained(simulate(main, "ormo", 2)).values()))

    assert torch.equal(walk(absent=True), walk(absent=False))
