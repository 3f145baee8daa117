"""Several models and optimizers: each optimizer's parameters are a part with its own strategy worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyrhythm.core.registry import parse
from tests.support.combine import each_value, few
from tests.support.gan import Gan, alone, plain
from tests.support.programs import ADAM, MOMENTUM, Examples, distance, same, trained
from tests.support.rows import DEFAULTS, Row
from tests.support.runs import WORLDS, run_in

UNEQUAL = '[[hosts]]\ncount = 1\nstep_time = "10 ms"\n[[hosts]]\nstep_time = { exponential = "10 ms" }'
# One of each family, and those that may wait for other workers in more than one place.
FAMILIES = [
    Row("allreduce"), Row("allreduce+topk:0.3"), Row("local:3"), Row("diloco:3"), Row("average:2"),
    Row("sync", 2), Row("async", 2), Row("ssp:1"), Row("backup:1"), Row("easgd"), Row("async+topk:0.3"),
    Row("gossip"), Row("choco:0.5+topk:0.3"), Row("adpsgd"), Row("push"), Row("noloco:3"),
    Row("broadcast:0.01"), Row("hogwild"), Row("allreduce / diloco:4"),
]  # fmt: skip
MORE = [row for row in FAMILIES if row not in DEFAULTS]


def optimizer_of(row: Row) -> Any:
    """The optimizer that a strategy needs."""
    return MOMENTUM if parse(row.strategy).traits.optimizer == "SGD" else ADAM


@few("row", [pytest.param(row, id=str(row)) for row in (*DEFAULTS, *MORE)], quick=len(DEFAULTS))
def test_a_gan_trains_under_every_strategy(row: Row) -> None:
    """All workers agree on both models, each round steps both, and examples are counted once."""
    script = Gan(optimizer_of(row))
    summary = run_in(
        "simulated", script, strategy=row.strategy, workers=3, servers=row.servers,
        cluster=row.cluster or UNEQUAL,
    )  # fmt: skip
    assert summary["samples"] == 2 * 24
    assert summary["steps"] == 2 * sum(len(each) for each in script.seen.values())
    traits = parse(row.strategy).traits
    first = script.consensus[0]
    assert all(bool(torch.isfinite(value).all()) for value in first.values())
    if traits.lockstep:
        assert all(same(first, other) for other in script.consensus.values())


@each_value(("world", WORLDS), ("strategy", ["allreduce", "local:3", "sync", "async", "gossip", "hogwild"]))
def test_one_worker_with_two_optimizers_is_plain_pytorch(strategy: str, world: str, tmp_path: Path) -> None:
    """Bit for bit, and the file has the names of a ModuleList of the models in the order of prepare."""
    summary = run_in(world, Gan(MOMENTUM), strategy=strategy, workers=1, runs=tmp_path)
    assert same(trained(summary), alone(Gan(MOMENTUM)))


@pytest.mark.parametrize("world", WORLDS)
def test_a_gan_on_two_workers_has_the_gradient_of_both_batches(world: str, tmp_path: Path) -> None:
    """Under allreduce both replicas are equal, and train as one worker on the union of the batches."""
    script = Gan(batch=2, epochs=1)
    summary = run_in(world, script, strategy="allreduce", workers=2, runs=tmp_path)
    x = Examples(24).tensors[0]
    law = plain(6, lambda number: x[4 * number : 4 * number + 4])
    assert distance(trained(summary), law) < 1e-12
    if world == "simulated":
        assert all(map(same, script.seen[0], script.seen[1]))


@pytest.mark.parametrize("row", [row for row in MORE if parse(row.strategy).traits.lockstep], ids=str)
def test_a_gan_resumes_exactly(row: Row, tmp_path: Path) -> None:
    """Saved and resumed, both parts go on with the bits of the uninterrupted run."""
    how: dict[str, Any] = {
        "strategy": row.strategy, "workers": 3, "servers": row.servers, "cluster": row.cluster
    }  # fmt: skip
    whole = run_in("simulated", Gan(MOMENTUM, folder=tmp_path, epochs=4), **how)["digest"]
    run_in("simulated", Gan(MOMENTUM, folder=tmp_path, epochs=2), **how)
    assert run_in("simulated", Gan(MOMENTUM, folder=tmp_path, begin=2, epochs=4), **how)["digest"] == whole


@pytest.mark.parametrize(
    "row",
    [Row("allreduce+topk:0.3"), Row("allreduce+int8"), Row("allreduce+powersgd"), Row("allreduce")],
    ids=str,
)
def test_a_gradient_that_the_script_drops_costs_nothing(row: Row) -> None:
    """Exchanged and dropped, it leaves the residual of a codec as it was, as if it had never been."""
    digests = [
        run_in("simulated", Gan(freezes=freezes), strategy=row.strategy, workers=3)["digest"]
        for freezes in (True, False)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("strategy", ["ssp:1", "backup:1", "adpsgd", "hogwild", "broadcast:0.01"])
def test_workers_that_wait_for_each_other_save_both_parts(strategy: str, tmp_path: Path) -> None:
    """A worker that saves one part keeps nobody waiting in the other: a slow one saves last."""
    slow = '[[hosts]]\nstep_time = "10 ms"\n[[stragglers]]\nworkers = [1]\nslowdown = 3.7\n'
    how: dict[str, Any] = {"strategy": strategy, "workers": 3, "cluster": slow}
    saved = Gan(MOMENTUM, folder=tmp_path, epochs=1)
    run_in("simulated", saved, **how)
    resumed = Gan(MOMENTUM, folder=tmp_path, begin=1, epochs=2)
    run_in("simulated", resumed, **how)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True)["session"]["parts"] for rank in range(3)]
    assert [len(each) for each in parts] == [2, 2, 2]


def test_a_killed_worker_is_not_missed_by_any_part(tmp_path: Path) -> None:
    """Two servers serve two parts, and others train on the batches of the dead worker."""
    script = Gan(size=48, kills=1)
    summary = run_in("real", script, strategy="async", workers=3, servers=2, runs=tmp_path)
    assert list(summary["lost"]) == ["worker 1"]
    assert summary["samples"] >= 2 * 48 - 2 * 8  # it may have died with a lease that it had not returned
    assert {name.split(".")[0] for name in trained(summary)} == {"0", "1"}
