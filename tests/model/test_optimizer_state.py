"""What becomes of the optimizer's state where parameters are averaged: kept, averaged or begun anew."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyrhythm as pr
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.session.context import session
from tests.support.programs import (
    ADAM,
    MOMENTUM,
    same,
)
from tests.support.traces import Numbers, Trace, close, drift, mean

# --- the optimizer's state --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local", "average", "slowmo", "postlocal"])
@pytest.mark.parametrize(
    "optimizer",
    [
        MOMENTUM,
        ADAM,
        partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
        partial(torch.optim.Adagrad, lr=0.01),
    ],
    ids=["momentum", "adam", "amsgrad", "rmsprop", "adagrad"],
)
def test_averaged_momentum_is_the_same_everywhere(simulate: Any, strategy: str, optimizer: Any) -> None:
    """After an average all that the optimizers keep is equal; in between it is each one's own."""
    more = ",after=1" if strategy == "postlocal" else ""
    trace = Trace(9, optimizer=optimizer)
    simulate(trace, f"{strategy}:4,momentum=average{more}", 3)
    for step in range(2, 10):
        states = [trace.state[rank][step - 1] for rank in range(3)]
        together = (step - bool(more)) % 4 == 0
        for name in states[0]:
            equal = all(torch.equal(states[0][name], other[name]) for other in states[1:])
            assert equal == (together or name == "step"), (step, name)


def test_averaged_momentum_is_the_mean(simulate: Any) -> None:
    """By hand: two steps alone, then the mean of the parameters and of the momentum."""
    trace, mu, lr = Trace(6, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)), 0.9, 0.1
    simulate(trace, "local:2,momentum=average", 3)
    x, b = [trace.begin] * 3, [torch.zeros_like(trace.begin)] * 3
    for step in range(6):
        b = [mu * b[rank] + drift(rank, x[rank]) for rank in range(3)]
        x = [x[rank] - lr * b[rank] for rank in range(3)]
        if step % 2:
            x, b = [mean(x)] * 3, [mean(b)] * 3
        assert all(close(x[rank], trace.x[rank][step]) for rank in range(3))


@pytest.mark.parametrize("strategy", ["local", "average", "slowmo"])
@pytest.mark.parametrize(
    "optimizer",
    [MOMENTUM, ADAM, partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.5)],
    ids=["momentum", "adam", "adagrad"],
)
def test_reset_momentum_is_that_of_a_new_optimizer(simulate: Any, strategy: str, optimizer: Any) -> None:
    """After an average each optimizer has the state that one has before its first step."""
    trace = Trace(8, optimizer=optimizer)
    simulate(trace, f"{strategy}:4,momentum=reset", 2)
    parameter = nn.Parameter(trace.begin)
    new = {key: torch.as_tensor(value) for key, value in optimizer([parameter]).state[parameter].items()}
    for rank in range(2):
        assert same(trace.state[rank][3], new) and same(trace.state[rank][7], new)
        assert not same(trace.state[rank][4], new)


def test_momentum_reset_by_hand_with_adam(simulate: Any) -> None:
    """By hand, with Adam, whose count of steps begins anew too."""
    trace = Trace(6, optimizer=ADAM)
    simulate(trace, "local:3,momentum=reset", 2)
    numbers = [Numbers(trace.begin) for _ in range(2)]
    for _ in range(2):
        for rank, each in enumerate(numbers):
            optimizer = ADAM(each.parameters())
            for _ in range(3):
                each.x.grad = drift(rank, each.x.detach())
                optimizer.step()
        average = mean([each.x.detach() for each in numbers])
        for each in numbers:
            each.x.data = average.clone()
    assert torch.equal(trace.x[1][-1], average)


class Replacing(torch.optim.Optimizer):
    """SGD with momentum that makes new tensors each step, and is not made like others."""

    def __init__(self, parameters: Any, rate_and_momentum: tuple[float, float]) -> None:
        super().__init__(parameters, {"lr": rate_and_momentum[0], "mu": rate_and_momentum[1]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    old = state.get("momentum_buffer")
                    new = parameter.grad.clone() if old is None else old * group["mu"] + parameter.grad
                    state["momentum_buffer"] = new
                    parameter.sub_(new, alpha=group["lr"])


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_optimizers_may_replace_their_tensors(simulate: Any, policy: str) -> None:
    """What an optimizer keeps is found again each time, also if it is not where it was."""
    strategy = f"local:3,momentum={policy}"
    found = Trace(8, optimizer=lambda parameters: Replacing(parameters, (0.1, 0.5)))
    law = Trace(8, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    simulate(found, strategy, 3)
    simulate(law, strategy, 3)
    assert all(close(a, b) for a, b in zip(found.x[1], law.x[1], strict=True))


@pytest.mark.parametrize("world", ["simulated", "real"])
def test_a_worker_without_momentum_takes_over_the_average(world: str, tmp_path: Path) -> None:
    """A worker whose parameter never had a gradient counts as zero, and goes on with the average."""

    def main() -> None:
        here = pr.init()
        pair = nn.ModuleList([Numbers(torch.ones(2, dtype=torch.float64)) for _ in range(2)])
        pair, optimizer = here.prepare(pair, ADAM(pair.parameters()))
        for step in range(1, 6):
            optimizer.zero_grad()
            if here.rank == 0 or step > 1:  # in its first step worker 1 has no gradient at all
                (pair[0].x * (1 + here.rank)).sum().backward()
            if here.rank == 0 or step > 3:  # at last it goes on with what it has taken over
                pair[1].x.sum().backward()
            optimizer.step()
            state = optimizer.state[pair[1].x]
            assert ("exp_avg" in state) == (here.rank == 0 or step > 1)
        assert state["exp_avg"].tolist() == optimizer.state_dict()["state"][1]["exp_avg"].tolist()
        torch.save(dict(state), tmp_path / f"{here.rank}.pt")

    how = pr.simulate if world == "simulated" else pr.run
    how(main, workers=2, strategy="local:1,momentum=average", runs=None, threads=1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["exp_avg"], second["exp_avg"]) and first["exp_avg"].abs().min() > 0


class Counting(Replacing):
    """Keeps a count of its own, under a name that PyTorch's optimizers do not use."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            seen = self.state[parameter].get("seen", torch.tensor(0.0, dtype=torch.float64))
            self.state[parameter]["seen"] = seen + parameter.grad.sum()


class Scale(nn.Module):
    """A layer, and a number without dimensions, as in CLIP; or only that."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        if not alone:
            self.layer = Numbers(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (partial(torch.optim.NAdam, lr=0.01), ["exp_avg", "exp_avg_sq"]),
        (partial(torch.optim.ASGD, lr=0.01), ["ax"]),
        (ADAM, ["exp_avg", "exp_avg_sq"]),
    ],
    ids=["nadam", "asgd", "adam"],
)
def test_momentum_average_leaves_scalar_optimizer_state_alone(
    simulate: Any, optimizer: Any, kept: list[str], alone: bool
) -> None:
    """Beside a parameter that is one number it looks like a moment, and stays what it is for all others."""

    def main() -> None:
        here = pr.init()
        model = Scale(alone)
        model, mine = here.prepare(model, optimizer(model.parameters()))
        plain = Scale(alone)
        other = optimizer(plain.parameters())
        for _ in range(5):
            for each in (model, plain):
                for parameter in each.parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + here.rank)
            mine.step()
            other.step()
        assert here._worker._moments == kept
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            ours, law = mine.state[one], other.state[two]
            assert ours.keys() == law.keys()
            assert all(ours[name].shape == law[name].shape for name in law)
            assert all(torch.equal(ours[name], law[name]) for name in law if name not in kept)

    simulate(main, "local:2,momentum=average", 2)


def test_scalar_optimizer_state_is_recognized_by_its_shapes(simulate: Any) -> None:
    """By their shapes, not by their names."""

    def main() -> None:
        here = pr.init()
        model = Scale(alone=False)
        model, mine = here.prepare(model, Counting(model.parameters(), (0.1, 0.5)))
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + here.rank)
            mine.step()
        assert here._worker._moments == ["momentum_buffer"]
        seen = [mine.state[each]["seen"].item() for each in model.parameters()]
        assert seen == [4.0 * (1 + here.rank), 12.0 * (1 + here.rank)]

    simulate(main, "local:2,momentum=average", 2)


def test_momentum_average_refuses_different_optimizers_on_workers() -> None:
    """Momentum cannot be averaged with something else."""

    def main() -> None:
        def either(parameters: Any) -> torch.optim.Optimizer:
            return (ADAM if session.get().rank else MOMENTUM)(parameters)

        Trace(2, optimizer=either)()

    with pytest.raises(PolyrhythmError, match=r"worker \d's optimizer state has (momentum_buffer|exp_avg)"):
        pr.simulate(main, workers=2, strategy="local:1,momentum=average", threads=1)
