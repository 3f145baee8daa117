"""Buckets: every gradient exactly once, whatever the sizes, and the same result however they are cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.model import buckets
from polyrhythm.model.buckets import parcel
from polyrhythm.model.replica import Replica
from tests.support.combine import each_value
from tests.support.programs import MOMENTUM, SGD, Examples, Script, distance, events, mlp, same, trained

both_worlds = pytest.mark.parametrize("how", [pr.simulate, pr.run], ids=["simulated", "real"])


def test_parcel_does_not_lose_the_last_tensor() -> None:
    """One that goes on by the capacity of a bucket, and not by what is packed, loses the last."""
    assert parcel([4, 4, 2], 6, 6) == [[0], [1, 2]]


@example([1, 7, 1, 1], 2, 9)  # the last is cut in two, and both parts of the second count
@given(st.lists(st.integers(0, 50)), st.integers(0, 40), st.integers(0, 40))
def test_everything_is_packed_exactly_once(sizes: list[int], first: int, later: int) -> None:
    packed = parcel(sizes, first, later)
    assert list(itertools.chain(*packed)) == list(range(len(sizes)))
    for number, bucket in enumerate(packed):
        assert bucket
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= (later if number else first)
    if packed and sizes[-1] <= first:
        assert sum(sizes[index] for index in packed[-1]) <= first  # little is left when backward is over


def small(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Buckets of a few numbers; the processes of a run inherit it."""
    monkeypatch.setattr(buckets, "FIRST", size)
    monkeypatch.setattr(buckets, "LATER", size)


def test_the_buckets_of_a_replica_cover_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of readiness every element is in exactly one bucket."""
    small(monkeypatch, 8 * 20)
    model = mlp()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for order in ([3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2]):
        replica.gradients.arrange(order)
        assert [index for bucket in replica.gradients.buckets for index in bucket.indexes] == order
        replica.gradient[0].zero_()
        for bucket in replica.gradients.buckets:
            for part in bucket.gradient:
                part.add_(1)
        assert (replica.gradient[0] == 1).all()
        assert sum(bucket.share for bucket in replica.gradients.buckets) == pytest.approx(1)


@both_worlds
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce+bf16"])
def test_result_does_not_depend_on_the_bucket_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: Any, strategy: str
) -> None:
    """One bucket or one per tensor: the result does not depend on it, in both worlds, with uneven rounds."""
    script = Script(optimizer=MOMENTUM, size=50, epochs=3, shuffle=True, clip=0.1)
    digests = set()
    for size in (1 << 20, 8 * 20, 1):
        small(monkeypatch, size)
        digests.add(how(script, workers=3, strategy=strategy, runs=None, threads=1)["digest"])
    assert len(digests) == 1


class Branches(nn.Module):
    """Each step uses one of two branches, and workers do not use the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.ways = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)])
        self.steps = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        which = (next(self.steps) + int(x[0, 0] > 0)) % 2  # the third is never used
        return self.ways[which](torch.tanh(self.first(x)))


@both_worlds
def test_unused_parameters_do_not_hang_or_change_bucketed_allreduce(
    monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """Gradients that some workers do not have, or nobody, neither hang nor count."""
    results = set()
    for size in (1 << 20, 1):
        small(monkeypatch, size)
        script = Script(model=lambda: Branches().double(), optimizer=MOMENTUM)
        results.add(how(script, workers=3, strategy="allreduce", runs=None, threads=1)["digest"])
    assert len(results) == 1


# --- overlap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.75, 0.0])
@pytest.mark.parametrize("accumulated", [False, True])
def test_buckets_are_scaled_when_they_are_handed_on(
    scale: float, accumulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During backward, unless they are added to a gradient that keeps its own scale; the same bits."""
    small(monkeypatch, 8 * 20)
    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = mlp()
        gradients = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)).gradients
        x, y = Examples(6).tensors
        if accumulated:
            gradients.before_backward()
            F.cross_entropy(model(x), y).backward()
            gradients.after_backward()
        handed: list[Any] = []
        gradients.scale(scale)
        gradients.before_backward(handed.append if overlap else None)
        F.cross_entropy(model(x), y).backward()
        assert len(handed) == (overlap and (scale == 1 or not accumulated)) * len(gradients.buckets)
        gradients.after_backward()
        while gradients.begun < len(gradients.buckets):
            gradients.hand_on(handed.append)
        assert len(handed) == len(gradients.buckets) > 1
        gradients.check_finite("worker 0", 1)
        found.append([vector.clone() for vector in gradients.vectors])
    assert all(map(torch.equal, *found))
    assert bool(found[0][0].any()) == (scale > 0 or accumulated)


def test_an_exchange_goes_on_beside_backward(monkeypatch: pytest.MonkeyPatch, simulate: Any) -> None:
    """The time of a step: a bucket's exchange begins when it is complete and the one before it is over."""
    step, rate, order = 1.0, 1000.0, [3, 2, 1, 0]  # backward completes the last layer first
    small(monkeypatch, 1)
    cluster = f'[[hosts]]\nstep_time = "{step} s"\nbandwidth = "{rate * 8} bit/s"'
    script = Script(size=16, batch=4, epochs=2)  # 2 workers: 4 steps
    summary = simulate(script, "allreduce", 2, cluster=cluster)
    nbytes = [8 * parameter.numel() for parameter in mlp().parameters()]
    total, seconds = sum(nbytes), lambda count: 2 * (2 - 1) / 2 * count / rate
    ready = step - sum(step * 2 / 3 * nbytes[index] / total for index in order[1:])
    free = 0.0
    for place, index in enumerate(order):
        ready += step * 2 / 3 * nbytes[index] / total if place else 0
        more = 4 * len(nbytes) if place == 3 else 0  # who has a gradient
        free = max(free, ready) + seconds(nbytes[index] + more)
    steps = [line for line in events(summary, "step") if line["node"] == "worker 0"]
    lengths = [later["t"] - earlier["t"] for earlier, later in itertools.pairwise(steps)]
    assert lengths[1:] == pytest.approx([free] * (len(lengths) - 1), rel=1e-9)
    assert free < step + seconds(total)  # that is what it is for


class Checkpointed(nn.Module):
    """Layers whose forward is done again in backward; one of them twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = self._again(lambda value: torch.tanh(self.middle(value)), x)
        return self.last(x)

    def _again(self, layer: Any, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.reentrant)


@each_value(
    ("how", [pytest.param(pr.simulate, id="simulated"), pytest.param(pr.run, id="real")]),
    ("workers", [1, 2]),
    ("size", [1, 1 << 20]),
)
def test_activation_checkpointing_gives_the_same_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: Any, workers: int, size: int
) -> None:
    """Backward inside backward, which completes a gradient twice, gives what is right without it."""
    small(monkeypatch, size)
    models = []
    for reentrant in (None, False, True):
        script = Script(model=partial(_checkpointed, reentrant), optimizer=MOMENTUM)
        models.append(trained(how(script, workers=workers, strategy="allreduce", runs=tmp_path, threads=1)))
    assert same(models[0], models[1])
    assert distance(models[0], models[2]) < 1e-12


def _checkpointed(reentrant: bool | None) -> nn.Module:
    return Checkpointed(reentrant).double()


# --- scripts that do unusual things -----------------------------------------------------------------


@dataclass
class Unusual:
    """Steps of SGD on four layers, with something in between; keeps nothing but what the run keeps."""

    what: str
    steps: int = 6

    def __call__(self) -> None:
        session = pr.init()
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        other = nn.Linear(4, 1).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = session.prepare(model, optimizer)
        if self.what == "late hook":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(self._halve)
        for number in range(self.steps):
            x = torch.full((3, 4), 0.1 * (number + 1) * (session.rank + 1), dtype=torch.float64)
            if self.what == "fails late" and session.rank and number == 3:
                replica = session._replica  # type: ignore[attr-defined]
                last = list(model.parameters())[replica.gradients.buckets[-1].indexes[-1]]
                node = last.view_as(last).grad_fn.next_functions[0][0]
                node.register_hook(self._raise)  # when this one is done, all are
            if self.what == "half" and session.rank:
                x = model[0](x).detach()  # the first layer is used by worker 0 only
                loss = model[1:](x).square().sum()
            else:
                loss = model(x).square().sum()
            if self.what == "nan" and number == 2 and session.rank == 1:
                loss = loss * math.nan
            fails = number % 3 == 1 and (self.what == "fails" or (self.what == "one fails" and session.rank))
            handle = model[1].weight.register_hook(self._raise) if fails else None
            try:
                loss.backward(create_graph=self.what == "graph")
            except ValueError:
                optimizer.zero_grad()
                continue
            finally:
                if handle is not None:
                    handle.remove()
            if self.what == "nan":
                other(x.detach()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def _halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    @staticmethod
    def _raise(*_: Any) -> None:
        raise ValueError("in the midst of backward")


@pytest.mark.parametrize("what", ["fails", "late hook", "graph", "half"])
@pytest.mark.parametrize("way", ["auto", "ring"])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_unusual_scripts_give_the_same_in_both_worlds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, way: str
) -> None:
    """A backward pass that fails on all, hooks that come late, a graph of the gradient, unused layers."""
    small(monkeypatch, 1)
    options: dict[str, Any] = {"workers": 2, "strategy": "allreduce", "runs": tmp_path, "threads": 1}
    results = [
        pr.simulate(Unusual(what), collective=way, **options),
        pr.run(Unusual(what), collective=way, **options),
    ]
    assert same(trained(results[0]), trained(results[1]))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("one fails", "another worker skipped a failed backward pass"),
        ("fails late", "the others take this step"),
    ],
)
def test_a_pass_that_fails_on_one_worker_only_is_an_error(
    monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    """Its script went on, and the others have parts of its gradient: they do not take the rest for it."""
    small(monkeypatch, 1)
    with pytest.raises(pr.PolyrhythmError, match=message):
        pr.run(Unusual(what), workers=2, strategy="allreduce", runs=None, threads=1)


@both_worlds
def test_nonfinite_gradient_is_found_after_backward_of_another_model(
    monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """A gradient that is not finite is found though another model's pass comes before the step."""
    small(monkeypatch, 1)
    with pytest.raises(pr.PolyrhythmError, match=r"worker 1: .* not finite"):
        how(Unusual("nan"), workers=2, strategy="allreduce", runs=None, threads=1)


def test_a_parameter_that_one_worker_uses_is_used_for_ever(simulate: Any) -> None:
    """Its flag does not fade as the mean of 1 and 0, of a half and 0, and so on until it is nothing."""
    count = 400

    def script() -> None:
        session = pr.init()
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(count):
            if not session.rank:
                (-2 * model.weight.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert trained(simulate(script, "allreduce", 2))["weight"].item() == count


# --- accumulation -----------------------------------------------------------------------------------


class Accumulating:
    """Two batches per step, the first without exchange if told so."""

    def __init__(self, quiet: bool, clip: float = 0.0, left_over: bool = False) -> None:
        self.quiet, self.clip, self.left_over = quiet, clip, left_over

    def __call__(self) -> None:
        session = pr.init()
        model = mlp()
        optimizer = SGD(model.parameters())
        loader = DataLoader(Examples(48), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                last = number % 2 == 1
                if self.quiet and not (last and not self.left_over):
                    with session.accumulating():
                        (F.cross_entropy(model(x), y) / 2).backward()
                else:
                    (F.cross_entropy(model(x), y) / 2).backward()
                if last:
                    if self.clip:
                        nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                    optimizer.step()
                    optimizer.zero_grad()


@both_worlds
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_accumulating_halves_the_bytes_and_keeps_the_result(tmp_path: Path, how: Any, clip: float) -> None:
    """The same result, clipping included, with half of the bytes."""
    runs = [
        how(Accumulating(quiet, clip), workers=2, strategy="allreduce", runs=tmp_path, threads=1)
        for quiet in (False, True)
    ]
    assert distance(trained(runs[0]), trained(runs[1])) < 1e-14
    start = runs[0]["bytes_sent"] - 2 * runs[1]["bytes_sent"]
    vector = sum(8 * parameter.numel() for parameter in mlp().parameters())
    assert start == -vector  # the first parameters travel once, in both


@both_worlds
def test_a_step_inside_accumulating_still_exchanges_gradients(tmp_path: Path, how: Any) -> None:
    """Who forgets to leave `accumulating()` gets the exchange in `step()`."""
    runs = [
        how(Accumulating(True, left_over=each), workers=2, strategy="allreduce", runs=tmp_path, threads=1)
        for each in (False, True)
    ]
    assert distance(trained(runs[0]), trained(runs[1])) < 1e-14
    assert runs[0]["bytes_sent"] == runs[1]["bytes_sent"]


def test_accumulating_without_a_run_is_plain_gradient_accumulation() -> None:
    """Gradients add up as they do without it."""
    model = mlp()
    x = torch.ones(2, 5, dtype=torch.float64)
    model(x).sum().backward()
    one = [parameter.grad.clone() for parameter in model.parameters()]
    with pr.Session().accumulating():
        model(x).sum().backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), one, strict=True))
