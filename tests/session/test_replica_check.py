"""Replicas that must be equal and are not: the first difference is found and named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.coordination.replica_comparison import ROUNDING, ReplicaComparison, difference
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import CompareReplica
from polyrhythm.session.replica_check import summaries
from tests.support.combine import few
from tests.support.programs import MOMENTUM, SGD, Examples, Script, mlp
from tests.support.rows import DEFAULTS, ROWS, Row
from tests.support.runs import WORLDS, run_in

BOTH = ONE, TWO = Peer("worker", 0), Peer("worker", 1)


def lockstep(rows: list[Row]) -> list[Row]:
    return [row for row in rows if pr.parse(row.strategy).traits.lockstep]


@dataclass
class Meddling:
    """Trains, and in every step lets `meddle(rank, step, model, optimizer)` do something it should not."""

    meddle: Callable[..., None]
    epochs: int = 2

    def __call__(self) -> None:
        here = pr.init()
        model = mlp()
        loader = DataLoader(Examples(48), batch_size=2)
        model, optimizer, loader = here.prepare(model, SGD(model.parameters()), loader)
        step = 0
        for _ in range(self.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                step += 1
                self.meddle(here.rank, step, model, optimizer)


def scaled(rank: int, step: int, model: Any, optimizer: Any) -> None:
    if rank == 2 and step == 7:
        with torch.no_grad():
            model[2].weight.mul_(1.01)


def decayed(rank: int, step: int, model: Any, optimizer: Any) -> None:
    if rank == 1 and step == 3:
        optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_changed_on_one_worker_is_named(world: str) -> None:
    """With both workers and the step; the first check after the change finds it."""
    message = (
        r"^after step 10 2\.weight( and \d more)? on worker \d and worker \d differ, but under allreduce all "
        r"replicas are equal there: .* outside optimizer\.step\(\) or .* branch that depends on the rank"
    )
    with pytest.raises(UsageError, match=message) as caught:
        run_in(world, Meddling(scaled), check_replicas=5)
    assert "worker 2" in str(caught.value)


@pytest.mark.parametrize("world", WORLDS)
def test_a_learning_rate_of_one_worker_is_named(world: str) -> None:
    """Before the parameters that follow from it; with both values and what would work."""
    with pytest.raises(UsageError, match=r"after step 4 parameter group 0 has lr=") as caught:
        run_in(world, Meddling(decayed), check_replicas=4)
    text = str(caught.value)
    assert "worker 1" in text and {"0.1", "0.01"} == {*re.findall(r"0\.\d+", text)}
    assert "pass ReduceLROnPlateau to session.prepare()" in text and "\n" not in text


@pytest.mark.parametrize("row", lockstep([*DEFAULTS, Row("allreduce / diloco:4")]), ids=str)
def test_a_learning_rate_of_one_worker_is_named_in_every_lockstep_strategy(row: Row) -> None:
    """By default at the end, in a run shorter than 100 steps."""
    workers = 4 if row.cluster else 3
    with pytest.raises(UsageError, match=r"parameter group 0 has lr="):
        run_in(
            "simulated", Meddling(decayed), strategy=row.strategy, servers=row.servers, workers=workers,
            cluster=row.cluster,
        )  # fmt: skip


@few("row", lockstep([*DEFAULTS, *(each for each in ROWS if each not in DEFAULTS)]), quick=12)
def test_equal_replicas_are_equal_in_every_lockstep_strategy(row: Row, capsys: Any) -> None:
    """Compared as often as possible: no error and no note, also with a scheduler, and the same bits."""
    script = Script(schedule=True, optimizer=SGD if "dgc" in row.strategy else MOMENTUM, size=50)
    digests = [
        run_in(
            "simulated", script, strategy=row.strategy, servers=row.servers, workers=4, cluster=row.cluster,
            check_replicas=every,
        )["digest"]
        for every in (0, 1)
    ]  # fmt: skip
    assert digests[0] == digests[1]
    assert "differ" not in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["allreduce", "local:4", "diloco:4", "slowmo:4"])
def test_parameters_are_compared_at_the_end_of_a_round(strategy: str) -> None:
    """In a round replicas differ, which is no error; at its end they are equal, and a change is found."""

    def change(rank: int, step: int, model: Any, optimizer: Any) -> None:
        if rank == 2 and step == 16:  # the last step, and the last of a round
            torch.nn.init.zeros_(model[0].bias)

    run_in("simulated", Meddling(lambda *_: None), strategy=strategy, check_replicas=3)
    with pytest.raises(UsageError, match=r"after step 16 0\.bias on worker"):
        run_in("simulated", Meddling(change), strategy=strategy, check_replicas=3)


def test_checks_can_be_switched_off_and_a_negative_number_is_refused() -> None:
    run_in("simulated", Meddling(scaled), check_replicas=0)
    with pytest.raises(UsageError, match="check_replicas is -1; it must be a number of steps, or 0"):
        run_in("simulated", Meddling(scaled), check_replicas=-1)


# Summaries


@given(
    size=st.integers(1, 5000), seed=st.integers(0, 1000), relative=st.sampled_from([1e-7, 1e-6, 1e-2, 1.0])
)
def test_rounding_is_told_from_other_differences(size: int, seed: int, relative: float) -> None:
    """A relative error of every element: of float32, or larger by far."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=generator)
    other = one * (1 + relative)
    (a,), (b,) = summaries([one]), summaries([other])
    assert (a.checksum == b.checksum) == torch.equal(one, other)
    if a.checksum != b.checksum:
        assert (difference(a, b) < ROUNDING) == (relative < 1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)
def test_every_bit_of_every_dtype_counts(dtype: torch.dtype) -> None:
    one = torch.randn(4, 6).to(dtype).t()
    other = one.clone()
    other[3, 1] = -other[3, 1]
    other[2, 1] = -other[2, 1]  # two signs: in many a sum they would cancel
    (a,), (b,) = summaries([one]), summaries([other])
    assert a.checksum != b.checksum
    assert summaries([one]) == summaries([one.clone()])


def test_rounding_is_told_once_and_a_difference_always() -> None:
    """Machines of different kinds: a note, and training goes on."""
    compare, one = ReplicaComparison(), torch.randn(100)
    reports = [summaries([one]), summaries([one * (1 + 1e-6)]), summaries([one * 1.1])]
    found = []
    for step, theirs in enumerate([1, 1, 2, 1], 1):
        compare.compare(ONE, CompareReplica(0, step, reports[0], []), BOTH)
        found.append(compare.compare(TWO, CompareReplica(0, step, reports[theirs], []), BOTH))
    assert [(bool(each.other), each.rounding) for each in found] == [
        (True, True), (False, False), (True, False), (False, False),
    ]  # fmt: skip


def test_parts_and_steps_are_compared_with_their_like() -> None:
    """A worker that is a step ahead, or reports another part, is not compared with this one."""
    compare = ReplicaComparison()
    first = CompareReplica(0, 5, summaries([torch.ones(3)]), [{"lr": "0.1"}])
    assert not compare.compare(ONE, first, BOTH).other
    for other in (replace_struct(first, step=6), replace_struct(first, part=1)):
        different = replace_struct(other, tensors=summaries([torch.zeros(3)]), settings=[{"lr": "0.2"}])
        assert not compare.compare(TWO, different, BOTH).other


@few("ahead", [1, 17, 500], quick=2)
def test_workers_are_compared_however_far_one_is_ahead(ahead: int) -> None:
    """And only reports are kept that a worker still has to be compared with; a dead one has none."""
    compare = ReplicaComparison()
    reports = [CompareReplica(part, 0, [], [{"lr": "0.1"}]) for part in range(20)]
    for step in range(1, ahead + 1):
        for report in reports:
            assert not compare.compare(ONE, replace_struct(report, step=step), BOTH).other
    assert compare.kept == 20 * ahead
    different = replace_struct(reports[0], step=1, settings=[{"lr": "0.2"}])
    assert compare.compare(TWO, different, BOTH).theirs == "0.1"
    for step in range(1, ahead + 1):
        for report in reports[:10]:
            assert not compare.compare(TWO, replace_struct(report, step=step), BOTH).other
    assert compare.kept == 10 * ahead
    for report in reports:
        compare.compare(ONE, replace_struct(report, step=ahead, over=True), [ONE])  # the other is dead
    assert compare.kept == 0


def replace_struct(report: CompareReplica, **fields: Any) -> CompareReplica:
    return msgspec.structs.replace(report, **fields)


@pytest.mark.parametrize("every", [1, 8])
def test_a_scheduler_that_steps_after_the_last_check_is_no_difference(every: int) -> None:
    """The end of the run is compared by itself, also if its last step was checked."""

    def main() -> None:
        session = pr.init()
        model = nn.Linear(3, 1)
        loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=2)
        model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        scheduler.step()

    assert pr.simulate(main, workers=2, strategy="allreduce", check_replicas=every)["steps"] == 16


@pytest.mark.parametrize("count", [2, 100, 5000, 20_000])
def test_a_permutation_is_no_rounding(count: int) -> None:
    """It changes neither the sum nor the norm."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    rounded = values * (1 + 1e-7 * torch.randn(count, generator=torch.Generator().manual_seed(1)))
    one, permuted, near = summaries([values, values.roll(1), rounded])
    assert difference(one, permuted) > 100 * ROUNDING
    assert difference(one, near) < ROUNDING


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", ["async", "allreduce"])
def test_different_settings_are_told_when_they_are_prepared(
    world: str, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by different arguments of the script. In lockstep the first step is refused, too."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 if session.rank else 0.02)
        model, optimizer = session.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    refused = pytest.raises(UsageError, match=r"after step 1 parameter group 0 has lr=.*different arguments")
    with refused if strategy == "allreduce" else contextlib.nullcontext():
        run_in(world, main, strategy=strategy, workers=2)
    told = "parameter group 0 has lr=0.1 on worker 1 and 0.02 on worker 0: if that is not on purpose"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_different_schedules_are_told_when_they_are_prepared(
    world: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """They begin with the same rate, so the first steps would not show it."""

    def main() -> None:
        session = pr.init()
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 20 + 20 * session.rank
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        session.prepare(model, optimizer, schedule)

    run_in(world, main, strategy="async", workers=2)
    told = "OneCycleLR has total_steps=40 on worker 1 and 20 on worker 0: if that is not on purpose"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("on_all", "strategy"), [(False, "allreduce"), (False, "gossip"), (True, "allreduce")]
)
def test_a_batch_that_one_worker_skips_is_noted_before_the_end(
    world: str, on_all: bool, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It takes a step less, so the run ends with an error, after all the training."""

    def main() -> None:
        here, model = pr.init(), mlp()
        loader = DataLoader(Examples(48), batch_size=2)
        model, optimizer, loader = here.prepare(model, SGD(model.parameters()), loader)
        for number, (x, y) in enumerate(loader):
            if number == 3 and (on_all or here.rank == 1):
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with contextlib.nullcontext() if on_all else pytest.raises(pr.PolyrhythmError, match="worker 1"):
        run_in(world, main, strategy=strategy, workers=2, check_replicas=5)
    said = re.findall(
        r"after step 5 worker \d has got (\d) batches and worker \d (\d): a", capfd.readouterr().err
    )
    assert said == [] if on_all else [sorted(each) for each in said] == [["5", "6"]]
