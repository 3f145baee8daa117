"""Branches on several workers compute what the whole model computes, in both worlds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyrhythm as pr
from polyrhythm.parallel import divide, estimates
from tests.parallel.test_branches import random_places
from tests.parallel.test_pipelines import ROWS, Misuse, Training, Twice, chain, distance, final
from tests.support.combine import few
from tests.support.programs import events, trained
from tests.support.runs import run_in


class Towers(nn.Module):
    """Two sequences through one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        ends = [self.lstm(half.unsqueeze(2))[0][:, -1] for half in (x[:, :3], x[:, 3:])]
        return self.out(torch.cat(ends, -1))


class Experts(nn.Module):
    """A stem, four unequal experts, one of which shares its weights with the last layer, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.experts = nn.ModuleList(self._expert(width) for width in (8, 16, 8, 24))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.experts[2][0].weight
        self.out = nn.Linear(8, 6)

    def _expert(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x)).relu()
        total = h
        for expert in self.experts:
            total = total + expert(h)
        return self.out(torch.tanh(self.last(total)))


class Blocks(nn.Module):
    """Two blocks with two ways each, one behind the other, and a skip connection over both."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.ways[0](x)) * torch.sigmoid(self.ways[1](x))
        second = torch.tanh(self.ways[2](first)) + self.ways[3](first).relu_()
        return second + x


class Woven(nn.Module):
    """Every layer takes the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(torch.tanh(layer(torch.stack(made).sum(0))))
        return made[-1] * made[1]


@pytest.fixture
def free_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches of small models pay, too."""
    monkeypatch.setattr(estimates, "MESSAGE", 0.0)


@pytest.mark.usefixtures("free_messages")
@pytest.mark.parametrize("make", [Towers, Experts, Blocks])
def test_branches_train_like_the_whole_model(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    program = Training(make, clip=0.05, momentum=0.9)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    assert distance(final("simulated", program, "branches:2", 2, tmp_path), whole) < 1e-12
    if make is Experts:  # BatchNorm, whose statistics are at one place
        pipeline = final("simulated", program, "pipeline:2,micro_batches=1", 2, tmp_path)
        assert distance(pipeline, whole) < 1e-12
    unclipped = Training(make, momentum=0.9)
    assert distance(final("simulated", unclipped, "allreduce", 1, tmp_path), whole) > 1e-4


@pytest.mark.parametrize("seed", [2, 3])
def test_any_division_trains_like_the_whole_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with micro-batches, where values go to and fro, and several segments of a place use one value."""
    program = Training(Woven, momentum=0.9)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    monkeypatch.setattr(
        divide, "choose_places", lambda graph, how, costs: random_places(graph, how.size, seed)
    )
    found = final("simulated", program, f"branches:2,micro_batches={2 * seed - 3}", 2, tmp_path)
    assert distance(found, whole) < 1e-12


@pytest.mark.usefixtures("free_messages")
@few("strategy", ["local:2", "allreduce"], quick=1)
def test_a_strategy_in_lockstep_trains_branches_like_whole_models(strategy: str, tmp_path: Path) -> None:
    program = Training(Blocks)
    whole = final("simulated", program, strategy, 2, tmp_path)
    assert distance(final("simulated", program, f"{strategy}@branches:2", 4, tmp_path), whole) < 1e-12


@few("strategy", ["ssp:1", "async+topk:0.5"], quick=1)
def test_strategies_with_servers_train_branches(strategy: str, tmp_path: Path) -> None:
    summary = run_in(
        "simulated", Training(Blocks), strategy=f"{strategy}@branches:2", workers=4, runs=tmp_path
    )
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


def test_several_passes_and_evaluation_in_between(tmp_path: Path) -> None:
    whole = final("simulated", Twice(Blocks), "allreduce", 1, tmp_path)
    assert distance(final("simulated", Twice(Blocks), "branches:2", 2, tmp_path), whole) < 1e-12


class Heads(nn.Module):
    """A dict with a tuple; the heads never meet, and one of them drops values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        h = self.stem(x)
        return {"left": (self.left(h) * scale, h), "right": self.drop(self.right(h.tanh()))}


class Calling:
    """Calls a model with keywords and a gradient for its input, whole and divided, also with fewer rows."""

    def __init__(self, seen: list[list[Tensor]]) -> None:
        self.seen = seen

    def __call__(self) -> None:
        torch.manual_seed(2)
        session = pr.init()
        model = Heads().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(5, 6).double()
        model, optimizer = session.prepare(model, optimizer, example={"x": x, "scale": 2.0})
        script = torch.rand(1)
        dropped = model(x=torch.ones(64, 6).double(), scale=2.0)["right"].detach()
        assert 0.3 < (dropped == 0).double().mean() < 0.7
        assert torch.equal(script, torch.rand(1)) is False
        x.requires_grad_()
        found = model.eval()(x=x, scale=2.0)
        (found["left"][0].sum() + (found["left"][1] * found["right"]).sum()).backward()
        optimizer.step()
        assert x.grad is not None
        with torch.no_grad():
            again = model(x=x[:3], scale=2.0)
        self.seen.append([found["left"][0].detach(), found["right"].detach(), x.grad, again["right"]])
        self.seen[-1].append(torch.rand(3).double())  # of the script: dropout draws apart from it


def test_dicts_tuples_dropout_and_gradients_of_inputs(tmp_path: Path) -> None:
    seen: list[list[Tensor]] = []
    for strategy, workers in (("allreduce", 1), ("branches:modules=left/right", 2)):
        run_in("simulated", Calling(seen), strategy=strategy, workers=workers, runs=tmp_path)
    whole, *divided = seen
    assert len(divided) == 2
    for each in divided:
        for mine, expected in zip(each[:-1], whole[:-1], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert torch.equal(divided[0][-1], divided[1][-1])


class Wide(nn.Module):
    """Two equal branches that take nearly all of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0](x) + self.ways[1](x)


@pytest.mark.usefixtures("free_messages")
def test_branches_run_at_the_same_time(tmp_path: Path) -> None:
    """In simulated time both branches begin together, forward and backward, and take half of the step."""
    alone = run_in("simulated", Training(Wide), strategy="allreduce", workers=1, runs=tmp_path)
    summary = run_in("simulated", Training(Wide), strategy="branches:2", workers=2, runs=tmp_path)
    log = events(summary, "micro-batch")
    assert {each["stage"] for each in log} == {0, 1}
    for direction in ("forward", "backward"):
        way = [each for each in log if each["direction"] == direction]
        long = [each for each in way if each["seconds"] > 0.5 * max(other["seconds"] for other in way)]
        first, second = ([each for each in long if each["stage"] == place] for place in (0, 1))
        assert first and len(first) == len(second)
        for one, two in zip(first, second, strict=True):
            assert abs(one["began"] - two["began"]) < 0.2 * one["seconds"]
    assert summary["wall_s"] < 0.6 * alone["wall_s"]


class SharedNorm(nn.Module):
    """Two branches through one BatchNorm, whose statistics cannot be in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.ways, self.norm = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        one, two = (self.norm(way(x)).tanh() for way in self.ways)
        return one * two


@pytest.mark.parametrize(
    ("strategy", "workers", "model", "error"),
    [
        ("branches:2", 2, chain(), "no branches that can run at the same time.*use pipeline:2"),
        ("branches:2", 2, SharedNorm(), "batch_norm changes a value in place.*use pipeline:2"),
        ("branches:3", 3, Wide(), "more workers than .* use branches:2"),
        ("branches:modules=ways.0/way", 2, Wide(), "no submodule 'way'; similar ones"),
        ("branches:2@pipeline:2", 4, Wide(), "would divide one model in 2 ways"),
        ("branches:3,modules=a/b", 3, Wide(), "3 workers need as many submodules"),
    ],
)
def test_what_has_no_branches_is_refused_in_one_line(
    strategy: str, workers: int, model: nn.Module, error: str
) -> None:
    with pytest.raises(pr.UsageError, match=error) as raised:
        run_in("simulated", Misuse(model), strategy=strategy, workers=workers)
    assert "\n" not in str(raised.value)


def test_small_branches_train_and_a_line_says_that_they_do_not_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in("simulated", Training(Blocks), strategy="branches:2", workers=2, runs=tmp_path)
    shown = capsys.readouterr()
    assert "too small to pay" in shown.out + shown.err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce@branches:2", "allreduce+bf16@branches:2"])
def test_real_processes_compute_the_bits_of_the_simulation(strategy: str, tmp_path: Path) -> None:
    program = Training(Experts, clip=0.5)
    simulated = final("simulated", program, strategy, 4, tmp_path)
    assert distance(final("real", program, strategy, 4, tmp_path), simulated) == 0
