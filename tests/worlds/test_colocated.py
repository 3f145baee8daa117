"""One server beside each worker: what its links carry, how long a step takes, and the same bits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import arrivals

import polyrhythm as pr
from polyrhythm.worlds.cluster import Cluster
from polyrhythm.worlds.cost_model import CostModel
from tests.support.programs import Script, Steps, events
from tests.support.runs import run_in

B, STEP = 1024, 1.0  # bytes per second and seconds that floats hold exactly
HOSTS = f'[[hosts]]\nstep_time = "{STEP:g} s"\nbandwidth = "{B} B/s"\n'
SERVERS = f'[servers]\nbandwidth = "{B} B/s"\n'
COUNTS = [2, 3, 4, 8]


@pytest.fixture
def simulate_sync(tmp_path: Path) -> Callable[..., Any]:
    def simulated(program: Any, workers: int, servers: Any, cluster: str = HOSTS) -> Any:
        return run_in(
            "simulated",
            program,
            strategy="sync",
            workers=workers,
            servers=servers,
            cluster=cluster,
            runs=tmp_path,
        )

    return simulated


def durations(summary: dict[str, Any]) -> set[float]:
    """How long each step of each worker took, but the first, which begins when the parameters are there."""
    moments: dict[str, list[float]] = {}
    for event in events(summary, "step"):
        moments.setdefault(event["node"], []).append(event["t"])
    return {later - earlier for each in moments.values() for earlier, later in pairwise(each)}


def weights(workers: int) -> tuple[int, int]:
    """A number of parameters that all servers have equal parts of, and its bytes."""
    return 128 * workers, 8 * 128 * workers


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """The bytes that each link carries up and down, by its index."""
    count: Counter[tuple[str, int]] = Counter()
    depart, land = CostModel.start_transfer, CostModel.end_transfer

    def up(self: CostModel, source: tuple[str, int], target: tuple[str, int], nbytes: int, now: float) -> Any:
        count["up", self._offset[source[0]] + source[1]] += nbytes
        return depart(self, source, target, nbytes, now)

    def down(self: CostModel, target: tuple[str, int], nbytes: int, head: float, span: float) -> Any:
        count["down", self._offset[target[0]] + target[1]] += nbytes
        return land(self, target, nbytes, head, span)

    monkeypatch.setattr(CostModel, "start_transfer", up)
    monkeypatch.setattr(CostModel, "end_transfer", down)
    return count


# The law: 2(N-1)/N |w| per node and step, as with all-reduce


@pytest.mark.parametrize("workers", COUNTS)
def test_a_step_takes_as_long_as_an_all_reduce(
    simulate_sync: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    """Exactly t + 2(N-1)/N |w|/B: all links are busy both ways from the first byte to the last.

    First every uplink carries pushes, while every downlink takes in others'; then the same with answers.
    """
    size, w = weights(workers)
    law = STEP + 2 * (workers - 1) * (w // workers) / B
    assert durations(simulate_sync(Steps(4, size=size), workers, "colocated")) == {law}
    assert STEP + place(tmp_path, HOSTS, workers).all_reduce(range(workers), w) == law


@pytest.mark.parametrize("workers", COUNTS)
def test_servers_of_their_own_take_longer(simulate_sync: Callable[..., Any], workers: int) -> None:
    """N dedicated servers: t + 2 |w|/B, for no part stays at home. One: t + (N+1) |w|/B.

    One server answers the workers one after the other, N |w|/B for all. Meanwhile those that have their
    answer step and push; only the push of the last one comes after it.
    """
    size, w = weights(workers)
    steps = Steps(4, size=size)
    assert durations(simulate_sync(steps, workers, workers, HOSTS + SERVERS)) == {STEP + 2 * w / B}
    assert durations(simulate_sync(steps, workers, 1, HOSTS + SERVERS)) == {STEP + (workers + 1) * w / B}


@pytest.mark.parametrize("workers", COUNTS)
def test_colocated_servers_balance_the_bytes_on_all_links(
    simulate_sync: Callable[..., Any], carried: Counter[tuple[str, int]], workers: int
) -> None:
    """Per step each host sends (N-1)/N |w| as a worker and as much as a server, and takes in the same.

    A single server of its own takes in N |w| and sends N |w|.
    """
    size, w = weights(workers)

    def per_step(servers: Any, cluster: str) -> Counter[tuple[str, int]]:
        found = []
        for steps in (2, 3):
            carried.clear()
            simulate_sync(Steps(steps, size=size), workers, servers, cluster)
            found.append(Counter(carried))
        return found[1] - found[0]

    each = 2 * (workers - 1) * w // workers
    ways = [(way, host) for way in ("up", "down") for host in range(workers)]
    assert per_step("colocated", HOSTS) == Counter(dict.fromkeys(ways, each))
    server = {("up", workers): workers * w, ("down", workers): workers * w}
    assert per_step(1, HOSTS + SERVERS) == Counter(dict.fromkeys(ways, w) | server)


# What a host shares


def place(tmp_path: Path, text: str, workers: int = 2) -> CostModel:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return Cluster.load(path).cost_model(workers, workers, 0, colocated=True)


def test_worker_and_colocated_server_share_one_host_link(tmp_path: Path) -> None:
    """Worker and server queue on the same uplink and downlink; hosts differ, and so do their links."""
    slow = '[[hosts]]\ncount = 1\nbandwidth = "1 B/s"\nlatency = "3 s"\n[[hosts]]\nlatency = "5 s"\n'
    costs = place(tmp_path, slow)
    assert costs.same_host(("worker", 0), ("server", 0))
    assert not costs.same_host(("worker", 0), ("server", 1))
    (w0, s0), (w1, s1) = ((("worker", rank), ("server", rank)) for rank in range(2))
    up, down = ((w0, s1), (s0, w1)), ((w1, s0), (s1, w0))
    for ways in (up, down):  # 8 s of latency, and 10 s for each of the two
        assert arrivals(costs, *((*way, 10, 0.0) for way in ways)) == [18.0, 28.0]
    assert arrivals(costs, (w0, s0, 10, 100.0)) == [100.0]  # within a host


def test_colocated_servers_spend_their_own_update_time(simulate_sync: Callable[..., Any]) -> None:
    """With [servers] step_time each of the N pushes takes the server its time."""
    free = f'[[hosts]]\nstep_time = "{STEP:g} s"\n[servers]\nstep_time = "2 s"\nspeed = 4\n'
    assert durations(simulate_sync(Steps(3, size=4), 4, "colocated", free)) == {STEP + 4 * 0.5}


# The same training


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_bits_as_with_dedicated_servers(simulate_sync: Callable[..., Any], workers: int) -> None:
    """Where the servers are changes the time, not the result."""
    for program in (Script(), Steps(3, lambda rank, x: torch.full_like(x, 0.1 + rank), size=7)):
        found = [simulate_sync(program, workers, servers) for servers in ("colocated", workers)]
        assert found[0]["digest"] == found[1]["digest"]
        assert found[0]["servers"] == workers


@pytest.mark.parametrize("strategy", ["sync", None])
def test_colocated_servers_on_real_processes_match_the_simulator(
    tmp_path: Path, strategy: str | None
) -> None:
    """As many servers as workers, the same bits, and the run folder says what was asked for.

    The strategy may be known only from the script.
    """
    program = Steps(3, size=6) if strategy else of_the_script
    real = pr.run(program, workers=2, servers="colocated", strategy=strategy, runs=tmp_path, threads=1)
    virtual = pr.simulate(program, workers=2, servers="colocated", strategy=strategy, runs=tmp_path)
    assert real["digest"] == virtual["digest"]
    for summary in (real, virtual):
        config = json.loads((Path(summary["folder"]) / "config.json").read_text())
        assert (summary["servers"], config["servers"], config["strategy"]) == (2, 2, "sync")
        assert config["colocated"]


def of_the_script() -> None:
    session = pr.init("sync")
    model = torch.nn.Linear(3, 2)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


# Mistakes


def lockstep() -> None:
    pr.init("allreduce")


@pytest.mark.parametrize("program", [Steps(1), lockstep])
def test_a_strategy_without_servers_refuses(program: Any) -> None:
    strategy = None if program is lockstep else "allreduce"
    with pytest.raises(pr.UsageError, match="allreduce uses no servers; leave out --servers"):
        pr.simulate(program, workers=2, strategy=strategy, servers="colocated")


def test_unknown_values_of_servers_are_refused() -> None:
    for function in (pr.run, pr.simulate):
        with pytest.raises(pr.UsageError, match="servers is 'collocated'; it must be a whole number or"):
            function(Steps(1), strategy="sync", servers="collocated", runs=None)  # type: ignore[operator]


@pytest.mark.parametrize("key", ['bandwidth = "1 GB/s"', 'latency = "1 ms"'])
def test_servers_have_no_link_of_their_own(simulate_sync: Callable[..., Any], key: str) -> None:
    """A file that gives them one describes something else; only a colocated run refuses it."""
    with pytest.raises(pr.UsageError, match=r"\.toml: servers: .* leave out their bandwidth and latency"):
        simulate_sync(Steps(1), 2, "colocated", f"[servers]\n{key}\n")
    assert simulate_sync(Steps(1), 2, 1, f"[servers]\n{key}\n")["steps"] == 2
