"""A pipeline computes what the whole model computes, under every strategy and in both worlds."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from tests.support.combine import each_value, few
from tests.support.programs import trained
from tests.support.runs import run_in

ROWS, BATCH = 44, 8  # the last batch is smaller


class Skipping(nn.Module):
    """Layers with a connection over two cuts, and weights that the first and the last layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(6, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = self.first(x)
        h = begin
        for layer in self.inner:
            h = torch.tanh(layer(h))
        return (h + begin) @ self.last.weight


def chain() -> nn.Module:
    return nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(6, 6), nn.Tanh())))


class Training:
    """Trains a model for an epoch, and keeps the losses that each worker has seen."""

    def __init__(self, make: Callable[[], nn.Module], clip: float = 0.0, momentum: float = 0.0) -> None:
        self.make, self.clip, self.momentum = make, clip, momentum

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        model = self.make().double()
        data = TensorDataset(torch.randn(ROWS, 6).double(), torch.randn(ROWS, 6).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
        loader = DataLoader(data, BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            losses.append(loss.item())
        session.log(first=losses[0] if losses else 0.0, last=losses[-1] if losses else 0.0)


def final(
    world: str, program: Any, strategy: str, workers: int, runs: Path, **options: Any
) -> dict[str, torch.Tensor]:
    return trained(run_in(world, program, strategy=strategy, workers=workers, runs=runs, **options))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@each_value(("make", [chain, Skipping]), ("stages", [2, 4]))
def test_a_pipeline_trains_like_the_whole_model(
    make: Callable[[], nn.Module], stages: int, tmp_path: Path
) -> None:
    program = Training(make, momentum=0.9)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    for fields in ("micro_batches=1", "micro_batches=3", "micro_batches=8,recompute=yes"):
        strategy = f"pipeline:{stages},{fields}"
        assert distance(final("simulated", program, strategy, stages, tmp_path), whole) < 1e-12


@few("strategy", ["allreduce", "local:2", "gossip", "diloco:2"], quick=1)
def test_a_strategy_in_lockstep_trains_pipelines_like_whole_models(strategy: str, tmp_path: Path) -> None:
    program = Training(chain)
    whole = final("simulated", program, strategy, 2, tmp_path)
    assert distance(final("simulated", program, f"{strategy}@pipeline:2", 4, tmp_path), whole) < 1e-12


def test_clipping_uses_the_norm_of_the_whole_model(tmp_path: Path) -> None:
    program = Training(Skipping, clip=0.05)
    whole = final("simulated", program, "allreduce", 1, tmp_path)
    assert distance(final("simulated", program, "pipeline:2", 2, tmp_path), whole) < 1e-12
    assert distance(final("simulated", Training(Skipping), "allreduce", 1, tmp_path), whole) > 1e-3


@few(
    "strategy, models",
    [
        ("allreduce+dgc:1,clip=0.05,masking=no,values=fp32", 2),
        ("async:clip=0.05", 1),
        ("async+dgc:1,clip=0.05,values=fp32", 1),
    ],
    quick=2,
)
def test_a_norm_of_a_codec_or_a_strategy_is_that_of_the_whole_model(
    strategy: str, models: int, tmp_path: Path
) -> None:
    """Of a gradient that is much longer than that."""
    program = Training(Skipping)
    whole = final("simulated", program, strategy, models, tmp_path)
    divided = final("simulated", program, f"{strategy}@pipeline:2", 2 * models, tmp_path)
    assert distance(divided, whole) < 1e-12
    free = final("simulated", program, strategy.replace("clip=0.05", "clip=1000"), models, tmp_path)
    assert distance(free, whole) > 1e-3


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        ("sync:clip=0.5@pipeline:2", "call clip_grad_norm_ in the script"),
        ("allreduce+dgc:clip=1@pipeline:2,schedule=pipedream", "stages are of different batches"),
    ],
)
def test_norms_that_no_worker_knows_are_refused(strategy: str, error: str) -> None:
    with pytest.raises(pr.UsageError, match=error):
        pr.parse(strategy)


@few("strategy", ["async+topk:0.5", "adpsgd", "ssp:1", "sync", "async", "easgd:2", "hogwild"], quick=2)
def test_strategies_with_servers_and_without_lockstep_train_pipelines(strategy: str, tmp_path: Path) -> None:
    summary = run_in(
        "simulated", Training(chain), strategy=f"{strategy}@pipeline:2", workers=4, runs=tmp_path
    )
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


class Scheduled(Training):
    """Has a scheduler that was made before `prepare`."""

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        model = self.make().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        x, y = torch.randn(BATCH, 6).double(), torch.randn(BATCH, 6).double()
        model, optimizer = session.prepare(model, optimizer, example=x)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_train_pipelines_whose_scheduler_was_made_before(servers: int, tmp_path: Path) -> None:
    whole = final("simulated", Scheduled(chain), "async", 1, tmp_path)
    divided = final("simulated", Scheduled(chain), "async@pipeline:2", 2, tmp_path, servers=servers)
    assert distance(divided, whole) < 1e-12


class Masked(nn.Module):
    """Takes a mask with as many rows as a batch has, and a scale that is no tensor; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(BATCH, BATCH), nn.Linear(BATCH, BATCH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        inner = torch.tanh(self.first(x)) @ mask
        return {"inner": inner, "outer": (self.second(inner) * scale, x)}


class Calling:
    """Calls a model with keywords and a gradient for its input, whole and divided."""

    def __init__(self, seen: list[list[torch.Tensor]]) -> None:
        self.seen = seen

    def __call__(self) -> None:
        torch.manual_seed(2)
        session = pr.init()
        model = Masked().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, mask = torch.randn(BATCH, BATCH).double(), torch.randn(BATCH, BATCH).double()
        example = {"x": x, "mask": mask, "scale": 2.0}
        model, optimizer = session.prepare(model, optimizer, example=example)
        x.requires_grad_()
        mask.requires_grad_()
        found = model(**{**example, "x": x})
        (found["inner"].sum() + (found["outer"][0] * found["outer"][1]).sum()).backward()
        optimizer.step()
        assert x.grad is not None and mask.grad is not None
        self.seen.append([found["inner"].detach(), found["outer"][0].detach(), x.grad, mask.grad])


def test_inputs_without_rows_stay_whole_and_inputs_get_gradients_on_all_workers(tmp_path: Path) -> None:
    seen: list[list[torch.Tensor]] = []
    for strategy, workers in (("allreduce", 1), ("pipeline:2,micro_batches=4", 2)):
        run_in("simulated", Calling(seen), strategy=strategy, workers=workers, runs=tmp_path)
    whole, *divided = seen
    assert len(divided) == 2
    for each in divided:
        for mine, expected in zip(each, whole, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


class Frozen(nn.Module):
    """Its first layer is not trained, and a value without a gradient passes over the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bias = nn.Parameter(torch.zeros(6))
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x)
        return self.second(torch.tanh(self.first(x + self.bias.detach()))) * mask + self.bias


class Twice(Training):
    """Calls the model twice before one backward pass, and evaluates it in between."""

    def __call__(self) -> None:
        torch.manual_seed(5)
        session = pr.init()
        model = self.make().double()
        data = TensorDataset(torch.randn(ROWS, 6).double(), torch.randn(ROWS, 6).double())
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, BATCH))
        for x, y in loader:
            optimizer.zero_grad()
            first = model(x)
            with torch.no_grad():
                shown = model.eval()(x)
            loss = F.mse_loss(model.train()(x + 1), y) + F.mse_loss(first, y)
            assert torch.allclose(shown, first)
            loss.backward()
            optimizer.step()
        assert [each.requires_grad for each in session.consensus().parameters()] == [
            each.requires_grad for each in self.make().parameters()
        ]


@pytest.mark.parametrize("make", [Skipping, Frozen])
def test_several_forward_passes_and_frozen_layers_train_like_the_whole_model(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    whole = final("simulated", Twice(make), "allreduce", 1, tmp_path)
    assert distance(final("simulated", Twice(make), "pipeline:2", 2, tmp_path), whole) < 1e-12


class Misuse:
    """Prepares a model and trains it for one step, in some wrong way."""

    def __init__(self, model: nn.Module, wrong: str = "") -> None:
        self.model, self.wrong = model, wrong

    def __call__(self) -> None:
        session = pr.init()
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = DataLoader(TensorDataset(torch.randn(8, 6), torch.randn(8, 6)), 4)
        model, optimizer, loader = session.prepare(model, optimizer, given)
        for x, y in loader:
            if self.wrong == "mode":
                model[0].eval()
            if self.wrong == "save":
                torch.save(model, io.BytesIO())
            if self.wrong == "copy":
                copy.deepcopy(model)(x)
            other = session._context.place if self.wrong == "batches" else 0.0  # type: ignore[attr-defined]
            loss = F.mse_loss(model(x + other), y) if self.wrong != "loss" else model(x)
            loss.backward(create_graph=self.wrong == "twice", retain_graph=self.wrong == "again")
            if self.wrong == "again":
                loss.backward()
            optimizer.step()


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(0))


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x


@few(
    "strategy, workers, program, error",
    [
        ("pipeline:5", 5, Misuse(chain()), "more stages than the model has layers .* use 4 at most"),
        ("allreduce@pipeline:2", 3, Misuse(chain()), "3 is no multiple of 2: use 2 or 4 workers"),
        (
            "pipeline:9",
            2,
            Misuse(chain()),
            "there are 2: use 9, or fewer parts .polyrhythm plan SCRIPT --stages 9",
        ),
        ("pipeline:split_at=layer2", 2, Misuse(chain()), "no submodule 'layer2'; similar ones"),
        ("pipeline:2", 2, Misuse(Deciding()), "cannot be cut into stages"),
        (
            "pipeline:2",
            2,
            Misuse(chain().half()),
            "cannot be called with a batch of the loader as it is .*dtype.*: pass an example",
        ),
        ("pipeline:2", 2, Misuse(Mean(), "loss"), "micro_batches=1"),
        ("pipeline:2", 2, Misuse(chain(), "batches"), "call it with different batches"),
        ("pipeline:2", 2, Misuse(chain(), "mode"), "some layers .* are in training mode"),
        ("pipeline:2", 2, Misuse(chain(), "save"), "save model.state_dict"),
        ("pipeline:2", 2, Misuse(chain(), "twice"), "cannot be differentiated twice"),
        ("pipeline:2", 2, Misuse(chain(), "again"), "a second time"),
        ("pipeline:2", 2, Misuse(chain(), "copy"), "copy the model that session.consensus"),
        ("pipeline:2", 2, Misuse(Centered()), "depends on other rows of its batch"),
    ],
    quick=7,
)
def test_misuse_of_a_divided_model_is_refused_in_one_line(
    strategy: str, workers: int, program: Misuse, error: str
) -> None:
    with pytest.raises(pr.UsageError, match=error) as raised:
        run_in("simulated", program, strategy=strategy, workers=workers)
    assert "\n" not in str(raised.value)


class Dropping:
    """Trains a model with dropout in two stages, and draws numbers in the script."""

    def __call__(self) -> None:
        torch.manual_seed(1)
        session = pr.init()
        layers = [nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5)]
        for layer in layers[::2]:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.ones(8, 64), torch.ones(8, 64)), 8)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x, y in loader:
            noise = torch.rand(3)
            output = model(x)
            F.mse_loss(output + noise.sum(), y).backward()
            optimizer.step()
            kept = (output > 0).float().mean().item()  # by both layers
            assert 0.15 < kept < 0.35, kept  # one half, if both drew the same
            with torch.no_grad():
                assert torch.equal(model.eval()(x), x)  # evaluation drops nothing
                assert not torch.equal(model.train()(x), model(x))
        session.log(number=torch.rand(1).item())


def test_stages_draw_their_own_numbers_and_the_script_draws_the_same(tmp_path: Path) -> None:
    run_in("simulated", Dropping(), strategy="pipeline:2,split_at=2", workers=2, runs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["allreduce@pipeline:2", "local:2@pipeline:2", "allreduce+bf16@pipeline:2"]
)
def test_real_processes_compute_the_bits_of_the_simulation(strategy: str, tmp_path: Path) -> None:
    program = Training(Skipping, clip=0.5)
    simulated = final("simulated", program, strategy, 4, tmp_path)
    assert distance(final("real", program, strategy, 4, tmp_path), simulated) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "gossip", "adpsgd", "hogwild", "async+topk:0.5"])
def test_real_processes_train_pipelines(strategy: str, tmp_path: Path) -> None:
    summary = run_in("real", Training(chain), strategy=f"{strategy}@pipeline:2", workers=4, runs=tmp_path)
    assert summary["samples"] == ROWS
    assert all(torch.isfinite(each).all() for each in trained(summary).values())


def test_the_summary_has_times_and_bytes_of_each_stage(simulate: Any) -> None:
    halves = simulate(Training(Skipping), "allreduce@pipeline:2", 4)
    for figure in ("compute_s", "wait_s", "bytes_sent"):
        each = [place[figure] for place in halves["places"]]
        assert len(each) == 2 and min(each) > 0 and sum(each) == pytest.approx(halves[figure])
    uneven = simulate(Training(chain), "pipeline:2,split_at=6", 2)  # three of four layers are in stage 0
    first, second = (place["compute_s"] for place in uneven["places"])
    assert first == pytest.approx(3 * second, rel=0.1)
    assert "places" not in simulate(Training(chain), "allreduce", 2)
