"""Laws of workers that mix with their neighbors, exact in simulation."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import parse_codec
from polyrhythm.session.seeds import mix
from polyrhythm.strategies.decentralized.choco import energy_kept
from polyrhythm.strategies.decentralized.mixing import contraction, matrix
from polyrhythm.strategies.decentralized.topology import graph, parse_topology
from tests.support.combine import each_value, few
from tests.support.planes import CODECS, MODELS, Plane, layers, slopes, ways
from tests.support.programs import ADAM, MOMENTUM, SGD, Examples, Script, distance, events, mlp, trained

PAPER, AFTER = "mix-while-computing", "step-then-mix"
ORDERS = [PAPER, AFTER]
GRAPHS = [
    ("ring", 5), ("torus", 6), ("exponential-all", 9), ("exponential", 6), ("hypercube", 8), ("complete", 4),
    ("random:3", 8), ("0-1/0-2/0-3/3-4", 5), ("ring", 2), ("ring", 1),
]  # fmt: skip
LR = 0.5


def flat(values: list[Tensor]) -> np.ndarray:
    return torch.cat([value.double().reshape(-1) for value in values]).numpy()


def rows(plane: Plane) -> np.ndarray:
    """x[step, worker]: the parameters after each step."""
    ranks = sorted(plane.x)
    return np.array([[flat(plane.x[rank][step]) for rank in ranks] for step in range(plane.count)])


def gradients(plane: Plane, workers: int) -> np.ndarray:
    """g[step, worker]"""
    given = [[slopes(rank, step, layers()) for rank in range(workers)] for step in range(1, plane.count + 1)]
    return np.array([[flat(each) for each in step] for step in given])


def far(x: np.ndarray) -> float:
    """How far the workers are from their mean."""
    return float(np.linalg.norm(x - x.mean(0)))


def turning(text: str, workers: int, turn: int) -> np.ndarray:
    return matrix(graph(parse_topology(text), workers, turn=turn))


# --- the update rule --------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "workers"), GRAPHS)
@pytest.mark.parametrize("order", ORDERS)
def test_gossip_matches_the_mixing_matrix_update_of_the_paper(
    simulate: Any, topology: str, workers: int, order: str
) -> None:
    """x <- W x - lr g, or x <- W (x - lr g); the mean goes down the mean gradient, whatever the graph."""
    plane = Plane(7)
    simulate(plane, f"gossip:{topology},order={order}", workers)
    x, g = rows(plane), gradients(plane, workers)
    for step in range(1, plane.count):
        turn = step - 1 if order == PAPER else step
        weights = turning(topology, workers, turn)
        law = weights @ x[step - 1] - LR * g[step]
        if order == AFTER:
            law = weights @ (x[step - 1] - LR * g[step])
        assert np.abs(x[step] - law).max() < 1e-12
        down = x[step - 1].mean(0) - LR * g[step].mean(0)
        assert np.abs(x[step].mean(0) - down).max() < 1e-12


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_a_complete_graph_is_allreduce_if_the_step_comes_first(simulate: Any, optimizer: Any) -> None:
    """The paper's order takes gradients before mixing, and is another algorithm."""
    script = Script(optimizer=optimizer, size=50, epochs=4)
    law = trained(simulate(script, "allreduce", 4))
    after = trained(simulate(script, f"gossip:complete,order={AFTER}", 4))
    paper = trained(simulate(script, "gossip:complete", 4))
    assert distance(after, law) < 1e-12
    assert distance(paper, law) > 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_weight_decay_pulls_at_the_mean(simulate: Any, order: str) -> None:
    """xbar <- (1 - lr decay) xbar - lr gbar: it counts once, in either order."""
    plane = Plane(6, optimizer=partial(torch.optim.SGD, lr=LR, weight_decay=0.1))
    simulate(plane, f"gossip:ring,order={order}", 5)
    x, g = rows(plane).mean(1), gradients(plane, 5).mean(1)
    for step in range(1, plane.count):
        assert np.abs(x[step] - (0.95 * x[step - 1] - LR * g[step])).max() < 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_gossip_keeps_parameter_changes_made_by_the_script(simulate: Any, order: str) -> None:
    """Between two steps one worker changes its parameters: the mean moves by that change only."""

    def main() -> None:
        here = pr.init()
        point = torch.nn.Linear(3, 2).double()
        point, optimizer = here.prepare(point, torch.optim.SGD(point.parameters(), lr=0.0))
        for step in range(4):
            sum(each.sum() for each in point.parameters()).backward()
            optimizer.step()
            if here.rank == 1 and step == 2:
                with torch.no_grad():
                    point.weight += 3.0
        found[here.rank] = point.weight.detach().clone()
        start[here.rank] = here.consensus().weight.detach().clone()

    found: dict[int, Tensor] = {}
    start: dict[int, Tensor] = {}
    summary = simulate(main, f"gossip:ring,order={order}", 3)
    torch.manual_seed(mix("model", 0))
    begin = torch.nn.Linear(3, 2).double().weight.detach()
    assert torch.allclose(trained(summary)["weight"], begin + 1.0, rtol=0, atol=1e-12)
    assert all(torch.allclose(shown, begin + 1.0, rtol=0, atol=1e-12) for shown in start.values())


# --- consensus --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "workers"), [each for each in GRAPHS if each[1] > 2])
def test_gossip_without_steps_contracts_by_rho_per_mixing(simulate: Any, topology: str, workers: int) -> None:
    """The first step moves them apart; then each mixing leaves at most rho of the distance."""
    plane = Plane(30, rate=lambda step: LR * (step == 1))
    simulate(plane, f"gossip:{topology}", workers)
    x = rows(plane)
    if topology == "exponential":
        product = np.eye(workers)
        for step in range(1, plane.count):
            product = turning(topology, workers, step - 1) @ product
        assert np.abs(x[-1] - product @ x[0]).max() < 1e-12 and far(x[-1]) < 1e-3 * far(x[0])
        return
    weights = matrix(graph(parse_topology(topology), workers))
    rho = contraction(weights)
    distances = [far(each) for each in x]
    for before, after in pairwise(distances):
        assert after <= (rho + 1e-9) * before + 1e-12
    if rho > 0.1:  # and no less, once faster modes have decayed
        assert distances[15] / distances[14] == pytest.approx(rho, rel=0.05)
    assert np.abs(x.mean(1) - x[0].mean(0)).max() < 1e-12


@pytest.mark.slow
def test_gossip_consensus_distance_grows_with_lr_and_rho(simulate: Any) -> None:
    """In training the distance is proportional to the learning rate, and grows with 1 / (1 - rho)."""

    def apart(topology: str, lr: float) -> float:
        plane = Plane(40, optimizer=partial(torch.optim.SGD, lr=lr))
        simulate(plane, f"gossip:{topology}", 12)
        return float(np.mean([far(each) for each in rows(plane)[20:]]))

    order = ["complete", "exponential-all", "torus", "ring"]
    rhos = [contraction(matrix(graph(parse_topology(each), 12))) for each in order]
    found = [apart(each, 0.1) for each in order]
    assert rhos == sorted(rhos) and found == sorted(found)
    assert apart("ring", 0.2) == pytest.approx(2 * found[-1], rel=1e-9)


# --- what it costs ----------------------------------------------------------------------------------

NET = '[[hosts]]\nlatency = "{latency}"\nbandwidth = "1 GB/s"\nstep_time = "10 ms"\n'


@pytest.mark.parametrize(
    ("strategy", "step"), [("gossip", 0.010), (f"gossip:order={AFTER}", 0.014), ("choco", 0.014)]
)
def test_gossip_mixing_adds_at_most_one_network_latency(simulate: Any, strategy: str, step: float) -> None:
    """Publications arrive while the gradient is computed, or one latency later, as requests go out ahead."""

    def took(count: int) -> float:
        return simulate(Plane(count), strategy, 4, cluster=NET.format(latency="2 ms"))["wall_s"]

    assert (took(25) - took(5)) / 20 == pytest.approx(step, rel=1e-3)


@pytest.mark.slow
def test_bytes_do_not_grow_with_the_number_of_workers(simulate: Any) -> None:
    """On a ring, and with exponential turns, each sends its parameters at most twice per step."""

    def sent(topology: str, workers: int) -> float:
        counts = (simulate(Plane(count), f"gossip:{topology}", workers)["bytes_sent"] for count in (14, 2))
        more, less = counts
        return (more - less) / 12 / workers / size

    size = 8 * sum(each.numel() for each in layers().parameters())
    for workers in (4, 8, 16):
        assert sent("ring", workers) == 2
    assert {workers: sent("exponential", workers) for workers in (8, 16)} == {8: 5 / 3, 16: 7 / 4}
    assert [sent("exponential-all", workers) for workers in (4, 8, 16)] == [3, 5, 7]


@pytest.mark.parametrize(("topology", "most"), [("ring", 2), ("complete", 2), ("exponential", 4)])
def test_gossip_keeps_only_a_few_rounds_of_parameters(simulate: Any, topology: str, most: int) -> None:
    """However slow a worker is, publications are kept for two rounds, or a cycle of turns and one more."""
    slow = '[[hosts]]\ncount = 1\nspeed = 0.05\n[[hosts]]\nlatency = "30 ms"\n'
    slow += 'step_time = { exponential = "10 ms" }\n'
    plane = Plane(30)
    simulate(plane, f"gossip:{topology}", 8, cluster=slow)
    assert max(len(worker.published.buffers) for worker in plane.workers.values()) <= most


# --- choco ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "workers"), [("ring", 5), ("0-1/0-2/0-3/3-4", 5)])
def test_choco_is_the_paper(simulate: Any, topology: str, workers: int) -> None:
    """y = x - lr g, x <- y + gamma (W - 1) y: without a codec every estimate is exact."""
    plane, gamma = Plane(7), 0.3
    simulate(plane, f"choco:{gamma},topology={topology}", workers)
    x, g = rows(plane), gradients(plane, workers)
    weights = turning(topology, workers, 0)
    for step in range(1, plane.count):
        y = x[step - 1] - LR * g[step]
        assert np.abs(x[step] - (y + gamma * (weights @ y - y))).max() < 1e-12


@pytest.mark.parametrize("topology", ["ring", "complete", "0-1/0-2/0-3/3-4"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_choco_without_a_codec_is_gossip(simulate: Any, topology: str, optimizer: Any) -> None:
    """Q = identity and gamma = 1: step, then mix."""
    script = Script(optimizer=optimizer, size=50, epochs=3)
    law = trained(simulate(script, f"gossip:{topology},order={AFTER}", 5))
    assert distance(trained(simulate(script, f"choco:topology={topology}", 5)), law) < 1e-11


@each_value(
    ("model", MODELS), ("codec", ["", *(f"+{each}" for each in ways(CODECS)), "+topk:0.2,per=layer,dense=1d"])
)
def test_choco_neighbors_hold_identical_copies_of_sent_parameters(
    simulate: Any, model: str, codec: str
) -> None:
    """Each worker and all its neighbors have the same bits of its estimate; the mean is preserved."""
    plane = Plane(9, model=MODELS[model])
    simulate(plane, f"choco:topology=0-1/0-2/0-3/3-4{codec}", 5)
    for rank, near in enumerate(graph(parse_topology("0-1/0-2/0-3/3-4"), 5)):
        for other in near:
            known = plane.workers[rank].estimates[Peer("worker", other)]
            told = plane.workers[other].estimate
            assert all(torch.equal(a, b) for a, b in zip(known, told, strict=True))
    if model == "double":
        x, g = rows(plane).mean(1), gradients(plane, 5).mean(1)
        assert np.abs(np.diff(x, axis=0) + LR * g[1:]).max() < 1e-12


@few(
    "codec, topology",
    [
        *((codec, "complete") for codec in (*ways(CODECS), "qsgd:1", "topk:0.02", "randomk:0.02")),
        ("topk:0.1", "ring"),
        ("sign", "ring"),
    ],
    quick=3,
)
def test_choco_without_steps_converges_for_every_codec(simulate: Any, codec: str, topology: str) -> None:
    """Without a learning rate, and with the gamma that follows from the codec, no worker diverges."""
    plane = Plane(150, rate=lambda step: LR * (step == 1))
    simulate(plane, f"choco:topology={topology}+{codec}", 4)
    x = rows(plane)
    assert far(x[-1]) < 0.9 * far(x[0])
    assert max(far(each) for each in x) < 1.05 * far(x[0])
    assert np.abs(x.mean(1) - x[0].mean(0)).max() < 1e-11


def test_share_of_energy_kept_by_a_codec_matches_theory() -> None:
    """Of uniform numbers the largest tenth has 27 % of the energy, a random tenth 10 %, 8 bits nearly all."""
    from polyrhythm.model.layout import Layout

    model = torch.nn.Linear(100, 100)
    layout = Layout(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert energy_kept(parse_codec("topk:0.1,pick=exact"), layout) == pytest.approx(1 - 0.9**3, rel=0.02)
    assert energy_kept(parse_codec("randomk:0.1"), layout) == pytest.approx(0.1, rel=0.1)
    assert energy_kept(parse_codec("int8"), layout) > 0.999
    assert energy_kept(parse_codec("sign"), layout) == pytest.approx(2 / np.pi, rel=0.02)


# --- it goes on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", ["gossip", f"gossip:order={AFTER}", "choco", "choco+topk:0.2", "choco+int4"]
)
def test_interrupted_gossip_run_resumes_exactly(strategy: str, tmp_path: Path) -> None:
    """With each worker's own model, optimizer and session, loaded after `prepare`: the same bits."""

    def main(begin: int, end: int) -> None:
        here = pr.init()
        model = mlp()
        optimizer = MOMENTUM(model.parameters())
        model, optimizer, loader = here.prepare(model, optimizer, DataLoader(Examples(24), batch_size=2))
        path = tmp_path / f"{here.rank}.pt"
        if begin:
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            here.load_state_dict(saved["session"])
        for _ in range(begin, end):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        parts = {"model": model, "optimizer": optimizer, "session": here}
        torch.save({name: each.state_dict() for name, each in parts.items()}, path)

    def train_steps(begin: int, end: int) -> str:
        return pr.simulate(partial(main, begin, end), workers=3, strategy=strategy, runs=None, threads=1)[
            "digest"
        ]

    whole = train_steps(0, 4)
    train_steps(0, 2)
    assert train_steps(2, 4) == whole


# --- churn ------------------------------------------------------------------------------------------

EPOCHS = 6
FAMILY = ["gossip:torus", f"gossip:hypercube,order={AFTER}", "gossip:exponential", "choco", "choco+topk:0.3"]
DEATHS = '[[hosts]]\nlatency = "1 ms"\nstep_time = {{ uniform = ["8 ms", "12 ms"] }}\n{}'
ONE = '[[failures]]\nworkers = [1]\nat = "{at} ms"\n'
BACK = ONE + 'back = "{back} ms"\n'


@each_value(
    ("strategy", FAMILY),
    (
        "failures",
        [pytest.param(ONE.format(at=155), id="dies"), pytest.param(BACK.format(at=155, back=170), id="back")],
    ),
)
def test_gossip_survivors_train_on_after_a_death_or_replacement(
    simulate: Any, strategy: str, failures: str
) -> None:
    """One of eight dies for good, or is replaced: the others continue on a graph of their own."""
    script = Script(optimizer=MOMENTUM, size=96, epochs=EPOCHS, shuffle=True)
    cluster = DEATHS.format(failures)
    first, again = (simulate(script, strategy, 8, cluster=cluster) for _ in range(2))
    assert first["digest"] == again["digest"] and list(first["lost"]) == ["worker 1"]
    assert first["joined"] == ("back" in failures)
    assert first["metrics"]["after"] < 0.7 * first["metrics"]["before"]
    undisturbed = simulate(script, strategy, 8, cluster=DEATHS.format(""))
    assert first["metrics"]["after"] < 1.3 * undisturbed["metrics"]["after"]


@pytest.mark.parametrize("strategy", ["gossip", "choco", "choco+int8"])
def test_after_a_death_the_mean_of_the_living_is_preserved(simulate: Any, strategy: str) -> None:
    """From the next epoch on W is that of the survivors: one step moves them apart, and mixing together."""

    def main() -> None:
        here = pr.init()
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer, loader = here.prepare(model, optimizer, DataLoader(range(240), batch_size=4))
        for epoch in range(3):
            for step, _ in enumerate(loader):
                optimizer.param_groups[0]["lr"] = LR if epoch < 2 or step == 0 else 0.0
                given = slopes(here.rank, 20 * epoch + step, model)
                sum((p * s).sum() for p, s in zip(model.parameters(), given, strict=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 2:
                    found[step, here.rank] = flat([each.detach().clone() for each in model.parameters()])

    found: dict[tuple[int, int], np.ndarray] = {}
    simulate(main, strategy, 6, cluster=DEATHS.format('[[failures]]\nworkers = [2]\nat = "75 ms"\n'))
    living = [0, 1, 3, 4, 5]
    assert sorted(found) == [(step, rank) for step in range(12) for rank in living]
    x = np.array([[found[step, rank] for rank in living] for step in range(12)])
    assert np.abs(x.mean(1) - x[0].mean(0)).max() < 1e-12
    rho = contraction(matrix(graph(parse_topology("ring"), 5)))
    distances = [far(each) for each in x]
    if strategy == "gossip":
        assert all(after <= (rho + 1e-9) * before for before, after in pairwise(distances))
    assert 0 < distances[-1] < 0.1 * distances[0]


@each_value(
    ("seed", range(4)), ("strategy", ["gossip", f"gossip:exponential,order={AFTER}", "choco+topk:0.3"])
)
def test_gossip_never_deadlocks_when_workers_die_at_random_times(
    simulate: Any, strategy: str, seed: int
) -> None:
    """Three of six die at random times, two of them come back, at once or later; the run ends."""
    times = np.random.default_rng(seed).integers(15, 400, 3)
    gaps = np.random.default_rng(seed + 100).integers(1, 120, 2)
    cluster = '[[hosts]]\nlatency = "3 ms"\nstep_time = { exponential = "10 ms" }\n'
    for worker, at in zip((0, 3, 4), times, strict=True):
        cluster += f'[[failures]]\nworkers = [{worker}]\nat = "{at} ms"\n'
        if worker:
            cluster += f'back = "{at + gaps[worker - 3]} ms"\n'
    script = Script(optimizer=SGD, size=72, epochs=8, shuffle=True)
    summary = simulate(script, strategy, 6, cluster=cluster, seed=seed)
    assert summary["metrics"]["after"] < summary["metrics"]["before"]
    assert summary["samples"] > 0 and events(summary, "step")


@pytest.mark.parametrize("strategy", ["gossip", f"gossip:order={AFTER}", "choco"])
def test_gossip_request_to_a_replaced_neighbor_does_not_hang(simulate: Any, strategy: str) -> None:
    """A neighbor dies after it has published a round and is replaced before the next request. The replacement
    waits for the next epoch, which waits for the requester: so it must answer that it is not in this one."""
    cluster = '[[hosts]]\ncount = 1\nstep_time = "100 ms"\n[[hosts]]\nstep_time = "10 ms"\n'
    cluster += BACK.format(at=30, back=40)
    summary = simulate(Script(size=48, epochs=3), strategy, 2, cluster=cluster)
    assert summary["joined"] == 1
    steps = [line["node"] for line in events(summary, "step")]
    assert steps.count("worker 0") == 18 and steps.count("worker 1") in (12, 13)


# --- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "workers", "said"),
    [
        ("gossip:rong", 4, "gossip:rong: topology 'rong' is unknown"),
        ("gossip:0-0/0-1", 2, "its own neighbor"),
        ("gossip:0-1/2-3", 4, "disconnected topology"),
        ("gossip:0>1/1>2/2>0", 3, "unbalanced topology"),
        ("gossip:torus", 7, "an odd grid"),
        ("gossip:hypercube", 6, "not a power of two"),
        ("gossip:0-1/1-5", 3, "names worker 5"),
        ("gossip:order=now", 3, "order takes mix-while-computing or step-then-mix"),
        ("gossip+int8", 3, "gossip takes no codec"),
        ("choco:0", 3, "gamma must be auto, or more than 0"),
        ("choco:1.5", 3, "gamma must be auto, or more than 0"),
        ("choco:topology=exponential", 3, "use topology=exponential-all"),
        ("choco+dgc", 3, "compresses gradients only"),
    ],
)
def test_gossip_refuses_invalid_topologies_before_starting(strategy: str, workers: int, said: str) -> None:
    def never() -> None:
        raise AssertionError

    for how in (pr.run, pr.simulate):
        with pytest.raises(UsageError, match=said):
            how(never, strategy=strategy, workers=workers, runs=None)
