"""The laws of the parameter-server family, exact where they are exact; in simulation, so that time is too."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value, few
from tests.support.programs import (
    ADAM,
    MOMENTUM,
    NESTEROV,
    SGD,
    SPEEDS,
    Script,
    Steps,
    Walk,
    alone,
    distance,
    events,
    pushes,
    same,
    trained,
)

EXPONENTIAL = '[[hosts]]\nstep_time = { exponential = "1 s" }'


# --- the ends of the scale --------------------------------------------------------------------------


@each_value(
    ("servers", [1, 3]),
    (
        "optimizer",
        [pytest.param(SGD, id="sgd"), pytest.param(NESTEROV, id="nesterov"), pytest.param(ADAM, id="adam")],
    ),
    ("other", ["ssp:0", "backup:0", "async:max_staleness=0"]),
)
def test_server_strategies_without_slack_equal_sync(
    simulate: Any, other: str, servers: int, optimizer: Any
) -> None:
    """s = 0, no spare workers: the same bits as hard synchronous training, at any mix of speeds."""
    script = Script(optimizer=optimizer, size=50, shuffle=True, schedule=True)
    one, two = (
        simulate(script, each, 4, servers, SPEEDS["heterogeneous"])["digest"] for each in ("sync", other)
    )
    assert one == two


@each_value(
    ("speeds", SPEEDS),
    ("servers", [1, 2]),
    ("other", ["ssp:inf", "softsync:1", "dc-asgd:0", "async:weight=exp,damping=0"]),
)
def test_server_strategies_without_bounds_equal_async(
    simulate: Any, other: str, servers: int, speeds: str
) -> None:
    """s = inf, groups of one, no correction: the same bits as asynchronous training."""
    script = Script(optimizer=MOMENTUM, size=101, batch=2, shuffle=True)
    one, two = (simulate(script, each, 5, servers, SPEEDS[speeds])["digest"] for each in ("async", other))
    assert one == two


def test_softsync_of_all_is_sync_only_if_it_waits(simulate: Any) -> None:
    """S = N is synchronous if a pull waits for the next version; otherwise N-1 of N are one version old."""
    steps = Walk(12)
    digests = [
        simulate(steps, strategy, 4)["digest"] for strategy in ("sync", "softsync:4,pull=next-version")
    ]
    assert digests[0] == digests[1]
    stale = Counter(line["staleness"] for line in pushes(simulate(steps, "softsync:4", 4))[4:])
    assert stale == {0: 11, 1: 33}


# --- staleness --------------------------------------------------------------------------------------


@each_value(("group", [1, 2, 4, 8]), ("speeds", SPEEDS))
def test_softsync_staleness_is_conserved(simulate: Any, group: int, speeds: str) -> None:
    """Staleness applied plus age in flight is (N-1) versions, so its mean is (N-1)/S, at any speeds."""
    workers = 8
    summary = simulate(Steps(400), f"softsync:{group}", workers, cluster=SPEEDS[speeds])
    logged = {(line["worker"], line["sequence"]): line for line in pushes(summary)}
    pulled = dict.fromkeys(range(workers), 0)
    version = count = total = 0
    for line in events(summary, "deliver", "leave"):
        if line["event"] == "leave":
            break  # from here on groups are smaller
        if line["kind"] == "push":
            worker = int(line["sender"].split()[1])
            assert logged[worker, line["sequence"]]["staleness"] == version - pulled[worker]
            total += version - pulled[worker]
            count += 1
            version = count // group
            pulled[worker] = version
    assert total + sum(version - each for each in pulled.values()) == (workers - 1) * version
    assert total / count == pytest.approx((workers - 1) / group, rel=0.05)


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("servers", [1, 2])
def test_nothing_too_stale_is_applied(simulate: Any, cut: int, servers: int) -> None:
    """With discard=R every staleness applied is below R, every one dropped is not, and nothing gets lost."""
    steps = Steps(60, size=4)
    summary = simulate(steps, f"async:discard={cut}", 6, servers, SPEEDS["heterogeneous"])
    assert summary["staleness"]["max"] < cut
    for server in range(servers):
        lines = pushes(summary, server)
        used = [line["staleness"] for line in lines if line["event"] == "apply"]
        dropped = [line["staleness"] for line in lines if line["event"] == "drop"]
        assert max(used) < cut <= min(dropped)
        assert len(used) + len(dropped) == 6 * 60
    assert summary["dropped"] == sum(
        line["event"] == "drop" for server in range(servers) for line in pushes(summary, server)
    )


def test_async_weight_exp_damps_stale_updates_exponentially(simulate: Any) -> None:
    """With weight=exp an update of staleness tau moves the parameters by exp(-damping tau)."""
    summary = simulate(Steps(10), "async:weight=exp,damping=0.5", 3)
    moved = sum(math.exp(-0.5 * line["staleness"]) for line in pushes(summary))
    assert trained(summary)["x"].item() == pytest.approx(-moved, rel=1e-12)


@pytest.mark.parametrize(("reduce", "moved"), [("mean", 20), ("sum", 40)])
def test_softsync_takes_the_mean_or_the_sum(simulate: Any, reduce: str, moved: int) -> None:
    """A group of two moves the parameters by one gradient, or by two."""
    for pull in ("at-once", "next-version"):
        summary = simulate(Steps(10), f"softsync:2,reduce={reduce},pull={pull}", 4)
        assert trained(summary)["x"].item() == -moved


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
@pytest.mark.parametrize(("factor", "grows"), [(0.97, False), (1.03, True)])
def test_a_fixed_delay_bounds_the_rate(simulate: Any, delay: int, factor: float, grows: bool) -> None:
    """Workers of equal speed see x delay by N-1 updates: stable iff lr h < 2 sin(pi / (2 (2 tau + 1)))."""
    walk = Walk(600 // (delay + 1), lr=factor * 2 * math.sin(math.pi / (2 * (2 * delay + 1))))
    simulate(walk, "async", delay + 1)
    assert walk.grows == grows


@pytest.mark.slow
def test_random_delays_are_momentum_in_the_mean(simulate: Any) -> None:
    """Whose gradient comes next is anybody's guess: then the mean follows heavy ball with mu = 1 - 1/N, lr/N.

    E w(t+1) - E w(t) = (1 - 1/N) (E w(t) - E w(t-1)) - lr h/N E w(t). With a fixed delay it does not.
    """
    workers, updates, rate, runs = 5, 30, 0.3, 250
    ball = [1.0, 1.0 - rate]
    while len(ball) <= updates:
        ball.append(ball[-1] + (1 - 1 / workers) * (ball[-1] - ball[-2]) - rate / workers * ball[-1])

    def trajectory(cluster: str, seed: int) -> Tensor:
        """w after each update, as the worker that made it sees it."""
        walk = Walk(20, lr=rate)  # more than anybody makes of the first updates
        simulate(walk, "async", workers, cluster=cluster, seed=seed)
        return torch.cat([x for _, x in walk.seen[workers:]])[:updates]

    expected = torch.tensor(ball[1:], dtype=torch.float64)
    found = torch.stack([trajectory(EXPONENTIAL, seed) for seed in range(runs)])
    error = (found.mean(0) - expected).abs() / (found.std(0) / runs**0.5 + 1e-12)
    assert error.max().item() < 4.5
    assert (trajectory("", 0) - expected).abs().max().item() > 0.5


# Largest stable lr * h on a quadratic with momentum 0.9 and 8 workers in turn.
LIMITS = {"async": 0.0158, "dana-zero": 0.0971, "dana-slim": 0.0971}


@pytest.mark.parametrize("strategy", LIMITS)
@pytest.mark.parametrize(("factor", "grows"), [(0.9, False), (1.1, True)])
def test_momentum_bounds_the_rate(simulate: Any, strategy: str, factor: float, grows: bool) -> None:
    """One momentum buffer on the server makes asynchrony unstable six times sooner than DANA does."""
    walk = Walk(250, lr=factor * LIMITS[strategy], momentum=0.9)
    simulate(walk, strategy, 8)
    assert walk.grows == grows


def test_dana_trains_where_one_buffer_diverges(simulate: Any) -> None:
    """N = 8, mu = 0.9, the same rate: with one server momentum x explodes, with DANA it comes to rest."""
    last = {}
    for strategy in LIMITS:
        walk = Walk(200, lr=0.05, momentum=0.9)
        simulate(walk, strategy, 8)
        last[strategy] = walk.seen[-1][1].abs().item()
    assert last["async"] > 1e6 and last["dana-zero"] < 1e-2 and last["dana-slim"] < 1e-2


# --- stale-synchronous ------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1, 3, 8])
@pytest.mark.parametrize("servers", [1, 2])
def test_ssp_shows_all_old_updates_and_all_of_ones_own(simulate: Any, bound: int, servers: int) -> None:
    """At clock c a worker sees every update of the others up to clock c-s-1, and all of its own."""
    workers, count = 4, 40
    # Coordinate i counts the updates of worker i.
    slope = lambda rank, x: torch.eye(workers, dtype=torch.float64)[rank]  # noqa: E731
    walk = Walk(count, lr=1.0, size=workers, slope=slope)
    simulate(walk, f"ssp:{bound}", workers, servers, SPEEDS["heterogeneous"])
    clocks: Counter[int] = Counter()
    reached = 0
    for rank, x in walk.seen:
        counts = [1 - value for value in x.tolist()]
        assert counts[rank] == clocks[rank]
        # One that has finished no longer holds anybody back.
        assert all(each >= min(clocks[rank] - bound, count) for each in counts)
        reached = max(reached, clocks[rank] - min(counts))
        clocks[rank] += 1
    assert reached == bound


def test_a_bound_has_no_price_without_stragglers(simulate: Any) -> None:
    """Equal speeds never come to the bound: the run takes as long as an asynchronous one."""
    times = [simulate(Steps(20), each, 4)["wall_s"] for each in ("async", "ssp:1")]
    assert times[0] == times[1]


# --- backup workers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_backups_use_the_first_and_drop_the_rest(simulate: Any, spare: int, servers: int) -> None:
    """Staleness is 0, each version is made of N of N+b, and used + dropped = produced."""
    workers = 6
    summary = simulate(Steps(40, size=5), f"backup:{spare}", workers, servers, SPEEDS["exponential"])
    for server in range(servers):
        lines = pushes(summary, server)
        used = [line for line in lines if line["event"] == "apply"]
        assert all(line["staleness"] == 0 for line in used)
        assert len(lines) == workers * 40
        sizes = Counter(line["version"] for line in used)
        early = [sizes[version] for version in sorted(sizes)[:20]]
        assert set(early) == {workers - spare}
        assert trained(summary)["x"][server].item() == -len(sizes)
    if spare == 0:
        assert summary["dropped"] == 0


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


@pytest.mark.slow
@few("needed, spare", [(6, 2), (8, 0), (4, 4)], quick=1)
def test_first_backup_round_takes_the_expected_order_statistic(
    simulate: Any, needed: int, spare: int
) -> None:
    """When all begin together, exponential steps make a round last H_{N+b} - H_b."""
    workers = needed + spare
    times = []
    for seed in range(300):
        summary = simulate(Steps(1), f"backup:{spare}", workers, cluster=EXPONENTIAL, seed=seed)
        times.append(min(line["t"] for line in pushes(summary) if line["event"] == "apply"))
    expected = harmonic(workers) - harmonic(spare)
    assert statistics.mean(times) == pytest.approx(expected, abs=4 * statistics.stdev(times) / 300**0.5)


@few("needed, spare", [(6, 2), (8, 0)], quick=0)
def test_later_backup_rounds_take_longer_as_late_workers_finish(
    simulate: Any, needed: int, spare: int
) -> None:
    """A late worker is not interrupted: it finishes its step for nothing. That makes later rounds longer."""
    workers = needed + spare

    @cache
    def left(arrived: int, late: int) -> float:
        """The mean time to the end of a round, when so many have arrived and so many are still late."""
        if arrived == needed:
            return 0.0
        busy = workers - arrived
        fresh = busy - late
        return (1 + fresh * left(arrived + 1, late) + (late * left(arrived, late - 1) if late else 0)) / busy

    summary = simulate(Steps(1500), f"backup:{spare}", workers, cluster=EXPONENTIAL)
    applied = [line for line in pushes(summary) if line["event"] == "apply"]
    rounds = sorted({line["version"]: line["t"] for line in applied}.values())[:1200]
    assert (rounds[-1] - rounds[0]) / 1199 == pytest.approx(left(0, spare), rel=0.04)
    assert left(0, 0) == pytest.approx(harmonic(workers) - harmonic(spare))


# --- Downpour ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 4])
def test_downpour_of_one_worker_is_sequential(simulate: Any, every: int) -> None:
    """One worker's local steps and the server's steps by the sum agree: plain SGD, up to rounding."""
    script = Script(size=22, groups=True, schedule=False)
    strategy = f"async:push_every={every},fetch_every={every}"
    assert distance(trained(simulate(script, strategy, 1)), alone(script)) < 1e-13


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (4, 4), (1, 4), (4, 1), (3, 2)])
def test_downpour_push_and_fetch_periods_reduce_the_bytes(simulate: Any, push: int, fetch: int) -> None:
    """Every gradient arrives, in a push of `push_every` steps; parameters come every `fetch_every`."""
    summary = simulate(Steps(24), f"async:push_every={push},fetch_every={fetch}", 3)
    assert trained(summary)["x"].item() == -72
    assert len(pushes(summary)) == 3 * 24 / push
    assert summary["bytes_sent"] == 8 * (1 + 3 + 3 * 24 / push + 3 * 24 / fetch + 1)


def test_downpour_pushes_remaining_steps_at_the_end(simulate: Any) -> None:
    """Steps that do not fill a push are pushed when the worker is done."""
    assert trained(simulate(Steps(10), "async:push_every=4,fetch_every=4", 3))["x"].item() == -30


# --- prefetch ---------------------------------------------------------------------------------------


def test_prefetch_costs_a_step_of_staleness(simulate: Any) -> None:
    """What a worker computes on is one of its own steps older, and the log says so."""
    for workers in (1, 3):
        plain, ahead = (
            [line["staleness"] for line in pushes(simulate(Steps(20), strategy, workers))]
            for strategy in ("async", "async:prefetch=yes")
        )
        assert plain[-1] == workers - 1 and ahead[-1] == 2 * workers - 1


def test_prefetch_computes_on_the_answer_before_last(simulate: Any) -> None:
    """Alone: w(t+1) = w(t) - lr g(w(t-1)): the next batch is computed before the answer is there."""
    walk = Walk(8, lr=0.25)
    summary = simulate(walk, "async:prefetch=yes", 1)
    seen = [x.item() for _, x in walk.seen]
    law = [1.0, 1.0]
    while len(law) < 9:
        law.append(law[-1] - 0.25 * law[-2])
    assert seen[:8] == law[:8]
    assert trained(summary)["x"].item() == law[8] - 0.25 * law[7]


def test_prefetch_hides_the_round_trip(simulate: Any) -> None:
    """A round trip of 8 ms beside steps of 10 ms costs nothing, but for the last one."""
    cluster = '[[hosts]]\nstep_time = "10 ms"\nlatency = "4 ms"'
    waits = [simulate(Steps(50), s, 2, cluster=cluster)["wait_s"] for s in ("async", "async:prefetch=yes")]
    assert waits[0] == pytest.approx(2 * 50 * 0.008)
    assert waits[1] == pytest.approx(0, abs=1e-9)


# --- the server's optimizer -------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("size", [48, 50])
def test_servers_clip_the_whole_mean(simulate: Any, servers: int, size: int) -> None:
    """`sync:clip=c` on any number of servers is `allreduce` with clip_grad_norm_(c) in the script."""
    plain = Script(optimizer=MOMENTUM, size=size)
    clipped = Script(optimizer=MOMENTUM, size=size, clip=0.2)
    one = trained(simulate(clipped, "allreduce", 3))
    two = trained(simulate(plain, "sync:clip=0.2", 3, servers))
    assert distance(one, two) < 1e-12
    assert distance(one, trained(simulate(plain, "sync", 3))) > 1e-3


@pytest.mark.parametrize("servers", [1, 3])
def test_servers_clip_each_push_as_its_worker_would(simulate: Any, servers: int) -> None:
    """Where each push is an update, `clip` is what clip_grad_norm_ in the script is."""
    one = simulate(Script(size=50, clip=0.2), "async", 3, servers, SPEEDS["heterogeneous"])
    two = simulate(Script(size=50), "async:clip=0.2", 3, servers, SPEEDS["heterogeneous"])
    assert distance(trained(one), trained(two)) < 1e-12


def test_groups_of_different_shards_are_clipped_together(simulate: Any) -> None:
    """Soft groups of several servers are the same: every update is as long as it may be, and the run ends."""
    slope = lambda rank, x: torch.full_like(x, 3.0)  # noqa: E731
    summary = simulate(
        Walk(20, lr=1.0, size=4, slope=slope),
        "softsync:2,pull=next-version,clip=1",
        5,
        2,
        SPEEDS["heterogeneous"],
    )
    moved = 1 - trained(summary)["x"]
    groups = [
        [(line["version"], line["worker"], line["staleness"]) for line in pushes(summary, server)]
        for server in range(2)
    ]
    assert groups[0] == groups[1]
    # The gradient (3, 3, 3, 3) has norm 6 and is scaled to norm 1: every element moves by a half.
    assert moved.tolist() == pytest.approx([0.5 * groups[0][-1][0]] * 4, rel=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.Adagrad, lr=0.05),
        partial(torch.optim.RMSprop, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        partial(torch.optim.NAdam, lr=0.01),
        partial(torch.optim.Rprop, lr=0.01),
    ],
    ids=["adagrad", "rmsprop", "adamw", "nadam", "rprop"],
)
@pytest.mark.parametrize("servers", [1, 3])
def test_any_optimizer_works_on_the_server(simulate: Any, optimizer: Any, servers: int) -> None:
    """Decay is applied once and schedules reach the server: `sync` is one machine with the union batch."""
    script = Script(optimizer=optimizer, groups=False, schedule=True)
    union = Script(optimizer=optimizer, groups=False, schedule=True, batch=12)
    assert distance(trained(simulate(script, "sync", 3, servers)), alone(union)) < 1e-9


class Turns(torch.nn.Module):
    """Two layers that take turns, so that now the one and now the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 3) for _ in range(3)]).double()
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += self.training
        every = self.layers[0](x)
        return every + self.layers[1 + self.turn % 2](x) if self.turn > 4 else every


@pytest.mark.parametrize("optimizer", [MOMENTUM, NESTEROV, ADAM], ids=["momentum", "nesterov", "adam"])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_server_merging_and_splitting_tensors_does_not_change_results(
    simulate: Any, optimizer: Any, servers: int
) -> None:
    """A server treats parameters as one while the same ones have gradients; when not, it parts them."""
    script = Script(model=Turns, optimizer=optimizer, size=60, epochs=1, set_to_none=True)
    with torch.random.fork_rng():
        expected = alone(script)
    assert same(trained(simulate(script, "async", 1, servers)), expected)


def test_a_server_steps_on_few_tensors() -> None:
    """A model of many tensors is one tensor to the optimizer of its server, for each group and dtype."""
    from polyrhythm.model.shard import Shard

    model = torch.nn.ParameterList([torch.zeros(3) for _ in range(100)])
    groups = [{"params": list(model)[:40]}, {"params": list(model)[40:], "lr": 0.2}]
    shard = Shard(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), 0, 1)
    settings = [{"lr": 0.1}, {"lr": 0.2}]
    with torch.no_grad():
        shard.apply([torch.ones(300)], [], settings)
        assert [len(group["params"]) for group in shard.optimizer.param_groups] == [1, 1]
        shard.apply([torch.ones(300)], [7], settings)
        assert [len(group["params"]) for group in shard.optimizer.param_groups] == [40, 60]
        first = shard.optimizer.param_groups[0]["params"][0]
        shard.apply([torch.ones(300)], [], settings)
        assert shard.optimizer.param_groups[0]["params"][0] is first  # parted once, and not for each push
    moved = -shard.parameters[0].view(100, 3)[:, 0]
    assert moved[0].item() == pytest.approx(0.1 * (1 + 1.9 + 2.71))
    assert moved[7].item() == pytest.approx(0.1 * (1 + 1.9))
    assert moved[99].item() == pytest.approx(0.2 * (1 + 1.9 + 2.71))


# --- the dead and several servers -------------------------------------------------------------------


@each_value(
    (
        "strategy",
        [
            "async",
            "ssp:1",
            "softsync:0",
            "softsync:3",
            "softsync:3,pull=next-version",
            "backup:1",
            "backup:2",
            "softsync:2,pull=next-version,clip=0.1",
            "backup:1,clip=0.1",
            "dana-zero",
            "ormo",
            "easgd:2",
            "delayed-nesterov:2",
            "async:prefetch=yes",
            "softsync:2,discard=2",
        ],
    ),
    ("servers", [2, 3]),
)
@few("seeds", [range(1), range(1, 6)], quick=1)
def test_server_strategies_finish_despite_random_deaths_and_returns(
    simulate: Any, strategy: str, servers: int, seeds: range
) -> None:
    """Random deaths and returns, slow links, servers that hear of all at other times: no run gets stuck."""
    for seed in seeds:
        chance = random.Random(f"{strategy}/{servers}/{seed}")
        cluster = (
            '[[hosts]]\nstep_time = { exponential = "10 ms" }\nbandwidth = "1 Mbit/s"\nlatency = "1 ms"\n'
        )
        for worker in chance.sample(range(5), 3):
            at = chance.uniform(5, 150)
            cluster += f'[[failures]]\nworkers = [{worker}]\nat = "{at:.3f} ms"\n'
            if chance.random() < 0.5:
                cluster += f'back = "{at + chance.uniform(1, 80):.3f} ms"\n'
        script = Script(size=60, batch=2, epochs=2)
        summary = simulate(script, strategy, 5, servers, cluster, seed=seed)
        assert summary["samples"] >= 120 and summary["batches_undone"] == 0
        for server in range(servers):
            done = [(line["worker"], line["sequence"]) for line in pushes(summary, server)]
            assert len(set(done)) == len(done)


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("softsync:9", "wait_for is 9 but there are 4 workers; use at most 4"),
        ("softsync:-1", "wait_for must be 0"),
        ("ssp:-1", "ssp:-1: max_staleness must be a whole number, 0 or more, or inf"),
        ("ssp:0.5", "max_staleness must be a whole number"),
        ("softsync:2,pull=next-version,max_staleness=1", "would wait for each other"),
        ("softsync:2,clip=1", "leave out clip, add pull=next-version, or use one server"),
        ("sync:wait_for=2", "wait_for cannot be set here; sync has: clip, prefetch"),
        ("backup:1,prefetch=yes", "prefetch cannot be set here; backup has: clip, spare"),
        ("dana-slim:discard=3", "discard cannot be set here"),
        ("dana-zero:max_staleness=0", "use a max_staleness of 1 or more"),
        ("dc-asgd:prefetch=yes", "prefetch cannot be set here"),
        ("dc-asgd:1,decay=0.5", "decay needs adaptive=yes"),
        ("async:damping=0.5", "damping needs weight=exp"),
        ("async:fetch_every=4,discard=3", "leave out fetch_every"),
        ("ssp:nan", "max_staleness takes a number, not 'nan'"),
        ("async:weight=2/tau", "weight takes 1 or 1/tau or exp, not '2/tau'"),
        ("async:weight=exp,damping=-1", "damping must be 0 or more"),
        ("async:discard=0", "discard must be 1 or more"),
        ("async:discard=1.5", "discard must be a whole number"),
        ("async:clip=0", "clip must be above 0"),
        ("async:push_every=0", "push_every and fetch_every must be 1 or more"),
        ("async:prefetch=yes,push_every=2", "leave out push_every"),
        ("backup:4", "use at most 3"),
        ("backup:-1", "spare must be 0 or more"),
        ("backup:1,wait_for=2", "wait_for cannot be set here"),
        ("dc-asgd:-1", "lam must be 0 or more"),
        ("dc-asgd:1,adaptive=yes,decay=1", "decay must be at least 0 and below 1"),
        ("ormo:wait_for=2", "wait_for cannot be set here"),
        ("delayed-nesterov:0", "period must be 1 or more"),
        ("delayed-nesterov:lr=0", "lr must be a finite number above 0"),
        ("easgd:0", "period must be 1 or more"),
        ("easgd:alpha=-1", "alpha must be 0 or more"),
        ("easgd:weight=1/tau", "weight cannot be set here; easgd has: max_staleness, period, alpha"),
    ],
)
def test_server_strategies_refuse_invalid_settings_before_starting(strategy: str, message: str) -> None:
    def never() -> None:
        raise AssertionError("the script was started")

    for how in (pr.run, pr.simulate):
        with pytest.raises(UsageError) as caught:
            how(never, workers=4, servers=2, strategy=strategy, runs=None)
        assert message in str(caught.value)


@pytest.mark.parametrize("strategy", ["gap-aware", "dana-zero", "dana-slim", "ormo"])
def test_sgd_corrections_refuse_other_optimizers_and_dampening(simulate: Any, strategy: str) -> None:
    with pytest.raises(UsageError, match=r"needs torch\.optim\.SGD, but this script uses Adam"):
        simulate(Script(optimizer=ADAM), strategy, 2)
    if strategy != "gap-aware":
        damped = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
        with pytest.raises(UsageError, match="has no dampening"):
            simulate(Script(optimizer=damped), strategy, 2)
    if strategy == "ormo":
        with pytest.raises(UsageError, match="supports plain momentum only"):
            simulate(Script(optimizer=NESTEROV), strategy, 2)


def test_steps_between_pushes_need_a_rate(simulate: Any) -> None:
    class Nameless(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            for group in self.param_groups:
                group["rate"] = group.pop("lr")

    with pytest.raises(UsageError, match="steps with the optimizer's lr, but this optimizer has none"):
        simulate(Script(optimizer=Nameless), "async:push_every=2", 2)


def test_optimizers_that_need_a_closure_are_refused(simulate: Any) -> None:
    with pytest.raises(UsageError, match="LBFGS calls a closure several times per step"):
        simulate(Script(optimizer=partial(torch.optim.LBFGS, lr=0.1)), "async", 2)


def test_a_run_refuses_more_servers_than_parameters(simulate: Any) -> None:
    with pytest.raises(UsageError, match="3 servers for 2 parameters"):
        simulate(Steps(1, size=2), "ssp", 2, 3)
