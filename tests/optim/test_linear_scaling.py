"""Linear scaling: the rate is what the wrapped scheduler says, times a factor that rises and stays."""

from __future__ import annotations

import copy
import doctest
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

import polyrhythm as pr
import polyrhythm.optim.linear_scaling
from polyrhythm.core.errors import UsageError
from tests.support.combine import each_value
from tests.support.programs import MOMENTUM, Examples, alone, distance, mlp, trained

FACTOR, STEPS, LENGTH = 4, 6, 20
RATES = [0.1, 0.03]
LOSSES = [1.0, 0.9, 0.95, 0.96, 0.97, 0.9, 0.8, 0.85, 0.85, 0.85] * 3


def optimizer(tensors: bool = False, dtype: torch.dtype = torch.float64) -> torch.optim.Optimizer:
    """Two parameter groups with rates of their own."""
    chosen = [torch.tensor(rate, dtype=dtype) for rate in RATES] if tensors else RATES
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in chosen]
    return torch.optim.SGD(groups, momentum=0.9)


def sequential(each: torch.optim.Optimizer) -> lr.LRScheduler:
    return lr.SequentialLR(
        each,
        [lr.ConstantLR(each, 0.5, 4), lr.ExponentialLR(each, 0.8), lr.CosineAnnealingLR(each, 5)],
        [5, 11],
    )


def chained(each: torch.optim.Optimizer) -> lr.LRScheduler:
    return lr.ChainedScheduler([lr.LinearLR(each, 0.2, 1.0, 7), lr.StepLR(each, 3, 0.5)], optimizer=each)


# They compute a rate from the last one, from the first one or from a loss; one sets momentum too.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any] | None] = {
    "none": None,
    "step": partial(lr.StepLR, step_size=3, gamma=0.5),
    "exponential": partial(lr.ExponentialLR, gamma=0.9),
    "cosine": partial(lr.CosineAnnealingLR, T_max=9),
    "restarts": partial(lr.CosineAnnealingWarmRestarts, T_0=4),
    "lambda": partial(lr.LambdaLR, lr_lambda=[lambda t: 1 / (1 + t), lambda t: 0.9**t]),
    "multiplicative": partial(lr.MultiplicativeLR, lr_lambda=lambda t: 0.95),
    "one cycle": partial(lr.OneCycleLR, max_lr=[1.0, 2.0], total_steps=LENGTH + 1),
    "plateau": partial(lr.ReduceLROnPlateau, patience=1, factor=0.5),
    "sequential": sequential,
    "chained": chained,
}
every_scheduler = pytest.mark.parametrize("kind", SCHEDULERS)


def made(kind: str, each: torch.optim.Optimizer) -> Any:
    make = SCHEDULERS[kind]
    return None if make is None else make(each)


def step(each: torch.optim.Optimizer, scheduler: Any, number: int) -> None:
    each.step()
    plateau = lr.ReduceLROnPlateau
    if isinstance(scheduler, plateau) or isinstance(getattr(scheduler, "after", None), plateau):
        scheduler.step(LOSSES[number])
    elif scheduler is not None:
        scheduler.step()


def rates(each: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in each.param_groups]


def ramp(count: int) -> float:
    return FACTOR if count >= STEPS else 1 + (FACTOR - 1) * (count / STEPS)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # SequentialLR itself calls step(epoch), which PyTorch has deprecated.
        warnings.filterwarnings("ignore", message="The epoch parameter in `scheduler.step")
        yield


@every_scheduler
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_the_rate_is_that_of_the_scheduler_times_the_factor(kind: str, tensors: bool) -> None:
    """From construction on, for every group, bit for bit; the scheduler goes as it goes without."""
    plain, scaled = optimizer(tensors), optimizer(tensors)
    reference = made(kind, plain)
    scheduler = pr.LinearScaling(scaled, FACTOR, STEPS, after=made(kind, scaled))
    for number in range(LENGTH + 1):
        wanted = [rate * ramp(number) for rate in rates(plain)]
        assert rates(scaled) == wanted == scheduler.get_last_lr()
        for one, other in zip(plain.param_groups, scaled.param_groups, strict=True):
            assert one["momentum"] == other["momentum"]
        if number < LENGTH:
            step(plain, reference, number)
            step(scaled, scheduler, number)


@every_scheduler
def test_the_scheduler_may_go_by_epochs(kind: str) -> None:
    """Warm-up is of the optimizer's steps, whenever the scheduler steps: here after each third."""
    plain, scaled = optimizer(), optimizer()
    reference = made(kind, plain)
    scheduler = pr.LinearScaling(scaled, FACTOR, STEPS, after=made(kind, scaled))
    for number in range(LENGTH):
        assert rates(scaled) == [rate * ramp(number) for rate in rates(plain)] == scheduler.get_last_lr()
        if number % 3 == 2:
            step(plain, reference, number)
            step(scaled, scheduler, number)
        else:
            plain.step()
            scaled.step()


@pytest.mark.parametrize("first", [True, False])
def test_linear_scaling_works_with_schedulers_made_before_or_after(first: bool) -> None:
    """Schedulers that are made before or after it, and a step with a closure, are as ever."""
    each = optimizer()
    early = lr.StepLR(each, 100) if first else None
    scheduler = pr.LinearScaling(each, FACTOR, STEPS, after=early)
    later = lr.StepLR(each, 100)
    assert each.step(lambda: torch.tensor(3.0)) == 3.0
    later.step()
    scheduler.step()
    assert rates(each) == pytest.approx([rate * ramp(1) for rate in RATES]) and scheduler.count == 1


@every_scheduler
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first", "scheduler only"])
@pytest.mark.parametrize("moment", [0, 3, STEPS, 11])
def test_linear_scaling_resumes_exactly_from_state_dict(kind: str, order: str, moment: int) -> None:
    """Saved and loaded, also through a file, it goes on with the same bits."""
    first = optimizer()
    scheduler = pr.LinearScaling(first, FACTOR, STEPS, after=made(kind, first))
    for number in range(moment):
        step(first, scheduler, number)
    saved, weights = copy.deepcopy(scheduler.state_dict()), copy.deepcopy(first.state_dict())
    second = optimizer()
    resumed = pr.LinearScaling(second, 1, 0, after=made(kind, second))
    if order == "optimizer first":
        second.load_state_dict(weights)
    resumed.load_state_dict(saved)
    if order == "scheduler first":
        second.load_state_dict(weights)
    for number in range(moment, LENGTH):
        assert rates(first) == rates(second) and scheduler.get_last_lr() == resumed.get_last_lr()
        step(first, scheduler, number)
        step(second, resumed, number)
    assert rates(first) == rates(second)


def test_linear_scaling_state_dict_is_json_serializable() -> None:
    """It has nothing in it that JSON could not hold, if that of the wrapped one has not."""
    each = optimizer(tensors=True)
    scheduler = pr.LinearScaling(each, FACTOR, STEPS)
    step(each, scheduler, 0)
    assert json.loads(json.dumps(scheduler.state_dict())) == scheduler.state_dict()


def test_rates_of_32_bits_do_not_drift() -> None:
    """A tensor rounds the scaled rate; what the scheduler sees comes back exactly."""
    plain, scaled = (optimizer(True, torch.float32) for _ in range(2))
    reference = lr.ExponentialLR(plain, 0.9)
    scheduler = pr.LinearScaling(scaled, 3.3, 7, after=lr.ExponentialLR(scaled, 0.9))
    for number in range(LENGTH):
        step(plain, reference, number)
        step(scaled, scheduler, number)
    for one, other in zip(plain.param_groups, scaled.param_groups, strict=True):
        assert torch.equal(other["lr"], (one["lr"].double() * 3.3).float())


def test_a_rate_that_the_script_sets_is_the_one_in_effect() -> None:
    """What is changed by hand, or added later, is kept, and warm-up goes on from there."""
    each = optimizer()
    scheduler = pr.LinearScaling(each, 4, 4, after=lr.StepLR(each, 100))
    step(each, scheduler, 0)
    step(each, scheduler, 1)
    assert rates(each)[0] == RATES[0] * 2.5
    each.param_groups[0]["lr"] *= 0.5
    step(each, scheduler, 2)
    assert rates(each)[0] == pytest.approx(0.5 * RATES[0] * 3.25)
    assert rates(each)[1] == RATES[1] * 3.25
    alone_ = optimizer()
    scheduler = pr.LinearScaling(alone_, 4, 4)
    alone_.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    step(alone_, scheduler, 0)
    assert rates(alone_) == [RATES[0] * 1.75, RATES[1] * 1.75, 1.75]


def test_without_steps_the_factor_is_there_at_once() -> None:
    each = optimizer()
    scheduler = pr.LinearScaling(each, 3)
    assert rates(each) == [rate * 3 for rate in RATES] == scheduler.get_last_lr()


def test_nested_linear_scaling_multiplies_the_factors() -> None:
    """Factors multiply, each by its own warm-up, and every step counts once."""
    each = optimizer()
    scheduler = pr.LinearScaling(each, 3, 2, after=pr.LinearScaling(each, 2, 4))
    for number in range(6):
        inner, outer = 1 + min(number / 4, 1), 1 + 2 * min(number / 2, 1)
        assert rates(each) == [rate * inner * outer for rate in RATES]
        step(each, scheduler, number)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 0}, "factor is 0; it must be a finite number above 0"),
        ({"factor": "4"}, "factor is '4'; it must be a finite number above 0"),
        ({"factor": 2, "steps": "x"}, "steps is 'x'; it must be a whole number"),
        ({"factor": float("nan")}, "factor is nan"),
        ({"factor": 2, "steps": -1}, "steps is -1; it must be a whole number, 0 or more"),
        ({"factor": 2, "steps": 1.5}, r"steps is 1\.5"),
        ({"factor": 2, "after": lr.StepLR(optimizer(), 2)}, "must be a scheduler of the same optimizer"),
    ],
)
def test_linear_scaling_refuses_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pr.LinearScaling(optimizer(), **arguments)


def test_states_that_do_not_fit_are_refused() -> None:
    each = optimizer()
    state = pr.LinearScaling(each, 2, after=lr.StepLR(each, 2)).state_dict()
    with pytest.raises(UsageError, match="saved with a scheduler in `after`, but this one is without"):
        pr.LinearScaling(optimizer(), 2).load_state_dict(state)
    single = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UsageError, match="2 parameter groups, but the optimizer has 1"):
        pr.LinearScaling(single, 2, after=lr.StepLR(single, 2)).load_state_dict(state)


def test_scaling_docstring_example_passes() -> None:
    assert doctest.testmod(polyrhythm.optim.linear_scaling).failed == 0


# --- in a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [False, True])
def test_linear_scaling_by_workers_must_be_made_after_prepare(prepared: bool) -> None:
    """Before, it would know neither the workers nor the steps."""

    def main() -> None:
        each = optimizer()
        if prepared:
            pr.init()
        pr.LinearScaling(each, steps=3)

    with pytest.raises(UsageError, match=r"create it after pr\.init\(\) and session\.prepare\(\)"):
        pr.simulate(main, workers=2, strategy="allreduce")


@each_value(
    ("world", ["simulated", "real"]),
    ("strategy, factor", [("async", 1), ("ssp:3", 1), ("backup:1", 1), ("ssp:0", 3), ("local:2", 3)]),
)
def test_linear_scaling_default_factor_is_1_for_asynchronous_strategies(
    world: str, strategy: str, factor: int, tmp_path: Path
) -> None:
    """So the default factor there is 1; one that is given is reached, though a worker's optimizer rests."""
    how = pr.simulate if world == "simulated" else pr.run
    for given in (None, 2.0):
        how(Scaled(tmp_path, given), workers=3, strategy=strategy, runs=None, threads=1)
        for rank in range(3):
            found, _, scale, steps = json.loads((tmp_path / f"{rank}.json").read_text())
            assert found == (given or factor)
            assert scale == 1 + (found - 1) * min(steps / 8, 1)


@dataclass
class Scaled:
    """Trains with linear scaling by the number of workers; the file gets the last rate of each worker."""

    folder: Path | None = None
    factor: float | None = None
    batch: int = 4

    def __call__(self) -> torch.nn.Module:
        session = pr.init()
        model = mlp()
        optimizer = MOMENTUM(model.parameters())
        loader = torch.utils.data.DataLoader(Examples(48), batch_size=self.batch)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        scheduler = pr.LinearScaling(optimizer, self.factor, 8, after=lr.ExponentialLR(optimizer, 0.9))
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
        if self.folder is not None:
            (self.folder / f"{session.rank}.json").write_text(
                json.dumps([scheduler.factor, rates(optimizer), scheduler.scale, session._replica.steps])
            )
        return model


@pytest.mark.parametrize("world", ["simulated", "real"])
@pytest.mark.parametrize(("strategy", "servers"), [("allreduce", 0), ("sync", 1), ("sync", 3)])
def test_a_run_is_one_machine_with_the_union_batch(
    world: str, strategy: str, servers: int, tmp_path: Path
) -> None:
    """The default factor is the number of workers, and the scaled rate reaches servers too."""
    how = pr.simulate if world == "simulated" else pr.run
    script = Scaled(tmp_path)
    summary = how(script, workers=3, strategy=strategy, servers=servers, runs=tmp_path, threads=1)
    union = alone(Scaled(factor=3, batch=12))  # type: ignore[arg-type]
    assert distance(trained(summary), union) < 1e-12
    steps = 3 * 48 // 12
    for rank in range(3):
        factor, (rate,), *_ = json.loads((tmp_path / f"{rank}.json").read_text())
        assert factor == 3 and rate == pytest.approx(0.05 * 3 * 0.9**steps)
