"""The laws of the averaging family (ALGORITHMS.md, A and E): exact in simulation, where they are exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import (
    ADAM,
    FEATURES,
    MOMENTUM,
    NESTEROV,
    SGD,
    Examples,
    Script,
    Steps,
    distance,
    events,
    mlp,
    same,
    trained,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.collectives.arithmetic import split
from polyrhythm.errors import PolyrhythmError, UsageError
from polyrhythm.session import session

FAMILY = [
    "local:3", "local:3,momentum=average", "local:3,momentum=reset", "local:auto", "average:3",
    "postlocal:3,after=5", "slowmo:3", "slowmo:3,alpha=0.8,momentum=average", "diloco:3", "diloco:3+bf16",
    "streaming-diloco:6,fragments=3", "streaming-diloco:8,fragments=2,overlap=3,mix=0.2",
    "streaming-diloco:4,fragments=2,overlap=0,mix=0", "streaming-diloco:6,fragments=2,overlap=2+fp16",
]  # fmt: skip


def drift(rank: int, x: Tensor) -> Tensor:
    """A gradient that differs with the worker, the element and the place."""
    return (0.3 + rank) * x - torch.linspace(-1, 2, len(x), dtype=x.dtype) * (1 + rank)


class Numbers(nn.Module):
    """A few numbers to begin with."""

    def __init__(self, begin: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(begin.clone())


@dataclass
class Trace:
    """Takes steps on a few numbers, without data, and keeps what each worker saw after each of them."""

    count: int
    slope: Callable[[int, Tensor], Tensor] = drift
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD
    begin: Tensor = field(default_factory=lambda: torch.ones(12, dtype=torch.float64))
    look: bool = False  # at the consensus, after each step
    before: Callable[[int, int, torch.optim.Optimizer], None] = lambda rank, step, optimizer: None
    x: dict[int, list[Tensor]] = field(default_factory=dict)
    state: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)
    sent: dict[int, list[int]] = field(default_factory=dict)
    shown: dict[int, list[Tensor]] = field(default_factory=dict)

    def __call__(self) -> None:
        here = pr.init()
        numbers = Numbers(self.begin)
        numbers, optimizer = here.prepare(numbers, self.optimizer(numbers.parameters()))
        mine = here.rank
        for kept in (self.x, self.state, self.sent, self.shown):
            kept[mine] = []
        for step in range(1, self.count + 1):
            self.before(mine, step, optimizer)
            numbers.x.grad = self.slope(mine, numbers.x.detach())
            optimizer.step()
            self.x[mine].append(numbers.x.detach().clone())
            self.state[mine].append(
                {k: torch.as_tensor(v).clone() for k, v in optimizer.state[numbers.x].items()}
            )
            self.sent[mine].append(getattr(here._node, "bytes_sent", 0))
            if self.look:
                self.shown[mine].append(here.consensus().x.detach().clone())

    def sent_by_step(self) -> list[int]:
        """What all workers sent in each step but the first, which cannot be told from the start."""
        totals = [sum(each) for each in zip(*self.sent.values(), strict=True)]
        return [now - then for then, now in pairwise(totals)]


def mean(vectors: list[Tensor]) -> Tensor:
    """In rank order, one rounding per operation."""
    total = vectors[0]
    for each in vectors[1:]:
        total = total + each
    return total / len(vectors)


def close(one: Tensor, other: Tensor, to: float = 1e-12) -> bool:
    return bool((one - other).abs().max() <= to * other.abs().max())


# --- averaging each step ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local:1", "local:1,momentum=average"])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, NESTEROV], ids=["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("size", [48, 50, 43])
def test_averaging_each_step_is_synchronous_for_linear_optimizers(
    simulate: Any, strategy: str, optimizer: Any, size: int
) -> None:
    """H = 1 equals allreduce if the update is linear in the gradient, whether or not momentum is averaged."""
    script = Script(optimizer=optimizer, size=size, epochs=4)
    law = trained(simulate(script, "allreduce", 3))
    assert distance(trained(simulate(script, strategy, 3)), law) < 1e-12


@pytest.mark.parametrize("strategy", ["average:1", "average:1,momentum=average"])
@pytest.mark.parametrize(
    ("optimizer", "size"), [(SGD, 48), (SGD, 50), (SGD, 43), (MOMENTUM, 48), (NESTEROV, 48)]
)
def test_weighted_averaging_each_step_is_synchronous(
    simulate: Any, strategy: str, optimizer: Any, size: int
) -> None:
    """The same with weights: with plain SGD in uneven rounds too, with momentum where the weights stay."""
    script = Script(optimizer=optimizer, size=size, epochs=4)
    law = trained(simulate(script, "allreduce", 3))
    assert distance(trained(simulate(script, strategy, 3)), law) < 1e-12


def test_averaging_each_step_is_not_synchronous_for_adam(simulate: Any) -> None:
    """Adam is not linear in the gradient."""
    script = Script(optimizer=ADAM, epochs=12)
    law = trained(simulate(script, "allreduce", 3))
    for strategy in ("local:1", "local:1,momentum=average", "average:1"):
        assert distance(trained(simulate(script, strategy, 3)), law) > 0.01


def test_only_the_mean_of_the_momentum_matters(simulate: Any) -> None:
    """Under local:1 the workers' momentum differs a lot, and the steps are those of allreduce."""
    own, law = Trace(20, optimizer=NESTEROV), Trace(20, optimizer=NESTEROV)
    simulate(own, "local:1", 3)
    simulate(law, "allreduce", 3)
    buffers = [own.state[rank][-1]["momentum_buffer"] for rank in range(3)]
    assert (buffers[0] - buffers[1]).abs().max() > 0.5
    assert close(mean(buffers), law.state[0][-1]["momentum_buffer"])
    assert all(close(a, b) for a, b in zip(own.x[2], law.x[2], strict=True))


FIXED = {1: -0.5, 2: -0.457143, 10: -0.197376, 400: 0.0}


@pytest.mark.parametrize(
    "strategy",
    [
        *(f"{name}:{period}" for name in ("local", "average") for period in FIXED),
        *(f"slowmo:{period},beta=0.2" for period in (1, 2, 10)),
        *(f"diloco:{period},beta=0.2" for period in (1, 2, 10)),
    ],
)
def test_local_steps_have_a_biased_fixed_point(simulate: Any, strategy: str) -> None:
    """Quadratics with curvatures h settle at sum((1 - r^H) b) / sum(1 - r^H), where r = 1 - lr h.

    An outer step changes how fast they come there, and not where.
    """
    period = pr.parse(strategy).period
    curvature, best, lr = (1.0, 3.0), (1.0, -1.0), 0.1
    pull = [1 - (1 - lr * h) ** period for h in curvature]
    law = sum(p * b for p, b in zip(pull, best, strict=True)) / sum(pull)
    steps = Steps(400, lambda rank, x: curvature[rank] * (x - best[rank]), lr)
    found = trained(simulate(steps, strategy, 2))["x"].item()
    assert found == pytest.approx(law, abs=1e-9)
    assert found == pytest.approx(FIXED[period], abs=1e-4)


# --- weights ----------------------------------------------------------------------------------------


@dataclass
class Uneven:
    """One epoch in batches of one; each gradient is the number of the worker."""

    size: int

    def __call__(self) -> None:
        here = pr.init()
        numbers = Numbers(torch.tensor([5.0, 0.1], dtype=torch.float64))
        loader = DataLoader(Examples(self.size), batch_size=1)
        numbers, optimizer, loader = here.prepare(numbers, SGD(numbers.parameters(), lr=1.0), loader)
        for _ in loader:
            optimizer.zero_grad()
            (numbers.x[0] * (1.0 + here.rank)).backward()
            optimizer.step()


def test_averages_are_weighted_by_examples(simulate: Any) -> None:
    """w = sum(n_i w_i) / sum(n_i): who trained on more counts for more, and what is borrowed for nothing."""
    # Of 5 examples in rounds of 3, worker 0 trains on two and so does worker 1, or worker 0 on both: see the
    # last round. Nobody's gradient is scaled.
    summary = simulate(Uneven(5), "average:2", 3)
    counts = [0, 0, 0]
    for line in events(summary, "step"):
        counts[int(line["node"].split()[1])] += line["samples"]
    assert sum(counts) == 5 and len(set(counts)) > 1
    local = [5.0 - (1 + rank) * count for rank, count in enumerate(counts)]
    law = sum(n * w for n, w in zip(counts, local, strict=True)) / 5
    x = trained(summary)["x"]
    assert x[0].item() == pytest.approx(law, rel=1e-15)
    assert x[1].item() == 0.1  # nobody has moved it


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("more", ["", ",momentum=average", ",momentum=reset"])
def test_equal_counts_make_a_plain_mean(simulate: Any, optimizer: Any, more: str) -> None:
    """Where all train on as many examples, `average` has the bits of `local`."""
    script = Script(optimizer=optimizer, size=48)
    weighted, plain = (simulate(script, f"{name}:3{more}", 3) for name in ("average", "local"))
    assert weighted["digest"] == plain["digest"]


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


def test_reset_is_a_new_optimizer(simulate: Any) -> None:
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
def test_who_has_no_momentum_yet_takes_that_of_others(world: str, tmp_path: Path) -> None:
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
def test_what_is_kept_once_is_its_own(simulate: Any, optimizer: Any, kept: list[str], alone: bool) -> None:
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
        assert here._replica.notes["moments"] == kept
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            ours, law = mine.state[one], other.state[two]
            assert ours.keys() == law.keys()
            assert all(ours[name].shape == law[name].shape for name in law)
            assert all(torch.equal(ours[name], law[name]) for name in law if name not in kept)

    simulate(main, "local:2,momentum=average", 2)


def test_other_parameters_tell_what_is_kept_once(simulate: Any) -> None:
    """By their shapes, whatever its name is."""

    def main() -> None:
        here = pr.init()
        model = Scale(alone=False)
        model, mine = here.prepare(model, Counting(model.parameters(), (0.1, 0.5)))
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + here.rank)
            mine.step()
        assert here._replica.notes["moments"] == ["momentum_buffer"]
        seen = [mine.state[each]["seen"].item() for each in model.parameters()]
        assert seen == [4.0 * (1 + here.rank), 12.0 * (1 + here.rank)]

    simulate(main, "local:2,momentum=average", 2)


def test_different_optimizers_are_named() -> None:
    """Momentum cannot be averaged with something else."""

    def main() -> None:
        def either(parameters: Any) -> torch.optim.Optimizer:
            return (ADAM if session.get().rank else MOMENTUM)(parameters)

        Trace(2, optimizer=either)()

    with pytest.raises(PolyrhythmError, match=r"worker \d's optimizer keeps (momentum_buffer|exp_avg), "):
        pr.simulate(main, workers=2, strategy="local:1,momentum=average", threads=1)


# --- bytes and looks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "each"),
    [
        ("local:4", 96),
        ("local:4,momentum=average", 2 * 96 + 4),  # and for which parameters there is momentum
        ("local:4,momentum=reset", 96),
        ("average:4", 96 + 3 * 8),  # and the examples of each worker
        ("slowmo:4", 96 + 8),  # and the learning rate
        ("diloco:4", 96),
        ("diloco:4+bf16", 24),
        ("streaming-diloco:12,fragments=3,overlap=0", 32),
        ("streaming-diloco:12,fragments=3,overlap=0+fp16", 8),
    ],
)
def test_between_exchanges_nothing_is_sent(simulate: Any, strategy: str, each: int) -> None:
    """Bytes move in every H-th step only: 2(n-1) times the vector, or a P-th of it."""
    trace = Trace(13, optimizer=MOMENTUM)
    simulate(trace, strategy, 3)
    sent = trace.sent_by_step()
    first = 2 * 2 * 2 * 8 if "=average" in strategy else 0  # where they agree on what there is to average
    assert sent == [2 * 2 * each * (step % 4 == 0) + first * (step == 4) for step in range(2, 14)]


@pytest.mark.parametrize("period", [1, 4, 6, 100])
def test_local_sgd_is_silent_between_averages(simulate: Any, period: int) -> None:
    """It sends the start, and 2(n-1) vectors per average: after every H-th step, and the last one."""
    workers, steps = 3, 8
    summary = simulate(Steps(steps), f"local:{period}", workers)
    averages = -(-steps // period)
    assert summary["bytes_sent"] == 8 * (workers - 1) + averages * 2 * (workers - 1) * 8


@pytest.mark.parametrize("strategy", FAMILY)
def test_looking_changes_nothing(simulate: Any, strategy: str) -> None:
    """The consensus shows what the run would bring home if it ended here, the same to all; and it goes on."""
    seen, law = Trace(11, optimizer=MOMENTUM, look=True), Trace(11, optimizer=MOMENTUM)
    assert simulate(seen, strategy, 3)["digest"] == simulate(law, strategy, 3)["digest"]
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(seen.x[rank], law.x[rank], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(seen.shown[rank], seen.shown[0], strict=True))
    for steps in (1, 3, 4, 6, 7, 8, 10, 11):
        ended = trained(simulate(replace(law, count=steps), strategy, 3))["x"]
        assert torch.equal(ended, seen.shown[0][steps - 1]), steps


# --- the period that is chosen ----------------------------------------------------------------------

SLOW = '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "8 kB/s"\n'


def chosen(summary: dict[str, Any]) -> list[tuple[int, float, float]]:
    """The periods that were chosen, as worker 0 tells them; the others tell the same."""
    lines = {
        node: [
            (line["period"], line["communication_s"], line["step_s"])
            for line in events(summary, "period")
            if line["node"] == node
        ]
        for node in ("worker 0", "worker 1")
    }
    assert lines["worker 0"] == lines["worker 1"]
    return lines["worker 0"]


@pytest.mark.parametrize(
    ("cluster", "more", "size", "communication", "step", "period"),
    [
        (SLOW, "", 21, 0.025, 0.010, 25),  # 168 bytes and two figures of each worker, once each way
        (SLOW, ",overhead=0.2", 21, 0.025, 0.010, 13),
        (SLOW + 'latency = "1 ms"', "", 21, 0.029, 0.010, 29),  # two hops over two links
        ('[[hosts]]\nlatency = "7 ms"', "", 21, 0.028, 0.010, 28),
        (SLOW, ",momentum=average", 21, 0.025 + 0.0215, 0.010, 47),  # and whether there is momentum
        # Who is fast waits for who is slow, and counts neither that nor its own short steps.
        (SLOW + "count = 1\n[[hosts]]\nspeed = 0.5", "", 21, 0.025, 0.020, 13),
        (SLOW, ",longest=20", 21, 0.025, 0.010, 20),
        (SLOW, ",shortest=40", 21, 0.025, 0.010, 40),
        (SLOW, "", 1996, 2.0, 0.010, 128),
        ("", "", 21, 0.0, 0.010, 1),
        ('[[hosts]]\nstep_time = "0 ms"', ",longest=9", 21, 0.0, 0.0, 9),
    ],
)
def test_the_period_is_as_long_as_it_must_be(
    simulate: Any, cluster: str, more: str, size: int, communication: float, step: float, period: int
) -> None:
    """H = ceil(communication / (overhead * step)), between its bounds; it is told once if it stays."""
    begin = torch.ones(size, dtype=torch.float64)
    trace = Trace(200, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.5), begin=begin)
    told = chosen(simulate(trace, f"local:auto{more}", 2, cluster=cluster))
    found, measured, steps = told[-1]
    assert len(told) == 1
    assert found == period
    assert measured == pytest.approx(communication, abs=1e-9) and steps == pytest.approx(step, abs=1e-9)


def test_the_period_follows_the_cluster(simulate: Any) -> None:
    """When steps become five times as slow the period becomes a fifth, and nothing depends on chance."""
    cluster = SLOW + '[[stragglers]]\nworkers = [1]\nfrom = "2.1 s"\nslowdown = 5.0'
    trace = Trace(400, begin=torch.ones(21, dtype=torch.float64))
    first, again = (simulate(trace, "local:auto", 2, cluster=cluster) for _ in range(2))
    told = [period for period, _, _ in chosen(first)]
    assert told[0] == 25 and told[-1] == 5 and told == sorted(told, reverse=True)
    assert first["digest"] == again["digest"] and chosen(first) == chosen(again)
    # What averaging takes of the time is what was asked for: 25 ms for each 5 steps of 50 ms.
    late = [line for line in events(first, "step") if line["node"] == "worker 1" and line["t"] > 8]
    share = sum(line["wait_s"] for line in late) / sum(line["compute_s"] for line in late)
    assert share == pytest.approx(0.1, rel=0.05)  # it need not end with a round


def test_latency_counts(simulate: Any) -> None:
    """Where latency is all, averaging takes what was asked for, and nothing is exchanged beside it."""
    summary = simulate(Trace(302), "local:auto", 4, cluster='[[hosts]]\nlatency = "25 ms"\n')
    assert [each[0] for each in chosen(summary)] == [100]
    late = [line for line in events(summary, "step") if line["step"] > 2]
    share = sum(line["wait_s"] for line in late) / sum(line["compute_s"] for line in late)
    assert share == pytest.approx(0.1)


@pytest.mark.parametrize("first", [1, 2, 7])
def test_a_pause_between_steps_is_no_step(simulate: Any, first: int) -> None:
    """A worker that evaluates or saves now and then, or begins slowly, does not change the period."""

    def pause(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        if rank == 0 and step % 10 == first % 10:
            session.get()._seat.spend(0.5)

    trace = Trace(200, begin=torch.ones(21, dtype=torch.float64), before=pause)
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW))] == [25]


def test_one_odd_round_does_not_decide(simulate: Any) -> None:
    """All are slow in one of some rounds: that alone is no reason to change."""
    odd = '[[stragglers]]\nworkers = [0, 1]\nfrom = "2.2 s"\nto = "3.5 s"\nslowdown = 9.0'
    trace = Trace(300, begin=torch.ones(21, dtype=torch.float64))
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW + odd))] == [25]


def test_looking_is_no_part_of_a_step(simulate: Any) -> None:
    """The consensus takes time on a slow network, and makes no difference to the period."""
    trace = Trace(60, begin=torch.ones(21, dtype=torch.float64), look=True)
    assert [each[0] for each in chosen(simulate(trace, "local:auto", 2, cluster=SLOW))] == [25]


def test_the_period_is_chosen_on_real_processes(tmp_path: Path) -> None:
    """All choose the same, within the bounds."""
    script = Script(epochs=4)
    summary = pr.run(script, workers=2, strategy="local:auto,longest=6", runs=tmp_path, threads=1)
    assert all(1 <= period <= 6 for period, _, _ in chosen(summary))
    assert summary["metrics"]["after"] < summary["metrics"]["before"]


# --- post-local -------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 5, 8])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_postlocal_is_allreduce_and_then_local(simulate: Any, after: int, optimizer: Any) -> None:
    """The first steps have the bits of allreduce; then all step alone and average every H steps."""
    found, law = Trace(14, optimizer=optimizer), Trace(after, optimizer=optimizer)
    simulate(found, f"postlocal:3,after={after}", 3)
    simulate(law, "allreduce", 3)
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found.x[rank], law.x[rank], strict=False))
    numbers = [Numbers(law.x[0][-1]) for _ in range(3)]
    optimizers = [optimizer(each.parameters()) for each in numbers]
    for rank in range(3):
        optimizers[rank].state[numbers[rank].x] = {k: v.clone() for k, v in law.state[0][-1].items()}
    for step in range(after + 1, 15):
        for rank, each in enumerate(numbers):
            each.x.grad = drift(rank, each.x.detach())
            optimizers[rank].step()
        if (step - after) % 3 == 0:
            average = mean([each.x.detach() for each in numbers])
            for each in numbers:
                each.x.data = average.clone()
        assert all(torch.equal(numbers[rank].x, found.x[rank][step - 1]) for rank in range(3)), step


@pytest.mark.parametrize("size", [48, 50])
def test_postlocal_trains_a_model_like_allreduce_before(simulate: Any, size: int) -> None:
    """With accumulation and clipping too, as long as the change has not come."""
    script = Script(optimizer=MOMENTUM, size=size, accumulate=2, clip=0.5)
    law = simulate(script, "allreduce", 3)
    assert simulate(script, "postlocal:3,after=100", 3)["digest"] == law["digest"]
    assert simulate(script, "postlocal:3", 3)["digest"] == law["digest"]  # the learning rate stays


@pytest.mark.parametrize("who", [{0: 5}, {2: 5}, {0: 5, 1: 5, 2: 5}, {0: 8, 1: 5}])
def test_all_change_in_the_same_step(simulate: Any, who: dict[int, int]) -> None:
    """One worker's schedule is enough: its next gradient tells all, and that step is the last together."""

    def lower(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step >= who.get(rank, 99) else 0.01 * min(step + 5, 10)

    trace = Trace(12, before=lower)
    simulate(trace, "postlocal:4", 3)
    each = 2 * 2 * (96 + 4 + 8)  # gradients, which there are, and whether one has seen it
    assert trace.sent_by_step() == [*4 * [each], 0, 0, 0, 2 * 2 * 96, 0, 0, 0]


def test_a_step_is_taken_together_to_its_end(simulate: Any) -> None:
    """If all hear of the fall in the first of two batches of a step, the second is averaged too."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def main() -> None:
        here = pr.init()
        numbers = Numbers(torch.ones(3, dtype=torch.float64))
        numbers, optimizer = here.prepare(numbers, SGD(numbers.parameters()))
        for step in range(1, 6):
            if step == 3 and here.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.01
            optimizer.zero_grad()
            for batch in (1.0, 2.0):
                (numbers.x * (here.rank + batch)).sum().backward()
            lowered = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = 0.1  # the same for all, that only gradients make a difference
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lowered
            seen[here.rank].append(numbers.x.detach().clone())

    simulate(main, "postlocal:10", 2)
    assert [torch.equal(a, b) for a, b in zip(*seen.values(), strict=True)] == [True] * 3 + [False] * 2


# --- slow momentum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", ",momentum=average", ",momentum=reset"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_slowmo_without_momentum_is_local(simulate: Any, more: str, optimizer: Any) -> None:
    """alpha = 1, beta = 0 has the bits of local SGD."""
    script = Script(optimizer=optimizer, size=50, groups=True, epochs=3)
    slow = simulate(script, f"slowmo:3,alpha=1,beta=0{more}", 3)
    assert slow["digest"] == simulate(script, f"local:3{more}", 3)["digest"]


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (0.7, 0.9), (0.5, 0.0)])
def test_slowmo_by_hand(simulate: Any, alpha: float, beta: float) -> None:
    """u <- beta u + (w_prev - w_mean) / lr, w <- w_prev - alpha lr u, also while the learning rate falls."""

    def rate(step: int) -> float:
        return 0.1 * 0.9**step

    def schedule(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rate(step)

    trace = Trace(12, before=schedule)
    simulate(trace, f"slowmo:4,alpha={alpha},beta={beta}", 3)
    w_prev = trace.begin
    x, u = [w_prev] * 3, torch.zeros_like(w_prev)
    for step in range(1, 13):
        x = [x[rank] - rate(step) * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0:
            u = beta * u + (w_prev - mean(x)) / rate(step)
            w_prev = w_prev - alpha * rate(step) * u
            x = [w_prev] * 3
        assert all(close(x[rank], trace.x[rank][step - 1]) for rank in range(3))


def test_slowmo_steps_by_the_mean_rate(simulate: Any) -> None:
    """Where one worker's schedule lowers its rate, all still take the same slow step, and show the same."""
    rates = [0.1, 0.02, 0.03]

    def lower(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rates[rank] if step > 2 else 0.1

    trace = Trace(8, before=lower, look=True)
    simulate(trace, "slowmo:4,beta=0.5", 3)
    w_prev = trace.begin
    x, u = [w_prev] * 3, torch.zeros_like(w_prev)
    for step in range(1, 9):
        x = [x[rank] - (rates[rank] if step > 2 else 0.1) * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0:
            u = 0.5 * u + (w_prev - mean(x)) / 0.05
            w_prev = w_prev - 0.05 * u
            x = [w_prev] * 3
            assert all(torch.equal(trace.x[rank][step - 1], trace.x[0][step - 1]) for rank in range(3))
        assert all(close(x[rank], trace.x[rank][step - 1]) for rank in range(3))
        assert all(torch.equal(trace.shown[rank][step - 1], trace.shown[0][step - 1]) for rank in range(3))


def test_slowmo_stands_a_learning_rate_of_zero(simulate: Any) -> None:
    """A schedule that ends, or begins, at 0 leaves numbers, and not infinities."""

    def zero(rank: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if step in (1, 6) else 0.1

    assert trained(simulate(Trace(6, before=zero), "slowmo:1", 2))["x"].isfinite().all()


# --- DiLoCo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
def test_diloco_with_a_plain_outer_step_is_local(simulate: Any, optimizer: Any) -> None:
    """lr = 1, beta = 0 is theta - (theta - mean), which is the mean up to rounding."""
    script = Script(optimizer=optimizer, size=50, epochs=3)
    found, law = (trained(simulate(script, each, 3)) for each in ("diloco:3,lr=1,beta=0", "local:3"))
    assert distance(found, law) < 1e-12


def test_diloco_and_local_round_alike_in_short_floats(simulate: Any) -> None:
    """In float32 a few elements differ, and those by a last bit."""
    begin = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    noise = [torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    trace = Trace(4, lambda rank, x: noise[rank], partial(torch.optim.SGD, lr=1e-3), begin)
    found, law = (trained(simulate(trace, each, 2))["x"] for each in ("diloco:4,lr=1,beta=0", "local:4"))
    assert 0 < (found != law).float().mean() < 0.1
    assert (found - law).abs().max() <= 2**-23 * begin.abs().max()


@pytest.mark.parametrize("workers", [1, 3])
def test_diloco_each_step_is_nesterov(simulate: Any, workers: int) -> None:
    """H = 1 with inner SGD(eta) is synchronous Nesterov with learning rate eta * lr; alone too, not plain."""
    inner = Script(size=48, epochs=3)
    outer = replace(inner, optimizer=partial(torch.optim.SGD, lr=0.1 * 0.7, momentum=0.9, nesterov=True))
    found, law = trained(simulate(inner, "diloco:1", workers)), trained(simulate(outer, "allreduce", workers))
    assert distance(found, law) < 1e-12
    assert distance(found, trained(simulate(inner, "allreduce", workers))) > 1e-3


@pytest.mark.parametrize("codec", ["", "+fp16", "+bf16"])
def test_diloco_by_hand(simulate: Any, codec: str) -> None:
    """delta = mean(theta - theta_i), m <- beta m + delta, theta <- theta - lr (delta + beta m)."""
    trace, rounding = Trace(14), {"": 1e-12, "+fp16": 2e-2, "+bf16": 1e-1}[codec]
    found = trained(simulate(trace, f"diloco:4,lr=0.5,beta=0.8{codec}", 3))["x"]
    theta = trace.begin
    x, m = [theta] * 3, torch.zeros_like(theta)
    for step in range(1, 15):
        x = [x[rank] - 0.1 * drift(rank, x[rank]) for rank in range(3)]
        if step % 4 == 0 or step == 14:
            delta = theta - mean(x)
            m = 0.8 * m + delta
            theta = theta - 0.5 * (delta + 0.8 * m)
            x = [theta] * 3
    assert close(found, theta, rounding)
    assert close(found, theta) == (not codec)


def test_weight_decay_is_inside_only(simulate: Any) -> None:
    """Without a gradient the inner decay shrinks the parameters, and the outer step adds none of its own."""
    trace = Trace(3, lambda rank, x: torch.zeros_like(x), partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    found = trained(simulate(trace, "diloco:3,lr=1,beta=0", 2))["x"]
    assert close(found, trace.begin * 0.95**3)


def test_a_failed_exchange_leaves_theta_and_momentum(simulate: Any) -> None:
    """Who meets no others at the exchange still has what was agreed on last."""
    kept: list[bool] = []

    def main() -> None:
        here = pr.init()
        numbers = Numbers(torch.ones(4, dtype=torch.float64))
        numbers, optimizer = here.prepare(numbers, SGD(numbers.parameters()))
        buffers = here._replica.buffers
        for step in range(1, 9):
            if step == 5:
                agreed, m = numbers.x.detach().clone(), buffers["m"][0].clone()
            if step == 8 and here.rank == 1:  # it is elsewhere, and there first
                here._node.all_reduce(torch.ones(1))
            numbers.x.grad = drift(here.rank, numbers.x.detach())
            try:
                optimizer.step()
            except PolyrhythmError:
                alone = (numbers.x - agreed).abs().min() > 0
                kept.extend([step == 8, torch.equal(buffers["theta"][0], agreed), bool(alone)])
                kept.extend([torch.equal(buffers["m"][0], m), bool(m.abs().min() > 0)])
                raise

    with pytest.raises(PolyrhythmError, match="worker 1 is in all_reduce"):
        simulate(main, "diloco:4", 2)
    assert kept == [True] * 5


# --- streaming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["", "+bf16"])
@pytest.mark.parametrize("period", [1, 3, 100])
def test_streaming_in_one_fragment_is_diloco(simulate: Any, period: int, codec: str) -> None:
    """P = 1, tau = 0, mix = 0 has the bits of DiLoCo."""
    script = Script(optimizer=ADAM, size=50, groups=True, epochs=3)
    streaming = simulate(script, f"streaming-diloco:{period},fragments=1,overlap=0,mix=0{codec}", 3)
    law = simulate(script, f"diloco:{period}{codec}", 3)
    assert streaming["digest"] == law["digest"] and streaming["bytes_sent"] == law["bytes_sent"]


@pytest.mark.parametrize(
    ("period", "fragments", "overlap", "mix"),
    [(4, 2, 1, 0.5), (6, 3, 0, 0.25), (12, 3, 3, 0.0), (5, 5, 0, 0.5), (6, 1, 4, 0.9)],
)
def test_streaming_by_hand(simulate: Any, period: int, fragments: int, overlap: int, mix: float) -> None:
    """theta_p makes its outer step tau steps after delta_p was taken; w_p <- (1 - mix) theta_p + mix w_p."""
    trace = Trace(40)
    simulate(
        trace, f"streaming-diloco:{period},fragments={fragments},overlap={overlap},mix={mix}", 3
    )  # fmt: skip
    theta, m = trace.begin.clone(), torch.zeros_like(trace.begin)
    x, every = [trace.begin.clone() for _ in range(3)], period // fragments
    under_way: list[tuple[int, slice, Tensor]] = []
    for step in range(1, 41):
        x = [x[rank] - 0.1 * drift(rank, x[rank]) for rank in range(3)]
        if step % every == 0:
            part = slice(*split(12, fragments)[(step // every - 1) % fragments])
            under_way.append((step + overlap, part, theta[part] - mean(x)[part]))
        if under_way and under_way[0][0] == step:
            _, part, delta = under_way.pop(0)
            m[part] = 0.9 * m[part] + delta
            theta[part] = theta[part] - 0.7 * (delta + 0.9 * m[part])
            for each in x:
                each[part] = (1 - mix) * theta[part] + mix * each[part]
        assert all(close(x[rank], trace.x[rank][step - 1], 1e-11) for rank in range(3)), step


def test_each_fragment_has_its_turn_once(simulate: Any) -> None:
    """With mix = 0 a fragment, and only it, is the same everywhere in the step that joins it: once per H."""
    trace = Trace(24)
    simulate(trace, "streaming-diloco:6,fragments=3,overlap=1,mix=0", 2)
    for step in range(1, 25):
        equal = trace.x[0][step - 1] == trace.x[1][step - 1]
        turn = [False] * 12
        if step >= 3 and step % 2:
            start, stop = split(12, 3)[(step // 2 - 1) % 3]
            turn[start:stop] = [True] * 4
        assert equal.tolist() == turn, step


@pytest.mark.parametrize(
    ("overlap", "size", "waits"),
    [(0, 80, 0.040), (1, 80, 0.030), (3, 80, 0.010), (3, 40, 0.0), (2, 40, 0.0), (1, 40, 0.010)],
)
def test_streaming_waits_for_what_steps_do_not_hide(
    simulate: Any, overlap: int, size: int, waits: float
) -> None:
    """A fragment takes half the vector's time, and of that tau steps of 10 ms are for nothing."""
    trace = Trace(17, begin=torch.ones(size, dtype=torch.float64))
    strategy = f"streaming-diloco:8,fragments=2,overlap={overlap}"
    for line in events(simulate(trace, strategy, 2, cluster=SLOW), "step"):
        joins = line["step"] >= 4 and line["step"] % 4 == overlap
        assert line["wait_s"] == pytest.approx(waits * joins, abs=1e-9), line["step"]


def test_streaming_on_real_processes_is_as_simulated(tmp_path: Path) -> None:
    """What is begun and joined later comes out the same on processes, with a look in between."""
    script = Script(optimizer=ADAM, size=50, epochs=5)
    strategy = "streaming-diloco:6,fragments=2,overlap=2,mix=0.3"
    found, law = (
        trained(how(script, workers=3, strategy=strategy, runs=tmp_path, threads=1))
        for how in (pr.run, pr.simulate)
    )
    assert same(found, law)


# --- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("local:0", "local:0: period must be 1 or more"),
        ("local:autos", "period takes a whole number or auto, not 'autos'"),
        ("local:8,momentum=forget", "momentum takes keep or average or reset, not 'forget'"),
        ("local:8,longest=9", "shortest, longest and overhead are for period=auto"),
        ("local:auto,shortest=9,longest=3", "shortest must be 1 or more, and longest no less than it"),
        ("local:auto,overhead=0", "overhead must be a finite number above 0"),
        ("local:auto,overhead=inf", "overhead must be a finite number above 0"),
        ("average:auto", "period takes a whole number, not 'auto'"),
        ("postlocal:8,after=-1", "after must be a number of steps"),
        ("slowmo:alpha=0", "alpha must be a finite number above 0"),
        ("slowmo:alpha=inf", "alpha must be a finite number above 0"),
        ("slowmo:beta=1", "beta must be 0 or more, and below 1"),
        ("diloco:beta=1", "beta must be 0 or more, and below 1"),
        ("diloco:lr=0", "lr must be a finite number above 0"),
        ("diloco:lr=inf", "lr must be a finite number above 0"),
        ("diloco:momentum=keep", "no field 'momentum'"),
        ("local:8+fp16", "local takes no codec"),
        ("streaming-diloco:10,fragments=4", "fragments must divide period.*4 does not divide 10"),
        (
            "streaming-diloco:8,fragments=4,overlap=2",
            "overlap must be from 0 to 1: a fragment is begun every 2",
        ),
        ("streaming-diloco:8,fragments=0", "fragments must be 1 or more"),
        ("streaming-diloco:mix=1", "mix must be 0 or more, and below 1"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, error: str) -> None:
    """Before anything starts, and in words."""
    with pytest.raises(UsageError, match=error):
        pr.parse(text)


@pytest.mark.parametrize("strategy", ["slowmo", "postlocal"])
def test_a_learning_rate_is_needed(strategy: str) -> None:
    """Who counts with the optimizer's lr says so if there is none."""

    class Without(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(UsageError, match=f"{strategy} .*lr"):
        pr.simulate(Trace(1, optimizer=Without), workers=2, strategy=strategy, threads=1)


def test_a_learning_rate_may_be_a_tensor(simulate: Any) -> None:
    """The slow step and the first fall read it like a number."""

    def tensor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.01))

    for strategy in ("slowmo:3", "postlocal:3"):
        found, law = (
            simulate(Script(optimizer=each, schedule=True), strategy, 2)["metrics"]["after"]
            for each in (tensor, ADAM)
        )
        assert math.isclose(found, law, rel_tol=1e-5)


def test_the_whole_family_trains_a_float32_model(simulate: Any) -> None:
    """Nothing in it needs 64 bits."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp().float()

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == FEATURES
            return self.inner(x.float())

    for strategy in FAMILY:
        summary = simulate(Script(model=Single, optimizer=MOMENTUM, epochs=4), strategy, 3)
        assert summary["metrics"]["after"] < 0.9 * summary["metrics"]["before"], strategy
