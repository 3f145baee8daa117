"""The laws of two levels: one strategy inside each site, another between the sites."""

from __future__ import annotations

import re
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.cli.entry import main
from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import Worker
from polyrhythm.model.vectors import split
from polyrhythm.session.context import session
from polyrhythm.strategies.reduce_ops import agree
from polyrhythm.strategies.rounds import Rounds
from polyrhythm.strategies.two_level import TwoLevel
from tests.support.combine import each_value
from tests.support.programs import ADAM, MOMENTUM, SGD, Script, distance, events, trained
from tests.support.saving import EPOCHS, script
from tests.support.strategies import stepping
from tests.support.traces import Trace, close, drift, mean


def at(*counts: int, links: str = "") -> str:
    """Sites with so many workers each, and what their links have, as the text of a cluster.toml."""
    groups = [
        f'[[hosts]]\ncount = {count}\nsite = "{site}"\n' for count, site in zip(counts, "abc", strict=False)
    ]
    sites = [
        f'[[sites]]\nname = "{site}"\n{links}\n' for _, site in zip(counts, "abc", strict=False) if links
    ]
    return "".join(groups + sites)


# Inside and between, where those of a site are together only now and then.
PAIRS = [
    "local:2 / local:4", "local:2,momentum=reset / diloco:4",
    "local:2,momentum=average / local:4,momentum=average",
    "average:2 / average:4", "average:2 / diloco:4", "local:2 / average:4+int8", "slowmo:2 / slowmo:4",
    "local:2+topk:0.3 / diloco:4+int4", "diloco:2,lr=0.9 / diloco:6", "slowmo:2+int8 / local:4",
    "local:2 / streaming-diloco:8,fragments=2,overlap=2",
    "diloco:2 / streaming-diloco:8,fragments=2,overlap=0+int8",
    "local:4 / local:4",
]  # fmt: skip
every_pair = pytest.mark.parametrize("pair", PAIRS)
OUTER = [
    "local:3", "local:3,momentum=average", "local:3,momentum=reset", "local:auto", "local:3+topk:0.3",
    "average:3", "average:3,momentum=average", "average:3+int8", "slowmo:3,alpha=0.8", "slowmo:3+randomk:0.4",
    "diloco:3", "diloco:3+bf16", "diloco:4+int4:rounding=stochastic,feedback=no", "diloco:3+powersgd",
    "streaming-diloco:6,fragments=3", "streaming-diloco:8,fragments=2,overlap=3,mix=0.2+topk:0.3",
    "streaming-diloco:4,fragments=2,overlap=0,mix=0+fp16",
]  # fmt: skip
every_outer = pytest.mark.parametrize("outer", OUTER)
SITES = {"1+2": [[0], [1, 2]], "2+2": [[0, 1], [2, 3]], "3+1+2": [[0, 1, 2], [3], [4, 5]]}
every_place = pytest.mark.parametrize("sites", SITES.values(), ids=list(SITES))


def between(world: Any) -> int:
    """What has left a site so far."""
    return sum(node.bytes_between for node in world.nodes.values())


def sizes(sites: list[list[int]]) -> tuple[int, ...]:
    return tuple(map(len, sites))


# --- what it is equal to ----------------------------------------------------------------------------


@each_value(("outer", OUTER), ("size", [48, 43]))
def test_one_worker_per_site_is_the_outer_strategy(simulate: Any, outer: str, size: int) -> None:
    """With nobody to step together with, a site is a worker: the same bits, whatever is between them."""
    program = Script(optimizer=MOMENTUM, size=size, epochs=3, shuffle=True, schedule=True)
    cluster = at(1, 1, 1)
    two, one = (simulate(program, each, 3, cluster=cluster) for each in (f"allreduce / {outer}", outer))
    assert two["digest"] == one["digest"] and two["metrics"] == one["metrics"]
    assert two["bytes_between_sites"] <= one["bytes_between_sites"]


def test_sites_are_counted_by_their_first_workers(simulate: Any) -> None:
    """Not by their places in the file, where a group may come first that has no worker in the end."""
    odd = '[[hosts]]\nsite = "b"\n[[hosts]]\ncount = 2\nsite = "a"\n[[hosts]]\ncount = 1\nsite = "b"\n'
    strategy = "allreduce / diloco:4+int4:rounding=stochastic,feedback=no"
    program = Script(optimizer=MOMENTUM, size=40)
    one, other = (simulate(program, strategy, 3, cluster=each) for each in (odd, at(2, 1)))
    assert one.summary == other.summary | {"folder": one["folder"]}


@each_value(
    (
        "outer",
        ["local:4", "average:4", "slowmo:4", "diloco:4+int8", "streaming-diloco:8,fragments=2,overlap=2"],
    ),
    ("inner", ["local:2", "average:4", "slowmo:2,beta=0"]),
    ("size", [48, 43]),
    # By examples inside, where gradients are as they come, and not between.
    where=lambda outer, inner, size: size == 48 or "average" not in inner or "average" in outer,
)
def test_averaging_inside_sites_of_one_worker_changes_nothing(
    simulate: Any, inner: str, outer: str, size: int
) -> None:
    """The mean of one is that one, to the last bit, however often it is taken."""
    if inner == "average:4" and "streaming" in outer:
        outer = outer.replace("overlap=2", "overlap=0")
    program = Script(optimizer=MOMENTUM, size=size, epochs=3, shuffle=True, schedule=True)
    two, one = (simulate(program, each, 3, cluster=at(1, 1, 1)) for each in (f"{inner} / {outer}", outer))
    assert two["digest"] == one["digest"] and two["metrics"] == one["metrics"]


@each_value(
    ("inner", ["allreduce", "local:1", "average:1"]),
    ("outer", ["local:1", "average:1", "local:1,momentum=average"]),
    ("size", [48, 50, 43]),
    # By examples inside, and not between.
    where=lambda outer, inner, size: size == 48 or inner != "average:1" or outer == "average:1",
)
def test_averaging_each_step_between_equal_sites_is_allreduce(
    simulate: Any, inner: str, outer: str, size: int
) -> None:
    """A mean of means of as many is the mean: with plain SGD, and in uneven rounds too."""
    if "momentum" in outer and inner != "allreduce":
        inner += ",momentum=average"
    program = Script(optimizer=SGD, size=size, epochs=3)
    law = trained(simulate(program, "allreduce", 4))
    assert distance(trained(simulate(program, f"{inner} / {outer}", 4, cluster=at(2, 2))), law) < 1e-12


@pytest.mark.parametrize("outer", ["local:4", "average:4", "slowmo:4", "diloco:4", "diloco:4+int8"])
@pytest.mark.parametrize("size", [48, 43])
def test_averaging_each_step_inside_is_allreduce_inside(simulate: Any, outer: str, size: int) -> None:
    """Of plain SGD: mean_i(w - lr g_i) = w - lr mean_i g_i. Within rounding: each rounds elsewhere."""
    program = Script(optimizer=SGD, size=size, epochs=3)
    two, one = (
        simulate(program, f"{each} / {outer}", 5, cluster=at(2, 3)) for each in ("local:1", "allreduce")
    )
    # What a codec rounds may fall to the other side, by less than its step.
    assert distance(trained(two), trained(one)) < (1e-3 if "+" in outer else 1e-12)


def test_averaging_each_step_inside_sites_has_the_exact_allreduce_bits(simulate: Any) -> None:
    slope = lambda rank, x: torch.full_like(x, float(4 * rank))  # noqa: E731
    step = lambda parameters: torch.optim.SGD(parameters, lr=0.25)  # noqa: E731
    two, one = (Trace(9, slope, step) for _ in range(2))
    simulate(two, "local:1 / local:3", 6, cluster=at(2, 4))
    simulate(one, "allreduce / local:3", 6, cluster=at(2, 4))
    assert all(all(map(torch.equal, two.x[rank], one.x[rank])) for rank in range(6))


@pytest.mark.parametrize("size", [48, 43])
def test_two_levels_with_the_same_period_equal_one_level(simulate: Any, monkeypatch: Any, size: int) -> None:
    """In one site to the last bit, and in sites of as many within the rounding of a mean of means."""
    program = Script(optimizer=MOMENTUM, size=size, epochs=3, shuffle=True)
    one = simulate(program, "local:4", 4)
    two = simulate(program, "local:4 / local:4", 4, cluster=at(2, 2))
    assert distance(trained(two), trained(one)) < 1e-12
    monkeypatch.setattr(TwoLevel, "check", lambda *_: None)  # it would say: use local:4
    assert simulate(program, "local:4 / local:4", 4, cluster=at(4))["digest"] == one["digest"]


@every_place
@pytest.mark.parametrize("momentum", ["keep", "reset"])
def test_hierarchical_local_sgd_by_hand(simulate: Any, sites: list[list[int]], momentum: str) -> None:
    """Lin et al. 2018, to the last bit: each worker counts once in its site, and each site once."""
    workers, inner, outer = sum(sizes(sites)), 2, 6
    inside = "local:2,momentum=reset" if momentum == "reset" else "local:2"
    trace = Trace(14, optimizer=MOMENTUM, look=True)
    simulate(trace, f"{inside} / local:6", workers, cluster=at(*sizes(sites)))
    x = [torch.ones(12, dtype=torch.float64) for _ in range(workers)]
    steps = [MOMENTUM([each]) for each in x]
    for step in range(1, trace.count + 1):
        for rank, optimizer in enumerate(steps):
            x[rank].grad = drift(rank, x[rank])
            optimizer.step()
        means = [mean([x[rank].clone() for rank in site]) for site in sites]
        for site, agreed in zip(sites, means, strict=True):
            for rank in site if step % inner == 0 else ():
                x[rank].copy_(agreed)
                if momentum == "reset":
                    steps[rank] = MOMENTUM([x[rank]])
        together = mean(means)
        for each in x if step % outer == 0 else ():
            each.copy_(together)
        assert all(torch.equal(trace.x[rank][step - 1], x[rank]) for rank in range(workers)), step
        # The mean over the sites, and not only over their first workers, at any time.
        assert all(torch.equal(trace.shown[rank][step - 1], together) for rank in range(workers)), step


@each_value(
    ("sites", [pytest.param(each, id=str(each)) for each in SITES.values()]),
    ("inner", ["allreduce", "local:1", "average:1"]),
    ("size", [48, 50, 43]),
)
def test_example_weighted_averaging_of_unequal_sites_is_allreduce(
    simulate: Any, sites: list[list[int]], inner: str, size: int
) -> None:
    """Under `average` a site counts by the examples of its workers, so that every example counts alike."""
    program = Script(optimizer=SGD, size=size, epochs=3)
    workers = sum(sizes(sites))
    law = trained(simulate(program, "allreduce", workers))
    two = simulate(program, f"{inner} / average:1", workers, cluster=at(*sizes(sites)))
    assert distance(trained(two), law) < 1e-12


def test_unweighted_averaging_counts_each_site_once(simulate: Any) -> None:
    """Under the others each site counts once: x <- mean over sites of the mean over its workers."""
    slope = lambda rank, x: torch.full_like(x, float(rank))  # noqa: E731
    trace = Trace(1, slope, begin=torch.zeros(2, dtype=torch.float64))
    simulate(trace, "allreduce / local:1", 4, cluster=at(3, 1))
    law = -0.1 * ((0 + 1 + 2) / 3 + 3) / 2
    assert all(close(trace.x[rank][-1], torch.full((2,), law, dtype=torch.float64)) for rank in range(4))


def test_a_site_is_a_worker_with_a_larger_batch(simulate: Any) -> None:
    """DiLoCo between sites that average gradients is DiLoCo of as many workers with those gradients."""

    def slope(rank: int, x: torch.Tensor) -> torch.Tensor:
        return (0.3 + rank) * x - rank * torch.linspace(-1, 2, len(x), dtype=x.dtype)

    def pooled(rank: int, x: torch.Tensor) -> torch.Tensor:
        return (slope(2 * rank, x) + slope(2 * rank + 1, x)) / 2

    two, one = Trace(20, slope, MOMENTUM), Trace(20, pooled, MOMENTUM)
    simulate(two, "allreduce / diloco:4", 4, cluster=at(2, 2))
    simulate(one, "diloco:4", 2)
    assert all(close(a, b) for a, b in zip(two.x[3], one.x[1], strict=True))


# --- inside and between -----------------------------------------------------------------------------


def residuals(worker: Any) -> list[torch.Tensor]:
    """What a worker's codec has not sent yet."""
    sender = worker.reducer.sender
    return [] if sender is None else [part.clone() for part in sender.residual]


@every_outer
@every_place
def test_inside_a_site_all_are_equal_after_every_step(
    simulate: Any, outer: str, sites: list[list[int]]
) -> None:
    """Bit for bit, what codecs have left out included; and at the end all are equal everywhere."""
    trace = Trace(17, optimizer=MOMENTUM)

    def main() -> None:
        trace()
        residual[session.get().rank] = residuals(session.get()._worker.across)

    residual: dict[int, Any] = {}
    simulate(main, f"allreduce / {outer}", sum(sizes(sites)), cluster=at(*sizes(sites)))
    for site in sites:
        for rank in site[1:]:
            for step, own in enumerate(trace.x[rank]):
                assert torch.equal(own, trace.x[site[0]][step]), (rank, step)
            assert all(map(torch.equal, residual[rank], residual[site[0]]))


@every_pair
@every_place
def test_at_the_end_of_a_round_all_of_a_site_are_equal(
    simulate: Any, pair: str, sites: list[list[int]]
) -> None:
    """Bit for bit, whatever is inside, and so is all that is left to send between sites."""
    trace = Trace(17, optimizer=MOMENTUM)
    residual: dict[int, list[Any]] = {}

    def keep(rank: int, *_: object) -> None:
        residual.setdefault(rank, []).append(residuals(session.get()._worker.across))

    trace.before = keep
    simulate(trace, pair, sum(sizes(sites)), cluster=at(*sizes(sites)))
    within, across = pr.parse(pair).parts
    for site in sites:
        for rank in site[1:]:
            for step, own in enumerate(trace.x[rank], 1):
                if step % within.traits.sync_period == 0:
                    assert torch.equal(own, trace.x[site[0]][step - 1]), (rank, step)
            assert all(
                all(map(torch.equal, *both)) for both in zip(residual[rank], residual[site[0]], strict=True)
            )
    if isinstance(across, Rounds) and not across.name.startswith("streaming"):
        for step in range(across.traits.sync_period, 18, across.traits.sync_period):
            assert all(torch.equal(trace.x[rank][step - 1], trace.x[0][step - 1]) for rank in trace.x)


@pytest.mark.parametrize("strategy", [*(f"allreduce / {outer}" for outer in OUTER), *PAIRS])
def test_two_level_consensus_is_the_same_on_all_workers(simulate: Any, strategy: str) -> None:
    """The consensus is one model, also in the middle of a round, and it is what the run brings home."""
    shown: dict[int, list[torch.Tensor]] = {}
    final: dict[int, torch.Tensor] = {}

    def main() -> None:
        trace = Trace(7, optimizer=MOMENTUM, look=True)
        trace()
        here = session.get()
        shown[here.rank] = trace.shown[here.rank]
        here.close, close_ = lambda: (close_(), final.update({here.rank: flat(here)})), here.close

    def flat(here: Any) -> torch.Tensor:
        return here._replica.parameters[0].clone()

    summary = simulate(main, strategy, 5, cluster=at(2, 3))
    for one, other in combinations(range(5), 2):
        assert all(map(torch.equal, shown[one], shown[other]))
        assert torch.equal(final[one], final[other])
    assert close(trained(summary)["x"], shown[0][-1], 1e-12) or "+" in strategy or "auto" in strategy


@each_value(
    ("outer", ["local:4", "diloco:4", "slowmo:4+int8", "average:4", "diloco:4+topk:0.3"]),
    ("collective", ["auto", "ring"]),
    where=lambda outer, collective: collective == "auto" or "+" not in outer,  # codes are gathered
)
def test_between_rounds_nothing_passes_between_sites(simulate: Any, outer: str, collective: str) -> None:
    """Bytes leave a site at the start, at the end of a round, and never else; inside they do every step."""
    passed: dict[int, list[float]] = {}
    sent: dict[int, list[int]] = {}

    class Counting(Trace):
        def __call__(self) -> None:
            self.before = lambda rank, step, _: (
                passed.setdefault(rank, []).append(between(session.get()._node.world)),
                sent.setdefault(rank, []).append(session.get()._node.bytes_sent),
            )
            super().__call__()

    simulate(Counting(13), f"allreduce / {outer}", 4, cluster=at(2, 2), collective=collective)
    for rank in range(4):
        moved = [now > then for then, now in zip(passed[rank], passed[rank][1:], strict=False)]
        assert moved == [step % 4 == 0 for step in range(1, 13)]
        assert all(now > then for then, now in zip(sent[rank], sent[rank][1:], strict=False))


def test_no_bytes_are_sent_between_inner_rounds(simulate: Any) -> None:
    """Every second step inside, every fourth between, and in the others nobody sends anything."""
    trace = Trace(13)
    simulate(trace, "local:2 / diloco:4", 4, cluster=at(2, 2))
    inside, between = 2 * 2 * 12 * 8, 2 * 12 * 8  # to average in two sites; between them, and
    passed = [0, inside, 0, inside + between + 2 * 12 * 8]  # to those who are not the first of their site
    assert trace.sent_by_step()[1:9] == [passed[(step - 1) % 4] for step in range(3, 11)]


def test_buckets_are_agreed_on_inside_a_site(simulate: Any) -> None:
    """In which order gradients come is told to the own site only."""
    passed: list[float] = []

    def wide() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(5, 20_000), torch.nn.Linear(20_000, 3)).double()

    def main() -> None:
        here = pr.init()
        model = wide()
        model, optimizer = here.prepare(model, SGD(model.parameters()))
        assert len(here._replica.gradients.buckets) > 1
        for _ in range(3):
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            if here._replica.steps < 3:  # after the last step comes the end
                passed.append(between(here._node.world))

    simulate(main, "allreduce / local:9", 4, cluster=at(2, 2))
    assert len(set(passed)) == 1


def test_two_levels_keep_separate_residuals(simulate: Any) -> None:
    """Both have a codec with a residual: neither sees the other's."""

    def main() -> None:
        Script(size=40)()
        worker = session.get()._worker
        inside, between = residuals(worker.within)[0], residuals(worker.across)[0]
        assert inside.abs().sum() > 0 and between.abs().sum() > 0
        assert not torch.equal(inside, between)

    simulate(main, "allreduce+topk:0.3 / diloco:4+topk:0.2", 4, cluster=at(2, 2))


@each_value(
    ("outer", ["slowmo:4", "diloco:4", "diloco:4+topk:0.2", "local:4+int8"]),
    ("inner", ["allreduce", "allreduce+topk:0.1", "local:2", "slowmo:2", "local:2+topk:0.1"]),
)
def test_interrupted_two_level_run_resumes_exactly(inner: str, outer: str, tmp_path: Path) -> None:
    """What both levels remember is saved and loaded."""
    (tmp_path / "cluster.toml").write_text(at(1, 2))

    def train_steps(begin: int, end: int) -> str:
        return pr.simulate(
            lambda: script(tmp_path, begin, end), workers=3, strategy=f"{inner} / {outer}", runs=None,
            threads=1, cluster=tmp_path / "cluster.toml",
        )["digest"]  # fmt: skip

    whole = train_steps(0, EPOCHS)
    train_steps(0, EPOCHS // 2)
    assert train_steps(EPOCHS // 2, EPOCHS) == whole


# --- worlds -----------------------------------------------------------------------------------------

WAYS = [
    ("auto", "unix:"), ("direct", "unix:"), ("ring", "unix:"), ("hierarchical", "unix:"),
    ("direct", "tcp:127.0.0.1:0"), ("ring", "tcp:127.0.0.1:0"),
]  # fmt: skip


@each_value(
    ("way, listen", WAYS),
    (
        "strategy",
        [
            "allreduce / diloco:4",
            "allreduce+bf16 / streaming-diloco:6,fragments=3,overlap=1",
            "local:2 / slowmo:4",
        ],
    ),
)
def test_every_collective_trains_the_same_two_level_model(
    tmp_path: Path, strategy: str, way: str, listen: str
) -> None:
    """Bit for bit where sums are taken in rank order, and round a ring as in a simulated one."""
    (tmp_path / "cluster.toml").write_text(at(2, 3))
    program = Script(optimizer=MOMENTUM, size=50, shuffle=True)
    options: dict[str, Any] = {
        "workers": 5, "strategy": strategy, "runs": tmp_path, "threads": 1,
        "cluster": tmp_path / "cluster.toml",
    }  # fmt: skip
    law = pr.simulate(program, collective="ring" if way == "ring" else "auto", **options)
    real = pr.run(program, collective=way, listen=listen, **options)
    if way == "hierarchical":
        assert distance(trained(law), trained(real)) < (1e-2 if "bf16" in strategy else 1e-12)
        return
    for key in ("digest", "bytes_sent", "bytes_between_sites"):
        assert real[key] == law[key], key


SERVED = 'servers = { site = "b" }\n'


@each_value(
    (
        "strategy, servers, cluster",
        [
            ("allreduce", 0, at(2, 3)),
            ("allreduce+topk:0.3", 0, at(2, 1, 2)),
            ("gossip:complete", 0, at(2, 3)),
            ("noloco:2", 0, at(2, 3)),
            ("choco+int8", 0, at(4, 1)),
            ("sync", 2, at(2, 3)),  # at none of the sites: all that they send and get passes
            ("sync", 2, SERVED + at(2, 3)),
            ("sync", "colocated", at(2, 3)),
            ("allreduce+int8 / diloco:4+int4", 0, at(2, 3)),
            ("local:2 / average:4", 0, at(1, 3, 1)),
        ],
    ),
    ("listen", ["unix:", "tcp:127.0.0.1:0"]),
)
def test_bytes_between_sites_match_in_simulator_and_processes(
    strategy: str, servers: Any, cluster: str, listen: str, tmp_path: Path
) -> None:
    """Of tensors, without headers, as `bytes_sent` is: the same number as in simulation."""
    (tmp_path / "cluster.toml").write_text(cluster)
    program = Script(optimizer=SGD, size=43)
    options: dict[str, Any] = {
        "workers": 5, "strategy": strategy, "servers": servers, "runs": None, "threads": 1,
        "cluster": tmp_path / "cluster.toml",
    }  # fmt: skip
    law, real = pr.simulate(program, **options), pr.run(program, listen=listen, **options)
    assert 0 < real["bytes_between_sites"] < real["bytes_sent"] or servers == 2
    for key in ("bytes_sent", "bytes_between_sites"):
        assert real[key] == law[key], key


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_allreduce_bytes_between_sites_match_the_slice_sizes(simulate: Any, workers: int) -> None:
    """To each elsewhere its part of that one's slice, and the own one; to the byte, whatever their sizes."""
    count, steps, home = 7, 4, workers // 2
    trace = Trace(steps, begin=torch.ones(count, dtype=torch.float64))
    summary = simulate(trace, "allreduce", workers, cluster=at(home, workers - home))
    slices = [high - low for low, high in split(count, workers)]
    flags = [high - low for low, high in split(1, workers)]  # whether there is a gradient, in 32 bits
    pairs = [(one, two) for one in range(home) for two in range(home, workers)]
    passing = sum(8 * (slices[one] + slices[two]) + 4 * (flags[one] + flags[two]) for one, two in pairs)
    start = 8 * count * (workers - home)
    assert summary["bytes_between_sites"] == start + steps * 2 * passing


def test_summary_without_sites_has_no_bytes_between_sites(simulate: Any) -> None:
    assert "bytes_between_sites" not in simulate(Script(), "allreduce", 2)


def test_cli_reports_the_bytes_between_sites(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(at(2, 1))
    train = str(Path(__file__).parents[1] / "scripts" / "train.py")
    for command in ("run", "simulate"):
        how = ["-n", "3", "-s", "local:2 / diloco:4", "--cluster", str(cluster), "--runs", str(tmp_path)]
        assert main([command, train, *how, "-q"]) == 0
        assert re.search(r"^between sites: [0-9.]+ k?B$", capfd.readouterr().err, re.MULTILINE)


def sum_over_parts(folder: Path, worker: Worker) -> None:
    """Sums ranks over parts of the workers that overlap, many at once; a file counts the steps."""
    me, group = worker.node.me, worker.group
    everyone = list(group.members)
    parts = [everyone[:2], everyone[1:], everyone[::2], everyone[1:2], everyone]
    mine = [group.split(part) for part in parts if me in part]
    assert [each is group for each in mine] == [each.size == len(everyone) for each in mine]
    assert all(group.split(each.members) is each for each in mine)
    values = [torch.full((40,), 1.0 + me.rank, dtype=torch.float64) for _ in mine]
    tasks = [each.begin_all_reduce(value) for each, value in zip(mine, values, strict=True)]
    for task in reversed(tasks):
        task.join()
    for each, value in zip(mine, values, strict=True):
        assert each.members[each.rank] == me
        assert value.tolist() == [sum(1.0 + peer.rank for peer in each.members)] * 40
        assert agree(each, each.rank, op="max") == [each.size - 1]
        told = torch.tensor([float(me.rank)])
        each.broadcast(told, root=each.size - 1)
        assert told.item() == each.members[-1].rank
    worker.replica.apply()
    with (folder / str(me.rank)).open("a") as file:
        file.write("step ")


@pytest.mark.parametrize(
    "world", ["simulated", "simulated ring", *(f"{way} {listen}" for way, listen in WAYS)]
)
def test_collectives_of_overlapping_worker_groups_do_not_interfere(world: str, tmp_path: Path) -> None:
    """Parts that overlap do not disturb each other, whatever the order in which they are waited for."""
    made = stepping("parts", partial(sum_over_parts, tmp_path))
    way, _, listen = world.partition(" ")
    try:
        if way == "simulated":
            pr.simulate(Trace(3), workers=4, strategy=made, threads=1, collective=listen or "auto")
        else:
            pr.run(Trace(3), workers=4, strategy=made, threads=1, runs=None, collective=way, listen=listen)
    finally:
        del pr.Strategy.registry["parts"]
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("0123", "step " * 3)


def test_one_site_does_not_wait_for_another(simulate: Any) -> None:
    """Between rounds a slow site holds nobody up; in the end all have taken the same steps."""
    slow = (
        '[[hosts]]\ncount = 2\nsite = "a"\nstep_time = "10 ms"\n[[hosts]]\nsite = "b"\nstep_time = "30 ms"\n'
    )
    summary = simulate(Trace(8), "allreduce / local:4", 4, cluster=slow)
    ends = {line["node"]: [] for line in events(summary, "step")}
    for line in events(summary, "step"):
        ends[line["node"]].append(line["t"])
    assert ends["worker 0"][:3] == pytest.approx([0.01, 0.02, 0.03])
    assert ends["worker 3"][:3] == pytest.approx([0.03, 0.06, 0.09])
    assert ends["worker 0"][3] == pytest.approx(0.12) and ends["worker 0"][7] == pytest.approx(0.24)


def test_a_slow_link_between_sites_costs_time_only_at_outer_rounds(simulate: Any) -> None:
    """Steps inside take no notice of it; a round takes what the bytes of one worker per site take."""
    size = 1000
    trace = Trace(8, begin=torch.ones(size, dtype=torch.float64))
    links = 'bandwidth = "8 kB/s"\nlatency = "50 ms"'
    start = 2 * 0.1 + 8 * size / 8000  # the parameters of worker 0, asked for by the other site's first
    exchange = 2 * 0.1 + 8 * size / 8000  # there and back, half of the vector each
    summary = simulate(trace, "allreduce / local:4", 6, cluster=at(3, 3, links=links))
    assert summary["wall_s"] == pytest.approx(start + 8 * 0.01 + 2 * exchange)
    everyone = simulate(trace, "local:4", 6, cluster=at(3, 3, links=links))
    assert everyone["wall_s"] == pytest.approx(
        2 * 0.1 + 3 * 8 * size / 8000 + 8 * 0.01 + 2 * (0.2 + 2 * 3 * 3 / 6 * 8 * size / 8000)
    )


def test_streaming_diloco_between_sites_overlaps_a_slow_link(simulate: Any) -> None:
    """What streams between the sites holds no step up if it takes no longer than the steps in between."""
    links = 'bandwidth = "1 MB/s"\nlatency = "5 ms"'  # the exchange of a fragment takes 20 ms and a little
    strategy = "allreduce / streaming-diloco:8,fragments=2,overlap=3"
    ends = {}
    for cluster in (at(2, 2), at(2, 2, links=links)):
        summary = simulate(Trace(20), strategy, 4, cluster=cluster)
        times = [line["t"] for line in events(summary, "step") if line["node"] == "worker 3"]
        ends[cluster] = [round(now - times[0], 9) for now in times]
    free, slow = ends.values()
    assert slow == free and free[-1] == pytest.approx(0.19)


def test_codes_inside_may_go_round_a_ring(simulate: Any, tmp_path: Path) -> None:
    """Inside a site a codec may hop as it does among all; the same bits on processes."""
    program = Script(optimizer=SGD, size=40)
    (tmp_path / "cluster.toml").write_text(at(2, 3))
    law, real = (
        how(
            program, workers=5, strategy="allreduce+int8 / diloco:4", collective="ring", runs=tmp_path,
            threads=1, cluster=tmp_path / "cluster.toml",
        )
        for how in (pr.simulate, pr.run)
    )  # fmt: skip
    for key in ("digest", "bytes_sent", "bytes_between_sites"):
        assert law[key] == real[key], key


@pytest.mark.slow
def test_diloco_between_sites_sends_under_a_tenth_of_the_allreduce_bytes(simulate: Any) -> None:
    """DiLoCo between two sites on links of 10 Mbit/s sends less than a tenth, and is sooner there."""
    links = 'bandwidth = "10 Mbit/s"\nlatency = "20 ms"'
    program = Script(optimizer=ADAM, size=400, epochs=6, shuffle=True)
    two, one = (
        simulate(program, each, 4, cluster=at(2, 2, links=links))
        for each in ("allreduce / diloco:20", "allreduce")
    )
    assert two["metrics"]["after"] < one["metrics"]["after"] * 1.05
    assert two["bytes_between_sites"] < one["bytes_between_sites"] / 10
    assert two["wall_s"] < one["wall_s"] / 3


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("async / diloco", "inside a site use allreduce, average, diloco, local or slowmo, not"),
        ("gossip / diloco", "not gossip"),
        ("postlocal:3 / diloco:3", "not postlocal:3"),
        ("streaming-diloco / diloco", "not streaming-diloco"),
        ("local:4 / diloco:50", "multiple of the inner one, 4, and is 50; use 48 or 52"),
        ("local:8 / local:4", "multiple of the inner one, 8, and is 4; use 8"),
        ("local:3 / streaming-diloco:8,fragments=2", "multiple of the inner one, 3, and is 4; use 3 or 6"),
        ("local:2 / streaming-diloco:8,fragments=2", "a multiple of the inner period, 2, and is 1"),
        ("local:auto / diloco", "neither period can be auto"),
        ("local:2 / local:auto", "neither period can be auto"),
        ("local:2 / local:4,momentum=average", "under local:2 each worker has its own; use local"),
        ("diloco:2 / local:4,momentum=average", "and under diloco:2 each worker has its own"),
        ("allreduce / allreduce", "between sites use average, diloco, local, slowmo or streaming-"),
        ("allreduce / ssp:2", "not ssp:2"),
        ("allreduce / postlocal:3", "not postlocal:3"),
        ("allreduce / local:3 / diloco", "takes two levels at most"),
        ("allreduce / dilco:50", "unknown strategy 'dilco'; did you mean 'diloco'?"),
        ("allreduce/dilco:50", "unknown strategy 'dilco'; did you mean 'diloco'?"),
        ("allreduce+bf61 / diloco", "unknown codec 'bf61'"),
        ("allreduce / diloco:0", "period must be 1 or more"),
        ("allreduce /", "no strategy is named"),
        ("allreduce / diloco+dgc", "dgc compresses gradients only; diloco sends parameter updates"),
    ],
)  # fmt: skip
def test_two_level_strategies_refuse_invalid_combinations(strategy: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        pr.parse(strategy)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@each_value(
    (
        "cluster, workers, message",
        [
            (
                None,
                4,
                r"allreduce / diloco:\d+ needs the site of each worker: give a cluster file \(--cluster\)",
            ),
            ("[[hosts]]", 4, 'in which every group of hosts has its site = "name"'),
            (at(2, 2), 2, "the site b has no worker: workers are assigned to the groups of hosts in order"),
            (at(4), 4, "there is only one site, a; use allreduce, or name two"),
        ],
    ),
    ("how", [pr.simulate, pr.run]),
    ("chosen", ["outside", "in the script"]),
)
def test_two_level_strategies_refuse_missing_or_unfit_sites(
    how: Any, cluster: str | None, workers: int, message: str, chosen: str, tmp_path: Path
) -> None:
    """Told before any process starts, if the strategy is known by then."""
    options: dict[str, Any] = {"strategy": "allreduce / diloco"} if chosen == "outside" else {}
    if cluster is not None:
        (tmp_path / "cluster.toml").write_text(cluster)
        options["cluster"] = tmp_path / "cluster.toml"

    def main() -> None:
        assert chosen == "in the script"
        pr.init("allreduce / diloco")

    with pytest.raises(UsageError, match=message):
        how(main, workers=workers, runs=tmp_path / "runs", threads=1, **options)


def test_codes_between_sites_do_not_go_round_a_ring(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(at(2, 2))
    with pytest.raises(UsageError, match="the codes of int8 are gathered between sites"):
        pr.simulate(
            Script(), workers=4, strategy="allreduce / diloco+int8", collective="ring",
            cluster=tmp_path / "cluster.toml",
        )  # fmt: skip
