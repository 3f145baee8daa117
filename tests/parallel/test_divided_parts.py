"""Several models and optimizers, each model divided by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.combine import few
from tests.support.gan import Gan, alone
from tests.support.programs import ADAM, MOMENTUM, distance, same, trained
from tests.support.runs import run_in

TENSOR = "tensor:2,column=0,row=2"


@few(
    "strategy, models",
    [
        ("allreduce@pipeline:2", 2),
        ("async@pipeline:2", 1),
        (f"sync@{TENSOR}", 2),
        ("local:3@pipeline:2", 2),
    ],
    quick=2,
)
def test_a_divided_gan_trains_like_a_whole_one(strategy: str, models: int, tmp_path: Path) -> None:
    """What every worker sees of both models after each round, the consensus, and the result."""
    plain = strategy.partition("@")[0]
    whole, divided = Gan(ADAM), Gan(ADAM)
    law = trained(run_in("simulated", whole, strategy=plain, workers=models, runs=tmp_path))
    found = run_in("simulated", divided, strategy=strategy, workers=2 * models, runs=tmp_path)
    assert distance(trained(found), law) < 1e-12 and found["samples"] == 2 * 24
    for worker in range(2 * models):
        rounds = zip(divided.seen[worker], whole.seen[worker // 2], strict=True)
        assert max(distance(mine, theirs) for mine, theirs in rounds) < 1e-12
        assert distance(divided.consensus[worker], law) < 1e-12


def test_one_divided_gan_is_plain_pytorch(tmp_path: Path) -> None:
    found = run_in("simulated", Gan(MOMENTUM), strategy="async@pipeline:2", workers=2, runs=tmp_path)
    assert distance(trained(found), alone(Gan(MOMENTUM))) < 1e-12


@few("strategy", ["allreduce+topk:0.3@pipeline:2", "sync@pipeline:2", f"diloco:3@{TENSOR}"], quick=0)
def test_a_divided_gan_resumes_exactly(strategy: str, tmp_path: Path) -> None:
    def digest(begin: int, end: int) -> str:
        script = Gan(MOMENTUM, folder=tmp_path, begin=begin, epochs=end)
        return str(run_in("simulated", script, strategy=strategy, workers=4)["digest"])

    whole = digest(0, 4)
    digest(0, 2)
    assert digest(2, 4) == whole


@few(
    "strategy",
    ["ssp:1@pipeline:2", "async+topk:0.3@pipeline:2", "gossip@pipeline:2", "hogwild@pipeline:2"],
    quick=1,
)
def test_divided_gans_train_without_lockstep(strategy: str, tmp_path: Path) -> None:
    script = Gan(MOMENTUM)
    summary = run_in("simulated", script, strategy=strategy, workers=4, runs=tmp_path)
    assert summary["samples"] == 2 * 24
    # Each of two workers has seen the rounds of a model, in which two optimizers stepped.
    assert summary["steps"] == sum(len(each) for each in script.seen.values())
    assert all(bool(torch.isfinite(value).all()) for value in trained(summary).values())


@pytest.mark.slow
def test_real_processes_train_divided_gans_to_the_bits_of_the_simulation(tmp_path: Path) -> None:
    runs = [
        run_in(world, Gan(MOMENTUM), strategy="allreduce@pipeline:2", workers=4, runs=tmp_path)
        for world in ("simulated", "real")
    ]
    assert same(*map(trained, runs))


class Chain:
    """Two models one after the other, with one optimizer for both or with one for each layer."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def __call__(self) -> None:
        session = pr.init()
        torch.manual_seed(3)
        models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(2)]
        parameters = [each for model in models for each in model.parameters()]
        optimizers = [torch.optim.SGD(parameters, lr=0.1)]
        if self.wrong == "layers":
            optimizers = [torch.optim.SGD(each, lr=0.1) for each in (parameters[:2], parameters[2:])]
        x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
        if self.wrong == "inputs":
            models[1] = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)).double()
            optimizers = [torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)]
        if self.wrong == "tied":
            models[1][0].weight = models[0][0].weight
            optimizers = [torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.1)]
        if self.wrong == "inputs":
            session.prepare(*models, *optimizers, DataLoader(TensorDataset(x, y), 3))
        session.prepare(*models, *optimizers, example=x if self.wrong == "example" else [x, x])
        for _ in range(3):
            optimizers[0].zero_grad()
            F.mse_loss(models[1](models[0](x)), y).backward()
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizers[0].step()


def test_one_optimizer_may_train_two_divided_models(tmp_path: Path) -> None:
    """And its gradients are clipped by the norm of both."""
    whole, divided = (
        trained(run_in("simulated", Chain(), strategy=strategy, workers=workers, runs=tmp_path))
        for strategy, workers in (("allreduce", 1), ("pipeline:2", 2))
    )
    assert distance(divided, whole) < 1e-12


@few(
    "wrong, error",
    [
        ("layers", r"worker 1 of a model under pipeline:2 would have no parameter to train by SGD 0"),
        ("example", r"2 models to divide: pass example=\[...\] with an example of the inputs of each"),
        ("inputs", r"example=\[...\]"),
        ("tied", r"0.weight is in two models, and pipeline:2 divides each by itself"),
    ],
    quick=2,
)
def test_what_cannot_be_divided_is_refused_in_one_line(wrong: str, error: str) -> None:
    with pytest.raises(pr.UsageError, match=error) as raised:
        run_in("simulated", Chain(wrong), strategy="pipeline:2", workers=2)
    assert "\n" not in str(raised.value)
