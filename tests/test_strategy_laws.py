"""Laws that a wrong update rule breaks: of every strategy, with every row of its fields.

Conformance (`tests/test_conformance.py`) shows that a strategy trains, ends and leaves nothing behind. One
that takes the maximum in place of the mean does all that too. Here workers go down planes: their gradients
depend on the rank and the step, and not on the parameters.

Every row, also that of a new strategy, joins three laws by itself:

- superposition: the displacement is linear in the gradients; a maximum, a median, a sign or a clip is not
- symmetry: it does not matter which worker has which gradients; it does if one worker counts more
- scale: workers with equal gradients move as far as plain SGD does alone, or N times as far where each step
  counts by itself; they do not if a sum stands where a mean belongs, or if a factor is wrong

A row that breaks one of them by design is in `EXCEPTIONS`, with the reason. These laws cannot tell a momentum
of 0.9 from one of 0.8, so every strategy also has an entry in `LAWS`: its rule, written down a second time in
`tests/support/references`, must give the parameters of every worker after every step, to rounding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.core.group import Group
from polyrhythm.core.registry import describe
from polyrhythm.core.strategy import Strategy
from polyrhythm.core.worker import Worker
from polyrhythm.strategies.diloco import DiLoCo, DiLoCoWorker
from polyrhythm.strategies.local_sgd import LocalSGD
from polyrhythm.strategies.rounds import AveragingWorker
from tests.support.references.descent import SIZE, Descent, Reference, Run, zero
from tests.support.references.peers import (
    ad_psgd,
    gossip,
    gradient_push,
    hogwild,
    noloco,
    threshold_broadcast,
)
from tests.support.references.rounds import synchronous_rounds
from tests.support.references.server import parameter_server
from tests.support.rows import ROWS as ALL
from tests.support.rows import Row
from tests.support.strategies import stepping

# What pins the update rule of each strategy: a reference, or, as a text, a test that does so in another way,
# as "tests/strategies/test_outer_optimizer_laws.py::test_diloco_by_hand" would.
LAWS: dict[str, Reference | str] = {
    "adpsgd": ad_psgd,
    "allreduce": synchronous_rounds,
    "async": parameter_server,
    "average": synchronous_rounds,
    "backup": parameter_server,
    "bmuf": synchronous_rounds,
    "broadcast": threshold_broadcast,
    "choco": gossip,
    "dana-slim": parameter_server,
    "dana-zero": parameter_server,
    "dc-asgd": parameter_server,
    "delayed-nesterov": parameter_server,
    "diloco": synchronous_rounds,
    "easgd": parameter_server,
    "gap-aware": parameter_server,
    "gossip": gossip,
    "hogwild": hogwild,
    "local": synchronous_rounds,
    "noloco": noloco,
    "ormo": parameter_server,
    "postlocal": synchronous_rounds,
    "push": gradient_push,
    "slowmo": synchronous_rounds,
    "softsync": parameter_server,
    "ssp": parameter_server,
    "streaming-diloco": synchronous_rounds,
    "sync": parameter_server,
}
ROWS = [row for row in ALL if "+" not in row.strategy]
# Fields that conformance does not set: here they are cheap.
MORE = [
    Row("diloco:4,lr=0.5,beta=0.8"),
    Row("slowmo:4,beta=0.7,momentum=reset"),
    Row("streaming-diloco:8,fragments=2,overlap=3,mix=0.1"),
    Row("streaming-diloco:4,fragments=4,overlap=0,mix=0"),
    Row("choco:0.5,topology=complete"),
    Row("noloco:3,lr=0.5,mu=0.3"),
    Row("async:weight=exp,damping=0.3,clip=2"),
    Row("softsync:2,weight=1/tau,reduce=sum"),
    Row("ssp:1,weight=1/tau,discard=3", 2),
    Row("dc-asgd:0.5,weight=exp", 3),
    Row("gap-aware:max_staleness=2", 2),
    Row("dana-slim:max_staleness=1,prefetch=yes", 2),
    Row("ormo:max_staleness=2,weight=exp", 2),
    Row("easgd:2,alpha=0.3,max_staleness=1", 3),
    Row("delayed-nesterov:2,lr=0.5,beta=0.6,weight=1/tau"),
    Row("broadcast:0.05,reduce=mean"),
    Row("slowmo:2,momentum=average / slowmo:4"),
    Row("gossip:complete"),
    Row("gossip:0-1/0-2/0-3/1-2", least=4),
    Row("choco:0.7,topology=0-1/1-2/2-3", least=4),
    Row("push:1,fanout=2", least=3),
]

LOOSE = '[[hosts]]\nstep_time = { exponential = "10 ms" }\n'  # workers of different speeds
DELAYED = LOOSE + 'latency = "2 ms"\n'


def noise(seed: int, workers: int, steps: int) -> Tensor:
    return torch.randn(workers, steps, SIZE, generator=torch.Generator().manual_seed(seed)).double()


class Runs:
    """Simulates rows; each kind of gradients once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.displacement = cache(self._displacement)

    def run(self, row: Row, descent: Descent) -> Run:
        strategy, workers = pr.parse(row.strategy), len(descent.gradients)
        cluster = row.cluster
        if not strategy.traits.lockstep:
            cluster = self.folder / "cluster.toml"
            cluster.write_text(LOOSE if strategy.traits.one_host else DELAYED)
        summary = pr.simulate(
            descent, workers=workers, strategy=row.strategy, servers=row.servers, cluster=cluster,
            runs=self.folder, threads=1,
        )  # fmt: skip
        sites = [[0], list(range(1, workers))] if row.cluster else [list(range(workers))]
        return Run(strategy, descent, summary, sites)

    def _displacement(self, row: Row, kind: str) -> Tensor:
        """From begin to end of a run of three workers with these gradients."""
        g, h = noise(1, 3, 5), noise(2, 3, 5)
        gradients = {
            "g": g, "h": h, "2g - 3h": 2 * g - 3 * h,
            "exchanged": g[[0, 2, 1] if row.cluster else [2, 1, 0]],  # inside a site, if there are sites
            "equal": g[:1].expand(3, -1, -1),
        }  # fmt: skip
        run = self.run(row, Descent(gradients[kind], momentum=momentum(row)))
        return run.result - run.begin


def momentum(row: Row) -> float:
    """None where servers may have it: there it depends on the order in which gradients arrive."""
    return 0.8 if pr.parse(row.strategy).traits.lockstep else 0.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("laws"))


def check_same(found: Tensor, law: Tensor, what: str) -> None:
    off = float((found - law).abs().max() / law.abs().max())
    assert off <= 1e-9, (
        f"{what}: off by {off:.2g} of the largest number. If the strategy breaks this law by design, enter "
        "it in EXCEPTIONS with the reason; symmetry also fails if `finish` leaves the workers apart"
    )


# --- three laws that every row joins ----------------------------------------------------------------------


def superposition(runs: Runs, row: Row) -> None:
    g, h, sum_ = (runs.displacement(row, kind) for kind in ("g", "h", "2g - 3h"))
    check_same(sum_, 2 * g - 3 * h, "superposition: D(2g - 3h) against 2 D(g) - 3 D(h)")


def symmetry(runs: Runs, row: Row) -> None:
    found, law = runs.displacement(row, "exchanged"), runs.displacement(row, "g")
    check_same(found, law, "symmetry: workers exchanged their gradients")


# The asynchronous strategies that apply the step of each worker by itself, and not a mean over workers.
EACH_STEP_COUNTS = {"async", "ssp", "dana-slim", "dana-zero", "ormo", "hogwild"}


def scale(runs: Runs, row: Row) -> None:
    alone, x, b = Descent(noise(1, 3, 5)[:1], momentum=momentum(row)), zero(), zero()
    for step, g in enumerate(alone.gradients[0], 1):
        x, b = alone.sgd(x, b, g, step)
    strategy, found = pr.parse(row.strategy), runs.displacement(row, "equal")
    alike = strategy.traits.lockstep or strategy.name not in EACH_STEP_COUNTS
    times = 1 if alike else 3
    check_same(found, times * x, f"scale: 3 workers with equal gradients against {times} times SGD alone")


Law = Callable[[Runs, Row], None]
STALE = "what a gradient counts depends on its staleness, and workers have different speeds"
BY_SPEED = {
    "dc-asgd": STALE,
    "gap-aware": STALE,
    "weight=": STALE,
    "discard=": STALE,
    "^backup(?!:0)": "the gradients of slow workers are dropped",
    "softsync": "when workers leave, groups are smaller, and a gradient in them counts more",
    "easgd(?!:max_staleness=0)": "the centre moves more often towards fast workers",
    "delayed-nesterov:": "an early push is in the momentum of more rounds than a late one",
}
EXCEPTIONS: dict[Law, dict[str, str]] = {
    superposition: {
        "dc-asgd": "the correction has the square of the gradient",
        "gap-aware": "the gradient is divided by the distance that parameters have moved",
        "broadcast": "only whole pulses are sent",
        "clip=": "long gradients are shortened",
    },
    symmetry: BY_SPEED,
    scale: BY_SPEED
    | {
        "slowmo:|diloco|noloco:|delayed-nesterov|bmuf": "an outer optimizer takes longer or shorter steps",
        "easgd": "the centre follows the workers slowly",
        "broadcast": "only whole pulses are sent",
        "clip=": "long gradients are shortened",
    },
}


def excepted(law: Law, row: Row) -> bool:
    return any(re.search(pattern, str(row)) for pattern in EXCEPTIONS[law])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_on_a_plane(runs: Runs, row: Row) -> None:
    """A row obeys each law, or the table of exceptions says why not; then it does break it."""
    for law in EXCEPTIONS:
        if not excepted(law, row):
            law(runs, row)
        else:
            with pytest.raises(AssertionError, match=f"^{law.__name__}: "):
                law(runs, row)


# --- the rule itself --------------------------------------------------------------------------------------


def reference(row: Row) -> Reference | None:
    """The reference that says where workers are under this row, if all of its levels have the same one."""
    found = {LAWS.get(level.name) for level in pr.parse(row.strategy).parts}
    law = found.pop()
    return None if found or law is None or isinstance(law, str) else law


def check_rule(runs: Runs, row: Row, workers: int, law: Reference) -> None:
    steps = 11
    sizes = torch.randint(1, 4, (workers, steps), generator=torch.Generator().manual_seed(3))
    descent = Descent(
        noise(4, workers, steps), lambda step: 0.1 if step < 7 else 0.05, momentum=0.8, decay=0.05,
        examples=sizes if pr.parse(row.strategy).traits.lockstep else None,
    )  # fmt: skip
    run = runs.run(row, descent)
    expected = law(run)
    for step, rank in itertools.product(range(steps + 1), range(workers)):
        found = run.descent.seen[rank][step]
        check_same(found, expected.seen[rank][step], f"worker {rank} after step {step}")
    check_same(run.result, expected.result, "the result")


# A ring of three is complete, and of an odd number one has no partner: graphs are for both.
SIZES = [
    (row, workers)
    for row in [*ROWS, *MORE]
    if (law := reference(row))
    for workers in ([3, 4] if law in (ad_psgd, gossip, gradient_push, noloco) else [4])
    if workers >= row.least
]


@pytest.mark.parametrize(("row", "workers"), SIZES, ids=str)
def test_every_step_is_by_the_rule(runs: Runs, row: Row, workers: int) -> None:
    """With momentum, decay, two parameter groups, a falling rate and batches of unequal size."""
    law = reference(row)
    assert law is not None
    check_rule(runs, row, workers, law)


# --- there is a law for everything, and it has teeth ------------------------------------------------------


def test_every_strategy_has_a_law() -> None:
    """A new strategy needs an entry in `LAWS`."""
    missing = sorted({each.name for each in describe()} - LAWS.keys())
    assert not missing, (
        f"tests/test_strategy_laws.py: LAWS has no entry for {', '.join(missing)}. Write the update rule "
        "down a second time, as a function in tests/support/references that takes a Run and returns an "
        "Outcome, and enter it; or enter the name of a test that a wrong rule breaks, as in "
        "tests/test_file.py::test_name"
    )
    assert not LAWS.keys() - {each.name for each in describe()} - {"bmuf"}
    for law in LAWS.values():
        if isinstance(law, str):
            file, _, name = law.partition("::")
            assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), law


def test_exceptions_have_a_reference() -> None:
    """A row that breaks a law by design is pinned by its rule; every exception is for some row."""
    for law, row in itertools.product(EXCEPTIONS, ROWS):
        assert not excepted(law, row) or reference(row), (
            f"{row} is excepted from {law.__name__}, so it needs a reference in LAWS (not the name of a test)"
        )
    for pattern in itertools.chain(*EXCEPTIONS.values()):
        assert any(re.search(pattern, str(row)) for row in ROWS), pattern


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies that a test defines are gone after it."""
    monkeypatch.setattr(Strategy, "registry", dict(Strategy.registry))


def averaging_by(name: str, combine: Callable[[Group, Sequence[Tensor]], None]) -> None:
    """Registers local SGD with something else in place of the mean."""

    class Wrong(AveragingWorker):
        def mean(self, vectors: Sequence[Tensor], *flags: Tensor, full: bool = False) -> None:
            combine(self.group, vectors)

    def worker(self: LocalSGD, node: Any, replica: Any, group: Any) -> Worker:
        return Wrong(self, node, replica, group)

    dataclass(frozen=True)(type("Wrong", (LocalSGD,), {"name": name, "worker": worker}))


def by_max() -> str:
    averaging_by("by-max", lambda group, vectors: group.all_reduce(*vectors, op="max"))
    return "by-max:3"


def by_sum() -> str:
    def step(worker: Worker) -> None:
        worker.group.all_reduce(*worker.replica.gradient, op="sum")
        worker.replica.apply()

    return str(stepping("by-sum", step))


def by_sign() -> str:
    def step(worker: Worker) -> None:
        worker.group.all_reduce(*worker.replica.gradient, op="mean")
        for part in worker.replica.gradient:
            part.sign_()
        worker.replica.apply()

    return str(stepping("by-sign", step))


def by_the_first() -> str:
    averaging_by("by-the-first", lambda group, vectors: group.broadcast(*vectors))
    return "by-the-first:2"


def alone() -> str:
    return str(stepping("alone", lambda worker: worker.replica.apply()))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize(
    ("wrong", "caught"),
    [(by_max, superposition), (by_sum, scale), (by_sign, superposition), (by_the_first, symmetry),
     (alone, symmetry)],
)  # fmt: skip
def test_a_wrong_strategy_breaks_a_law(runs: Runs, wrong: Callable[[], str], caught: Law) -> None:
    """Each of these trains, and would pass conformance."""
    row = Row(wrong())
    for law in EXCEPTIONS:
        if law is caught:
            with pytest.raises(AssertionError, match=f"^{law.__name__}: "):
                law(runs, row)
            return
        law(runs, row)


@pytest.mark.usefixtures("own_registry")
def test_a_wrong_momentum_breaks_the_rule(runs: Runs) -> None:
    """Heavy ball in place of Nesterov's momentum is linear and symmetric too; only the reference tells."""
    del Strategy.registry["diloco"]

    class HeavyBallWorker(DiLoCoWorker):
        def _outer_step(self, theta: Any, m: Any, delta: Any, into: Any) -> Any:
            for start, momentum, change, place in zip(theta, m, delta, into, strict=True):
                momentum.mul_(self.strategy.beta).add_(change)
                place.copy_(start).sub_(momentum, alpha=self.strategy.lr)
            return into

    @dataclass(frozen=True)
    class HeavyBall(DiLoCo):
        name: ClassVar[str] = "diloco"

        def worker(self, node: Any, replica: Any, group: Any) -> Worker:
            return HeavyBallWorker(self, node, replica, group)

    row = Row("diloco:2")
    superposition(runs, row)
    symmetry(runs, row)
    with pytest.raises(AssertionError, match=r"^worker 0 after step 2: "):
        check_rule(runs, row, 4, synchronous_rounds)
