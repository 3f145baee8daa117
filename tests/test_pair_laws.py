"""What holds where workers exchange with one other at a time: adpsgd, push and noloco."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planes import Plane, slopes
from programs import Script, Steps, events, trained
from torch import Tensor

import polyrhythm as pr
from polyrhythm.errors import UsageError
from polyrhythm.replica import Replica
from polyrhythm.strategies.adpsgd import ADPSGD, asked
from polyrhythm.strategies.handing import gifts_of
from polyrhythm.topology import parse_topology, regraph
from polyrhythm.worlds.fibers import Loop
from polyrhythm.worlds.simulated import _Asked, _SimulatedReply

UNEQUAL = """
[[hosts]]
count = 1
speed = 0.1
latency = "1 ms"
bandwidth = "2 Mbit/s"
[[hosts]]
step_time = { exponential = "10 ms" }
latency = "3 ms"
bandwidth = "1 Mbit/s"
"""
TOPOLOGIES = ["complete", "ring", "exponential", "random:3", "0-1/1-2/2-3/3-4/4-5"]


def watch(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    """Has this called after every event of a simulation."""
    run = Loop.run

    def watched(self: Loop, until: Callable[[], bool]) -> None:
        def also() -> bool:
            look()
            return until()

        run(self, also)

    monkeypatch.setattr(Loop, "run", watched)


def flat(tensors: Any) -> Tensor:
    return torch.cat([each.detach().reshape(-1).double() for each in tensors])


def down(plane: Plane, rank: int, steps: int) -> Tensor:
    """How far the first so many gradients of a worker lead down the plane, at a rate of 0.5."""
    model = plane.model()
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.float64)
    for step in range(1, steps + 1):
        total += 0.5 * flat(slopes(rank, step, model))
    return total


# AD-PSGD


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_sum_moves_by_updates_only(simulate: Any, monkeypatch: pytest.MonkeyPatch, topology: str) -> None:
    """After every event: what all have, less what one has yet to give up for what another got, moved by the
    steps that were taken and by nothing else."""
    plane, taken, seen = Plane(12), dict.fromkeys(range(6), 0), []
    apply = Replica.apply

    def counted(self: Replica) -> None:
        apply(self)
        rank = next(rank for rank, replica in plane.replicas.items() if replica is self)
        taken[rank] += 1
        way[rank] -= 0.5 * flat(slopes(rank, taken[rank], self.model))

    def look() -> None:
        if len(plane.replicas) < 6:
            return
        strategy, total = ADPSGD(topology), torch.zeros_like(way[0])
        for rank, replica in plane.replicas.items():
            total += flat(strategy.shown(replica, 0, replica.layout.total))
            for (peer, name), gift in gifts_of(replica).given.items():
                asker = plane.replicas[peer.rank]
                if asker.outstanding and name == asker.notes["asked"]:
                    total -= flat(gift.vectors)
                    seen.append(rank)
        if not start:
            start.append(total)
        assert (total - start[0] - sum(way.values())).abs().max() < 1e-12

    start: list[Tensor] = []
    way = {rank: torch.zeros(9 * 7 + 7 + 7 * 4 + 4, dtype=torch.float64) for rank in range(6)}
    monkeypatch.setattr(Replica, "apply", counted)
    watch(monkeypatch, look)
    summary = simulate(plane, f"adpsgd:{topology}", 6, cluster=UNEQUAL)
    assert set(taken.values()) == {12} and len(seen) > 50 and summary["staleness"]["max"] >= 1


def test_two_end_at_their_average(simulate: Any) -> None:
    """Nothing else happens: both have the same, half way between."""
    plane = Plane(3, rate=lambda step: 0.5 if step == 1 else 0.0)
    simulate(plane, "adpsgd", 2)
    first, second = (flat(plane.x[rank][0]) for rank in range(2))
    assert (first - second).abs().max() > 0.1
    for rank in range(2):
        assert (flat(plane.x[rank][-1]) - (first + second) / 2).abs().max() < 1e-15


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("topology", TOPOLOGIES[:3])
def test_a_slow_worker_holds_up_nobody(simulate: Any, slow: int, topology: str) -> None:
    """Neither one that asks nor one that is asked: the others take their steps at the very same times."""
    link = '[[hosts]]\nstep_time = "10 ms"\nlatency = "1 ms"\nbandwidth = "10 Mbit/s"\n'
    straggler = f"[[stragglers]]\nworkers = [{slow}]\nslowdown = 10.0\n"
    asks = asked(topology, tuple(range(6)), 0)
    assert bool(asks[slow]) == (slow == 0)
    times = []
    for cluster in (link, link + straggler):
        steps = events(simulate(Steps(30, size=100), f"adpsgd:{topology}", 6, cluster=cluster), "step")
        times.append([(line["node"], line["t"]) for line in steps if line["node"] != f"worker {slow}"])
        assert all(line["wait_s"] == 0 for line in steps)
    assert sorted(times[0]) == sorted(times[1])


@given(topology=st.sampled_from([*TOPOLOGIES, "torus", "hypercube"]), ranks=st.sets(st.integers(0, 15)))
def test_the_two_sides(topology: str, ranks: set[int]) -> None:
    """Whoever lives: each asks or is asked and never both, by edges of the graph, and all are connected."""
    if not ranks:
        return
    living = tuple(sorted(ranks))
    near, asks = regraph(parse_topology(topology), living, 3), asked(topology, living, 3)
    answer = {other for others in asks.values() for other in others}
    assert not answer & {rank for rank, others in asks.items() if others}
    assert all(other in near[rank] for rank, others in asks.items() for other in others)
    reached, ahead = {living[0]}, [living[0]]
    while ahead:
        here = ahead.pop()
        new = {*asks[here], *(rank for rank, others in asks.items() if here in others)} - reached
        reached |= new
        ahead += new
    assert reached == ranks


def test_an_average_that_is_asked_for_twice_counts_once(
    simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks may take the answer along: whoever asks again is given the same."""
    digest = simulate(Script(), "adpsgd", 4)["digest"]
    hear, again = ADPSGD.hear, []

    def twice(self: ADPSGD, node: Any, replica: Replica, message: Any) -> None:
        hear(self, node, replica, message)
        if message is not None and message.kind == "average":
            places = [torch.empty_like(part) for part in message.tensors]
            repeated = _Asked(message.sender, "average", message.sequence, message.fields, message.tensors)
            repeated.reply = _SimulatedReply(node.world.nodes[message.sender], node.me, "average", places)
            hear(self, node, replica, repeated)
            again.append(torch.equal(flat(places), flat(message.tensors)))

    monkeypatch.setattr(ADPSGD, "hear", twice)
    assert simulate(Script(), "adpsgd", 4)["digest"] == digest
    assert again and all(again)


def test_what_the_script_loads_is_not_lost(simulate: Any) -> None:
    """Parameters that are loaded after `prepare` are where training goes on, whatever was under way."""

    def script() -> None:
        here = pr.init()
        model = torch.nn.Linear(3, 1).double()
        model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(6):
            if step == 3:
                model.load_state_dict({"weight": torch.full((1, 3), 7.0), "bias": torch.full((1,), 7.0)})
            model(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()

    assert (flat(trained(simulate(script, "adpsgd", 4)).values()) - 7).abs().max() < 1e-14


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("topology", ["complete", "ring", "random:2"])
def test_no_delay_and_no_crash_stops_it(simulate: Any, seed: int, topology: str) -> None:
    """Whoever dies, and whenever: the others come to the end, and all is trained on."""
    lots = torch.Generator().manual_seed(seed)
    text = '[[hosts]]\nstep_time = { exponential = "10 ms" }\nlatency = "2 ms"\nbandwidth = "1 Mbit/s"\n'
    for rank in torch.randperm(5, generator=lots)[:4].tolist():  # one is left
        at = int(torch.randint(1, 150, (), generator=lots))
        text += f'[[failures]]\nworkers = [{rank}]\nat = "{at} ms"\n'
        if torch.rand((), generator=lots) < 0.6:
            text += f'back = "{at + int(torch.randint(1, 60, (), generator=lots))} ms"\n'
    script = Script(size=120, epochs=3)
    summary = simulate(script, f"adpsgd:{topology}", 5, cluster=text, seed=seed)
    assert summary["lost"] and summary["samples"] >= script.size * script.epochs
    assert summary["batches_undone"] == 0
    assert summary["metrics"]["after"] < 0.9 * summary["metrics"]["before"]


def test_sides_are_chosen_anew(simulate: Any) -> None:
    """When the only one that is asked dies, one of those that asked takes its part."""
    crash = '[[failures]]\nworkers = [1]\nat = "55 ms"\n'
    summary = simulate(Script(size=240), "adpsgd", 3, cluster=crash)
    heard = [line for line in events(summary, "deliver") if line["kind"] == "average"]
    assert {line["node"] for line in heard if line["t"] < 0.055} == {"worker 1"}
    assert {line["node"] for line in heard if line["t"] > 0.075} == {"worker 2"}


@pytest.mark.parametrize("who", [[0, 1], [1, 2], [0, 1, 2]])
def test_several_come_back_at_once(simulate: Any, who: list[int]) -> None:
    """Those that begin anew take their parameters from one that was there, and not from each other."""
    crash = f'[[failures]]\nworkers = {who}\nat = "55 ms"\nback = "80 ms"\n'
    summary = simulate(Script(size=240), "adpsgd", 4, cluster=crash)
    assert summary["joined"] == len(who)
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]


def test_a_topology_that_cannot_be(simulate: Any) -> None:
    for text, workers, message in [
        ("adpsgd:0-1/2-3", 4, "disconnected topology"),
        ("adpsgd:hypercube", 6, "no power of two"),
        ("adpsgd:star", 4, "is unknown; there are ring"),
    ]:
        with pytest.raises(UsageError, match=message):
            simulate(Steps(1), text, workers)
