"""Laws of workers that exchange with one other at a time: adpsgd, push and noloco."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.model.replica import Replica
from polyrhythm.session.seeds import mix
from polyrhythm.strategies.decentralized.adpsgd import AdPsgdWorker, requests
from polyrhythm.strategies.decentralized.push import ONE, PushWorker
from polyrhythm.strategies.decentralized.topology import parse_topology, partners, regraph
from polyrhythm.worlds.simulated.fibers import Loop
from polyrhythm.worlds.simulated.waits import SimulatedReply, SimulatedRequest
from tests.support.combine import each_value
from tests.support.planes import Plane, slopes
from tests.support.programs import Point, Script, Steps, events, trained

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
    """Calls `look` after every event of a simulation."""
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
    """How far a worker's first gradients lead down the plane, at a learning rate of 0.5."""
    model = plane.model()
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.float64)
    for step in range(1, steps + 1):
        total += 0.5 * flat(slopes(rank, step, model))
    return total


# AD-PSGD


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_adpsgd_parameter_sum_changes_by_updates_only(
    simulate: Any, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """After every event: only updates have moved the sum of all x, less the d that one worker has gained and
    the other has not lost yet."""
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
        total = torch.zeros_like(way[0])
        for rank, worker in plane.workers.items():
            total += flat(worker.read_parameters(0, worker.replica.layout.total))
            for (peer, key), delivery in worker.published._deliveries.items():
                fetched = plane.workers[peer.rank].fetched
                if fetched is not None and fetched.key == key:
                    total -= flat(delivery.publication.tensors)
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


def test_two_adpsgd_workers_end_at_their_average(simulate: Any) -> None:
    """Both end half way between, with the same parameters."""
    plane = Plane(3, rate=lambda step: 0.5 if step == 1 else 0.0)
    simulate(plane, "adpsgd", 2)
    first, second = (flat(plane.x[rank][0]) for rank in range(2))
    assert (first - second).abs().max() > 0.1
    for rank in range(2):
        assert (flat(plane.x[rank][-1]) - (first + second) / 2).abs().max() < 1e-15


SLOW_TO_STEP = "[[hosts]]\ncount = 1\n[[hosts]]\ncount = 1\nspeed = 0.15\n[[hosts]]\nspeed = 0.7\n"


@pytest.mark.parametrize("topology", ["0-1/1-2", "complete"])
def test_each_average_counts_with_those_before_it(simulate: Any, topology: str) -> None:
    """Both become half of their sum, also while the answering worker computes, and several times a step.

    Replays the log: all step once, and from then on only average.
    """
    plane = Plane(12, rate=lambda step: 0.5 if step == 1 else 0.0)
    summary = simulate(plane, f"adpsgd:{topology}", 3, cluster=SLOW_TO_STEP)
    x, stepped, asked_of = list(began(plane, 3)), set[int](), list[int]()
    for line in events(summary, "deliver", "apply"):
        rank = int(line["node"].split()[1])
        if line["event"] == "apply":
            if rank not in stepped:
                x[rank] = x[rank] - down(plane, rank, 1)
            stepped.add(rank)
        elif line["kind"] == "average":
            other = int(line["sender"].split()[1])
            x[rank] = x[other] = (x[rank] + x[other]) / 2
            asked_of.append(rank)
    assert len(asked_of) > 20 and set(asked_of) == {1}
    for rank in range(3):
        assert (flat(plane.replicas[rank].model.parameters()) - x[rank]).abs().max() < 1e-13


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("topology", TOPOLOGIES[:3])
def test_a_slow_worker_holds_up_nobody(simulate: Any, slow: int, topology: str) -> None:
    """Whether it requests or answers: the others take their steps at the very same times."""
    link = '[[hosts]]\nstep_time = "10 ms"\nlatency = "1 ms"\nbandwidth = "10 Mbit/s"\n'
    straggler = f"[[stragglers]]\nworkers = [{slow}]\nslowdown = 10.0\n"
    assert bool(requests(topology, tuple(range(6)), 0)[slow]) == (slow == 0)
    times = []
    for cluster in (link, link + straggler):
        steps = events(simulate(Steps(30, size=100), f"adpsgd:{topology}", 6, cluster=cluster), "step")
        times.append([(line["node"], line["t"]) for line in steps if line["node"] != f"worker {slow}"])
        assert all(line["wait_s"] == 0 for line in steps)
    assert sorted(times[0]) == sorted(times[1])


@given(
    topology=st.sampled_from([*TOPOLOGIES, "torus", "hypercube"]),
    ranks=st.sets(st.integers(0, 15), min_size=1),
)
def test_adpsgd_topology_is_split_into_askers_and_answerers(topology: str, ranks: set[int]) -> None:
    """For any survivors: each requests or answers and never both, along edges, and all are connected."""
    living = tuple(sorted(ranks))
    near, asked = regraph(parse_topology(topology), living, 3), requests(topology, living, 3)
    answer = {other for others in asked.values() for other in others}
    assert not answer & {rank for rank, others in asked.items() if others}
    assert all(other in near[rank] for rank, others in asked.items() for other in others)
    reached, ahead = {living[0]}, [living[0]]
    while ahead:
        here = ahead.pop()
        new = {*asked[here], *(rank for rank, others in asked.items() if here in others)} - reached
        reached |= new
        ahead += new
    assert reached == ranks


def test_an_average_that_is_asked_for_twice_counts_once(
    simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may be lost with its connection: the repeated request gets the same answer."""
    digest = simulate(Script(), "adpsgd", 4)["digest"]
    on_message, again = AdPsgdWorker.on_message, []

    def twice(self: AdPsgdWorker, message: Any) -> None:
        on_message(self, message)
        if message is not None and message.kind == "average":
            node: Any = self.node
            places = [torch.empty_like(part) for part in message.tensors]
            repeated = SimulatedRequest(
                message.sender, "average", message.sequence, message.fields, message.tensors
            )
            repeated.reply = SimulatedReply(node.world.nodes[message.sender], node.me, "average", places)
            on_message(self, repeated)
            again.append(torch.equal(flat(places), flat(message.tensors)))

    monkeypatch.setattr(AdPsgdWorker, "on_message", twice)
    assert simulate(Script(), "adpsgd", 4)["digest"] == digest
    assert again and all(again)


def test_what_the_script_loads_is_not_lost(simulate: Any) -> None:
    """Training continues from parameters loaded after `prepare`, whatever averages were under way."""

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


@each_value(("seed", range(12)), ("topology", ["complete", "ring", "random:2"]))
def test_adpsgd_finishes_despite_random_delays_and_crashes(simulate: Any, seed: int, topology: str) -> None:
    """Whichever workers die, and whenever: the others finish, and all examples are trained on."""
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


def test_adpsgd_reassigns_roles_when_the_only_answerer_dies(simulate: Any) -> None:
    """When the only worker that answers dies, one of those that requested takes its role."""
    crash = '[[failures]]\nworkers = [1]\nat = "55 ms"\n'
    summary = simulate(Script(size=240), "adpsgd", 3, cluster=crash)
    heard = [line for line in events(summary, "deliver") if line["kind"] == "average"]
    assert {line["node"] for line in heard if line["t"] < 0.055} == {"worker 1"}
    assert {line["node"] for line in heard if line["t"] > 0.075} == {"worker 2"}


@pytest.mark.parametrize("who", [[0, 1], [1, 2], [0, 1, 2]])
def test_adpsgd_workers_that_return_together_copy_a_survivor(simulate: Any, who: list[int]) -> None:
    """Replacements take their parameters from a survivor, and not from each other."""
    crash = f'[[failures]]\nworkers = {who}\nat = "55 ms"\nback = "80 ms"\n'
    summary = simulate(Script(size=240), "adpsgd", 4, cluster=crash)
    assert summary["joined"] == len(who)
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]


def test_adpsgd_refuses_invalid_topologies(simulate: Any) -> None:
    for text, workers, message in [
        ("adpsgd:0-1/2-3", 4, "disconnected topology"),
        ("adpsgd:hypercube", 6, "not a power of two"),
        ("adpsgd:star", 4, "is unknown; there are ring"),
    ]:
        with pytest.raises(UsageError, match=message):
            simulate(Steps(1), text, workers)


# Stochastic gradient push

LINKS = '[[hosts]]\nstep_time = { exponential = "10 ms" }\nlatency = "2 ms"\nbandwidth = "1 Mbit/s"\n'


def under_way(workers: dict[int, PushWorker]) -> list[tuple[int, Any]]:
    """Shares that were given and that their receivers have not added: grains, and the z that they count."""
    found = []
    for worker in workers.values():
        for (peer, key), delivery in worker.published._deliveries.items():
            receiver, share = workers[peer.rank], delivery.publication
            if key.round in receiver.requested or key.round >= receiver.round:
                found.append((share.fields["grains"], share.tensors))
    return found


def check(strategy: str, workers: int) -> None:
    parsed = pr.parse(strategy)
    parsed.check(Plan(parsed, workers))


def fits(strategy: str, workers: int) -> bool:
    """False if the strategy needs more workers."""
    try:
        check(strategy, workers)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize(
    ("strategy", "workers", "message"),
    [
        ("push:fanout=9", 3, "push:fanout=9: with 3 workers fanout is at most 2: receivers are 1, 2, 4, "),
        ("push:fanout=2", 2, "with 2 workers fanout is at most 1"),
        ("push:fanout=4", 8, "with 8 workers fanout is at most 3"),
        ("push:11", 3, "push:11: with fanout=1 ahead is at most 10: by then a worker has given away all but"),
        ("push:11", 1, "ahead is at most 10"),
        ("push:7,fanout=2", 3, "with fanout=2 ahead is at most 6"),
        ("push:6,fanout=3", 9, "with fanout=3 ahead is at most 5"),
    ],
)
def test_push_refuses_fanout_and_ahead_beyond_their_limits(strategy: str, workers: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(strategy, workers)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("push:10", 2), ("push:6,fanout=2", 3), ("push:5,fanout=3", 5), ("push:fanout=3", 1), ("push", 1)],
)
def test_push_accepts_fanout_and_ahead_at_their_limits(strategy: str, workers: int) -> None:
    assert fits(strategy, workers)


@each_value(
    ("workers", [2, 3, 8]),
    ("strategy", ["push", "push:1", "push:2", "push:0,fanout=2", "push:3,fanout=2"]),
    where=fits,
)
def test_mass_is_conserved(
    simulate: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, workers: int
) -> None:
    """After every event, with shares that are on their way: the sum of omega is N exactly, and only updates
    have moved the sum of x."""
    plane, seen = Plane(60), {"under way": 0, "events": 0}
    way = torch.zeros(9 * 7 + 7 + 7 * 4 + 4, dtype=torch.float64)
    taken = dict.fromkeys(range(workers), 0)
    start: list[Tensor] = []
    apply = Replica.apply

    def counted(self: Replica) -> None:
        apply(self)
        rank = next(rank for rank, replica in plane.replicas.items() if replica is self)
        taken[rank] += 1
        way.sub_(0.5 * flat(slopes(rank, taken[rank], self.model)))

    def look() -> None:
        if len(plane.workers) < workers:
            return
        flying = under_way(plane.workers)
        seen["under way"] += len(flying)
        seen["events"] += 1
        own = [(worker.omega, worker.replica.parameters) for worker in plane.workers.values()]
        assert sum(grains for grains, _ in (*own, *flying)) == workers * ONE
        if seen["events"] % 7 and len(start):
            return
        x = sum(flat(vectors) * (grains / ONE) for grains, vectors in (*own, *flying))
        start[:] = start or [x]
        assert (x - start[0] - way).abs().max() < 1e-11

    monkeypatch.setattr(Replica, "apply", counted)
    watch(monkeypatch, look)
    simulate(plane, strategy, workers, cluster=LINKS)
    assert set(taken.values()) == {60} and seen["under way"] > 100
    # At the end nothing is on its way: each has its whole weight again.
    assert {worker.omega for worker in plane.workers.values()} == {ONE}


@pytest.mark.parametrize(
    ("workers", "fanout"), [*((n, 1) for n in (2, 3, 4, 5, 8)), (3, 2), (4, 2), (5, 2), (8, 2)]
)
def test_balanced_rounds_are_step_then_mix(simulate: Any, workers: int, fanout: int) -> None:
    """All give and receive the same, so omega is 1 and it is D-PSGD: x_i <- sum_j W_ij (x_j - update_j),
    with the W of each round."""
    plane = Plane(20)
    simulate(plane, f"push:fanout={fanout}", workers)
    receivers = min(fanout, (workers - 1).bit_length())
    x = began(plane, workers)
    for turn in range(20):
        steps = torch.stack([0.5 * flat(slopes(rank, turn + 1, plane.model())) for rank in range(workers)])
        x = matrix(workers, turn, receivers, fanout) @ (x - steps)
        now = torch.stack([flat(plane.x[rank][turn]) for rank in range(workers)])
        # One third has no exact number of grains, and so no exact share.
        assert (now - x).abs().max() < (1e-13 if receivers == 1 else 1e-10)


def began(plane: Plane, workers: int) -> Tensor:
    """Where all workers began: they are equal, and the mean moves by updates only."""
    torch.manual_seed(mix("model", 0))
    return flat(plane.model().parameters()).expand(workers, -1)


def matrix(workers: int, turn: int, receivers: int, fanout: int) -> Tensor:
    """W of a round: each keeps a share, and gives one to each receiver 1, 2, 4, ... places further."""
    weights = torch.eye(workers, dtype=torch.float64)
    for number in range(receivers):
        far = 1 << (turn * fanout + number) % (workers - 1).bit_length()
        for sender in range(workers):
            weights[(sender + far) % workers, sender] += 1
    return weights / (receivers + 1)


def test_push_ahead_by_hand_for_two_workers(simulate: Any) -> None:
    """The update rule for two workers, with x and omega of each written out."""
    ahead, plane = 2, Plane(12)
    simulate(plane, f"push:{ahead}", 2)
    x, omega = list(began(plane, 2)), [1.0, 1.0]
    given: list[list[tuple[Tensor, float]]] = [[], []]
    for step in range(12):
        for rank in range(2):
            x[rank] = x[rank] - 0.5 * flat(slopes(rank, step + 1, plane.model()))
            x[rank], omega[rank] = x[rank] / 2, omega[rank] / 2
            given[rank].append((x[rank], omega[rank]))
        for rank in range(2):
            if step >= ahead:
                more = given[1 - rank][step - ahead]
                x[rank], omega[rank] = x[rank] + more[0], omega[rank] + more[1]
            assert (flat(plane.x[rank][step]) - x[rank] / omega[rank]).abs().max() < 1e-13


@pytest.mark.parametrize("strategy", ["push", "push:2", "noloco:3"])
def test_a_slow_link_changes_no_bit(simulate: Any, strategy: str) -> None:
    """Which shares a round takes does not depend on when they arrive."""
    digests = {simulate(Script(), strategy, 5, cluster=cluster)["digest"] for cluster in ("", LINKS, UNEQUAL)}
    assert len(digests) == 1


# NoLoCo


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_noloco_mean_follows_heavy_ball_momentum(simulate: Any, workers: int) -> None:
    """The pull of a pair sums to zero: mean phi follows heavy ball along the mean displacement."""
    plane = Plane(24)
    simulate(plane, "noloco:4,mu=0.5,lr=0.7", workers)
    x = torch.stack([torch.stack([flat(each) for each in plane.x[rank]]) for rank in range(workers)])
    ways = -torch.stack(
        [
            torch.stack(
                [down(plane, rank, 4 * (turn + 1)) - down(plane, rank, 4 * turn) for turn in range(6)]
            )
            for rank in range(workers)
        ]
    ).mean(0)
    phi = began(plane, 1)[0]
    m = torch.zeros_like(phi)
    for turn in range(6):
        m = 0.5 * m + 0.7 * ways[turn]
        phi = phi + m
        assert (x[:, 4 * turn + 3].mean(0) - phi).abs().max() < 1e-12
    if workers > 2:
        assert (x[0, -1] - x[1, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("workers", [2, 4, 5])
def test_pairs_meet_by_the_rule(simulate: Any, workers: int) -> None:
    """m <- mu m + lr mean(theta - phi) + lr (mean phi - phi_i), phi_i <- phi_i + m, over the two of a pair.

    One that has no partner in a round is a pair by itself.
    """
    plane, ranks = Plane(8), range(workers)
    simulate(plane, "noloco:2,mu=0.4,lr=0.6", workers)
    phi, m = list(began(plane, workers)), [torch.zeros_like(began(plane, 1)[0])] * workers
    for turn in range(4):
        met = partners(workers, 0, turn)
        pairs = [(rank, met.get(rank, rank)) for rank in ranks]
        assert {other for _, other in pairs} == set(ranks) and (len(met) + 1) // 2 == workers // 2
        ways = [down(plane, rank, 2 * turn) - down(plane, rank, 2 * turn + 2) for rank in ranks]
        m = [
            0.4 * m[i] + 0.6 * (ways[i] + ways[j]) / 2 + 0.6 * ((phi[i] + phi[j]) / 2 - phi[i])
            for i, j in pairs
        ]
        phi = [phi[rank] + m[rank] for rank in ranks]
        for rank in ranks:
            assert (flat(plane.x[rank][2 * turn + 1]) - phi[rank]).abs().max() < 1e-13
    assert workers == 2 or (phi[0] - phi[1]).abs().max() > 1e-3


def test_noloco_sends_only_pairwise_messages(simulate: Any) -> None:
    """Each meeting moves two vectors each way, and there is no collective."""
    summary = simulate(Steps(12, size=100), "noloco:3", 4)
    heard = [line for line in events(summary, "deliver") if line["kind"] == "fetch"]
    assert len(heard) == 4 * 4  # each of four, four times
    # Besides, all start with the parameters of worker 0; reading the result comes after the count.
    assert summary["bytes_sent"] == 3 * 800 + 4 * 4 * 2 * 800


# Churn, for those that step together

STEPPING = ["push", "push:2", "push:1,fanout=2", "noloco:3"]


@each_value(
    ("strategy", STEPPING),
    ("back", ["", 'back = "95 ms"\n', 'back = "56 ms"\n']),
    ("who", [[0], [3], [1, 2]]),
)
def test_push_and_noloco_survivors_continue_after_crashes_and_rejoins(
    simulate: Any, strategy: str, back: str, who: list[int]
) -> None:
    """Some die in the middle of an epoch; replacements take part from the next one on."""
    crash = f'[[failures]]\nworkers = {who}\nat = "55 ms"\n{back}'
    script = Script(size=240, epochs=4)
    summary = simulate(script, strategy, 5, cluster=LINKS + crash)
    assert set(summary["lost"]) == {f"worker {rank}" for rank in who}
    assert summary["joined"] == (len(who) if back else 0)
    assert summary["metrics"]["after"] < 0.7 * summary["metrics"]["before"]
    last = {line["node"] for line in events(summary, "step")[-10:]}
    assert last == {f"worker {rank}" for rank in range(5) if back or rank not in who}


@each_value(("seed", range(10)), ("strategy", STEPPING))
def test_push_and_noloco_finish_despite_random_delays_and_crashes(
    simulate: Any, seed: int, strategy: str
) -> None:
    lots = torch.Generator().manual_seed(100 + seed)
    text = LINKS
    for rank in torch.randperm(6, generator=lots)[:4].tolist():
        at = int(torch.randint(1, 400, (), generator=lots))
        text += f'[[failures]]\nworkers = [{rank}]\nat = "{at} ms"\n'
        if torch.rand((), generator=lots) < 0.6:
            text += f'back = "{at + int(torch.randint(1, 200, (), generator=lots))} ms"\n'
    summary = simulate(Script(size=120, epochs=4), strategy, 6, cluster=text, seed=seed)
    assert summary["lost"] and summary["metrics"]["after"] < summary["metrics"]["before"]


def test_push_sum_weight_sent_to_a_dead_worker_is_recovered(
    simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of omega of the survivors falls by no more than the dead worker had."""
    plane = Plane(60)
    crash = '[[failures]]\nworkers = [1]\nat = "155 ms"\n'
    totals: list[int] = []

    def look() -> None:
        if len(plane.workers) == 4:
            living = {rank: worker for rank, worker in plane.workers.items() if rank != 1}
            own = sum(worker.omega for worker in living.values())
            own += sum(share.grains for worker in living.values() for share in worker.unclaimed)
            totals.append(own)

    watch(monkeypatch, look)
    summary = simulate(plane, "push", 4, cluster='[[hosts]]\nstep_time = "10 ms"\n' + crash)
    assert list(summary["lost"]) == ["worker 1"]
    assert totals[-1] >= 2 * ONE and {len(plane.x[rank]) for rank in (0, 2, 3)} == {60}


def test_push_loses_no_weight_to_a_worker_that_dies_during_regrouping(simulate: Any) -> None:
    """It is in the cohort and dead already: nothing is published for it, and no weight is lost."""

    def script() -> None:
        here = pr.init()
        point = Point(3)
        point, optimizer = here.prepare(point, torch.optim.SGD(point.parameters(), lr=0.1))
        for step in range(40):
            if step == 20:
                here._worker.on_membership([0, 1, 2, 3], 1)
            point.x.grad = torch.ones_like(point.x)
            optimizer.step()
        workers[here.rank] = here._worker

    workers: dict[int, PushWorker] = {}
    crash = '[[failures]]\nworkers = [1]\nat = "155 ms"\n'
    simulate(script, "push", 4, cluster=crash)
    assert sum(worker.omega for worker in workers.values()) == 3 * ONE
    assert not any(worker.published._deliveries for worker in workers.values())
