"""Dynamic local steps of asynchronous DiLoCo: H_i = max(1, floor(H v_i / max_j v_j))."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.core.message import Message
from polyrhythm.core.node import Members
from polyrhythm.core.peer import Peer
from polyrhythm.model.shard import Shard
from tests.support.programs import MOMENTUM, SPEEDS, Point, Script, Walk, events, pushes, trained

STEP = 2.0**-6  # seconds; binary fractions, so that virtual time adds up exactly
SLOW_TO_FAST = "".join(
    f'[[hosts]]\ncount = 1\nspeed = {speed}\nstep_time = "{STEP} s"\n' for speed in (1.0, 2.0, 4.0)
)


def chosen(summary: dict[str, Any]) -> dict[int, list[int]]:
    """How many steps each worker chose, as often as it changed."""
    found: dict[int, list[int]] = {}
    for line in events(summary, "local steps"):
        found.setdefault(int(line["node"].split()[1]), []).append(line["steps"])
    return found


def rounds(summary: dict[str, Any], worker: int) -> list[int]:
    """How many steps this worker took for each of its pushes."""
    steps = [line["step"] for line in pushes(summary) if line["worker"] == worker]
    return [b - a for a, b in itertools.pairwise([0, *steps])]


def stroll(*counts: int) -> Callable[[], None]:
    """A script in which each worker takes its own number of steps."""

    def main() -> None:
        here = pr.init()
        point = Point(4)
        point, optimizer = here.prepare(point, torch.optim.SGD(point.parameters(), lr=1e-3))
        for _ in range(counts[here.rank]):
            point.x.grad = torch.ones_like(point.x)
            optimizer.step()

    return main


def steady(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The pushes since the slowest has pushed for the first time, and before one of them has its last."""
    lines = pushes(summary)
    last = {line["worker"]: line["t"] for line in lines}
    first = next(line["t"] for line in lines if line["worker"] == 0)
    return [line for line in lines if first < line["t"] < min(last.values())]


@pytest.mark.parametrize("network", ["", 'bandwidth = "1 Mbit/s"\nlatency = "3 ms"\n'], ids=["free", "slow"])
@pytest.mark.parametrize("servers", [1, 2])
def test_equal_speeds_change_nothing(simulate: Any, network: str, servers: int) -> None:
    """However long they wait for the servers, equally fast workers train as without it, bit for bit."""
    script = Script(optimizer=MOMENTUM, size=90, epochs=3, shuffle=True)
    cluster = f'[[hosts]]\nstep_time = "7.3 ms"\n{network}'
    plain, dynamic = (
        simulate(script, f"delayed-nesterov:5{more}", 3, servers, cluster) for more in ("", ",dynamic=yes")
    )
    assert chosen(dynamic) == {}
    for key in ("digest", "wall_s", "steps", "bytes_sent", "staleness", "metrics"):
        assert plain[key] == dynamic[key], key
    if network:
        assert dynamic["wait_s"] > 0.1 * dynamic["compute_s"]


@pytest.mark.parametrize("servers", [1, 2])
def test_dynamic_steps_make_all_workers_push_equally_often(simulate: Any, servers: int) -> None:
    """Speeds 1:2:4 take H/4, H/2 and H steps, and then each push has missed one of each other worker."""
    strategy = "delayed-nesterov:8,dynamic=yes"
    summary = simulate(stroll(64, 128, 256), strategy, 3, servers, SLOW_TO_FAST)
    assert chosen(summary) == {0: [2], 1: [4]}
    # Only the first push is as late as ever: nobody knows its speed before.
    assert rounds(summary, 0) == [8, *[2] * 28]
    assert rounds(summary, 1) == [8, *[4] * 30] and rounds(summary, 2) == [8] * 32
    lines = steady(summary)
    assert {line["staleness"] for line in lines} == {2}
    for worker in range(3):
        times = [line["t"] for line in lines if line["worker"] == worker]
        assert len(times) > 20 and {b - a for a, b in itertools.pairwise(times)} == {8 * STEP / 4}


def test_without_dynamic_steps_slow_workers_have_higher_staleness(simulate: Any) -> None:
    """The same cluster with the same steps for all: the slowest one's pushes miss six others, and not two."""
    summary = simulate(stroll(64, 128, 256), "delayed-nesterov:8", 3, cluster=SLOW_TO_FAST)
    stale = {
        rank: {line["staleness"] for line in steady(summary) if line["worker"] == rank} for rank in range(3)
    }
    assert stale == {0: {6}, 1: {2, 3}, 2: {0, 1, 2}}


@pytest.mark.parametrize(("speed", "steps"), [(0.01, 1), (0.24, 1), (0.26, 2), (0.99, 7)])
def test_dynamic_step_count_is_the_floored_speed_share_at_least_one(
    simulate: Any, speed: float, steps: int
) -> None:
    """floor, and never less than one step."""
    cluster = f"[[hosts]]\ncount = 1\nspeed = {speed}\n[[hosts]]"
    summary = simulate(stroll(16, 2000), "delayed-nesterov:8,dynamic=yes", 2, cluster=cluster)
    assert chosen(summary) == {0: [steps]}


@pytest.mark.parametrize("speeds", SPEEDS)
def test_dynamic_step_count_follows_the_measured_speed_share(simulate: Any, speeds: str) -> None:
    """Whatever the distribution: the number of steps is that of the share, and of the steps taken."""
    strategy = "delayed-nesterov:6,dynamic=yes"
    summary = simulate(Walk(60, lr=0.01), strategy, 4, cluster=SPEEDS[speeds])
    for line in events(summary, "local steps"):
        assert 0 < line["share"] <= 1
        assert line["steps"] == max(1, int(6 * line["share"] + 1e-6))
    for worker in range(4):
        taken = rounds(summary, worker)
        assert sum(taken) == 60 and max(taken) <= 6 and taken[0] == 6
    again = simulate(Walk(60, lr=0.01), strategy, 4, cluster=SPEEDS[speeds])
    assert again["digest"] == summary["digest"] and chosen(again) == chosen(summary)


def test_a_worker_that_slows_down_takes_fewer_dynamic_steps(simulate: Any) -> None:
    """Four times slower from 1 s to 3 s: a quarter of the steps meanwhile, and all of them afterwards."""
    cluster = f"""
        [[hosts]]
        step_time = "{STEP} s"
        [[stragglers]]
        workers = [1]
        from = "1 s"
        to = "3 s"
        slowdown = 4.0
    """
    summary = simulate(Walk(400, lr=1e-3), "delayed-nesterov:8,dynamic=yes", 2, cluster=cluster)
    assert chosen(summary) == {1: [2, 8]}
    slow = [line["t"] for line in events(summary, "local steps")]
    assert 1 < slow[0] < 1 + 8 * 4 * STEP + STEP and 3 < slow[1] < 3 + 3 * 8 * STEP


def test_the_whole_run_slows_down_together(simulate: Any) -> None:
    """Only how fast others are counts: if all are slower by the same, nobody changes anything."""
    cluster = f'[[hosts]]\nname="all"\nstep_time = "{STEP} s"\n[[stragglers]]\nhost="all"\nslowdown = 4.0\n'
    assert chosen(simulate(Walk(64), "delayed-nesterov:8,dynamic=yes", 3, cluster=cluster)) == {}


CRASH = '\n[[failures]]\nworkers = [2]\nat = "1.05 s"\n'


@pytest.mark.parametrize("servers", [1, 2])
def test_dynamic_steps_ignore_the_speed_of_a_dead_worker(simulate: Any, servers: int) -> None:
    """The fastest dies: then the next one is the fastest, and the last takes half its steps."""
    script = stroll(200, 400, 800)
    summary = simulate(script, "delayed-nesterov:8,dynamic=yes", 3, servers, SLOW_TO_FAST + CRASH)
    assert chosen(summary) == {0: [2, 4], 1: [4, 8]}


@pytest.mark.parametrize("servers", [1, 2])
def test_dynamic_steps_adapt_again_when_the_fastest_worker_returns(simulate: Any, servers: int) -> None:
    """The fastest is gone from 1.05 s to 2.1 s; after its first push the others give way again."""
    cluster = SLOW_TO_FAST + CRASH + 'back = "2.1 s"\n'
    script = stroll(200, 400, 800)
    summary = simulate(script, "delayed-nesterov:8,dynamic=yes", 3, servers, cluster)
    assert chosen(summary) == {0: [2, 4, 2], 1: [4, 8, 4]}
    given_way = [line["t"] for line in events(summary, "local steps") if line["node"] == "worker 1"][2]
    first = next(line["t"] for line in pushes(summary) if line["worker"] == 2 and line["t"] > 2.1)
    assert first == pytest.approx(2.1 + 8 * STEP / 4) and first <= given_way <= first + 8 * STEP / 2


def test_dynamic_steps_forget_the_speed_of_a_previous_life(simulate: Any) -> None:
    """What a worker could do in its last life nobody holds against the others."""
    cluster = f"""
        [[hosts]]
        step_time = "{STEP} s"
        [[stragglers]]
        workers = [0]
        slowdown = 0.25
        to = "1 s"
        [[failures]]
        workers = [0]
        at = "1.05 s"
        back = "1.06 s"
    """
    summary = simulate(Walk(120, lr=1e-3), "delayed-nesterov:8,dynamic=yes", 2, cluster=cluster)
    assert chosen(summary)[1] == [2, 8] and rounds(summary, 1)[-1] == 8


def test_dynamic_steps_do_not_count_consensus_as_compute_time(simulate: Any) -> None:
    """A worker that often waits to look at the servers' parameters is not taken for a slow one."""

    def main() -> None:
        here = pr.init()
        point = torch.nn.Linear(4, 1)
        point, optimizer = here.prepare(point, torch.optim.SGD(point.parameters(), lr=0.01))
        for _ in range(40):
            point(torch.ones(4)).sum().backward()
            optimizer.step()
            if here.rank == 1:
                here.consensus()

    cluster = '[[hosts]]\nlatency = "20 ms"\n'
    assert chosen(simulate(main, "delayed-nesterov:8,dynamic=yes", 2, cluster=cluster)) == {}


def test_server_reports_the_latest_speed_of_the_fastest_live_worker() -> None:
    """The latest of each counts, not the best; one that left counts no longer, and who asks always does."""
    model = torch.nn.Linear(2, 2)
    shard = Shard(model, torch.optim.SGD(model.parameters()), 0, 1)
    node = SimpleNamespace(rank=0, members=Members())
    server: Any = pr.parse("delayed-nesterov:8,dynamic=yes").server(node, shard)  # type: ignore[arg-type]

    def push(rank: int, speed: float) -> Message:
        return Message(Peer("worker", rank), "push", 1, {"speed": speed})

    for rank, speed in [(0, 1.0), (1, 9.0), (1, 4.0)]:
        server.on_request(push(rank, speed))
    assert server.extras(push(0, 1.0)) == {"fastest": 4.0}
    server.forget(1)
    assert server.extras(push(0, 1.0)) == {"fastest": 1.0}
    server.on_request(Message(Peer("worker", 0), "pull", 2))
    assert server.extras(push(3, 0.5)) == {"fastest": 0.5}


def test_dynamic_steps_with_period_1_change_nothing(simulate: Any) -> None:
    """There is nothing to shorten, and nothing changes."""
    digests = [
        simulate(Walk(20), f"delayed-nesterov:1{more}", 3, cluster=SLOW_TO_FAST)["digest"]
        for more in ("", ",dynamic=yes")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_slow_real_worker_takes_fewer_dynamic_steps(tmp_path: Any) -> None:
    """On real processes, one that sleeps in every step takes fewer of them between its pushes."""

    def main() -> None:
        import time

        here = pr.init()
        model = torch.nn.Linear(4, 1)
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(600 if here.rank else 16):
            model(torch.ones(4)).sum().backward()
            time.sleep(0.002 if here.rank else 0.04)
            optimizer.step()

    summary = pr.run(main, workers=2, strategy="delayed-nesterov:8,dynamic=yes", runs=tmp_path, threads=1)
    taken = rounds(summary, 0)
    assert taken[0] == 8 and sum(taken) == 16 and max(taken[1:]) < 8
    assert set(trained(summary)) == {"weight", "bias"}
