"""SparseSGD takes the steps of PyTorch with batches of one row: alone, under HogWild!, and its refusals."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm as pr
from polyrhythm.core.errors import NotFinite, PolyrhythmError, UsageError
from tests.support.combine import each_value, few
from tests.support.programs import SPEEDS, events, same, trained
from tests.support.runs import run_hogwild

pytest.importorskip("numba")

both_worlds = pytest.mark.parametrize("world", ["simulated", "real"])
both_locks = pytest.mark.parametrize("strategy", ["hogwild", "hogwild:lock=yes"])
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logistic": F.binary_cross_entropy_with_logits,
    "hinge": lambda z, y: F.relu(1 - (2 * y - 1) * z).mean(),
    "squared": F.mse_loss,
}


def bag(features: int, dtype: torch.dtype = torch.float32, weights: Tensor | None = None) -> nn.EmbeddingBag:
    model = nn.EmbeddingBag(features, 1, mode="sum", sparse=True, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.zeros(features, 1) if weights is None else weights.view(-1, 1))
    return model


@dataclass
class Rows:
    """Rows end to end."""

    words: Tensor
    offsets: Tensor
    labels: Tensor
    values: Tensor | None
    weights: Tensor  # at the beginning

    def by_pytorch(self, loss: str, lr: float) -> tuple[Tensor, float]:
        """The weights after batches of one row each, and the mean of the losses before the steps."""
        dtype = self.weights.dtype
        model = bag(len(self.weights), dtype, self.weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses = []
        ends = [*self.offsets.tolist()[1:], len(self.words)]
        for start, end, label in zip(self.offsets.tolist(), ends, self.labels.to(dtype), strict=True):
            values = None if self.values is None else self.values[start:end].to(dtype)
            optimizer.zero_grad()
            z = model(self.words[start:end].long(), torch.tensor([0]), per_sample_weights=values)[:, 0]
            step = LOSSES[loss](z, label.view(1))
            step.backward()
            optimizer.step()
            losses.append(step.item())
        return model.weight.detach()[:, 0], sum(losses) / len(losses)

    def by_rows(self, loss: str, lr: float) -> tuple[Tensor, float]:
        model = bag(len(self.weights), self.weights.dtype, self.weights)
        mean = pr.SparseSGD(model.parameters(), lr=lr, loss=loss).learn(
            self.words, self.offsets, self.labels, self.values
        )
        return model.weight.detach()[:, 0], mean


@st.composite
def some_rows(draw: Any, whole: bool) -> Rows:
    """Few features, so that rows contain some several times; rows may be empty."""
    features = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=30))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    count = sum(lengths)

    def numbers(size: int) -> Tensor:
        found = random.integers(-4, 5, size) / 4 if whole else random.normal(size=size)
        return torch.from_numpy(found).to(dtype)

    return Rows(
        torch.from_numpy(random.integers(0, features, count)).to(
            draw(st.sampled_from([torch.int32, torch.int64]))
        ),
        torch.tensor([0, *np.cumsum(lengths)[:-1].tolist()]),
        torch.from_numpy(random.integers(0, 2, len(lengths))).to(
            draw(st.sampled_from([torch.int64, torch.bool, dtype]))
        ),
        numbers(count) if draw(st.booleans()) else None,
        numbers(features),
    )


@settings(deadline=None, max_examples=60)
@given(rows=some_rows(whole=True))
def test_sparse_sgd_equals_pytorch_exactly_where_sums_are_exact(rows: Rows) -> None:
    """With multiples of 1/4 and a power of two as the rate, hinge steps are exact."""
    ours, mean = rows.by_rows("hinge", 2.0**-6)
    theirs, other = rows.by_pytorch("hinge", 2.0**-6)
    assert torch.equal(ours, theirs) and mean == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_sparse_sgd_equals_pytorch_up_to_rounding_for_every_loss(loss: str, data: Any) -> None:
    rows = data.draw(some_rows(whole=False))
    exact = rows.weights.dtype == torch.float64
    ours, mean = rows.by_rows(loss, 0.05)
    theirs, other = rows.by_pytorch(loss, 0.05)
    near = {"rtol": 1e-11, "atol": 1e-12} if exact else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(ours, theirs, **near)
    assert mean == pytest.approx(other, rel=1e-10 if exact else 1e-3, abs=1e-12 if exact else 1e-4)


def test_a_matrix_is_rows_of_equal_length() -> None:
    x = torch.randint(30, (40, 5), generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 70).float()
    values = x / 30
    found = []
    for words, offsets, weights in (
        (x, None, values),
        (x.view(-1), torch.arange(0, 200, 5), values.view(-1)),
        (x.T.contiguous().T, None, values.T.contiguous().T),  # in another order in memory
        (x.int(), None, values.double()),
    ):
        model = bag(30)
        optimizer = pr.SparseSGD(model.parameters(), lr=0.1)
        found.append([optimizer.learn(words, offsets, y, weights) for _ in range(3)])
        found[-1] += model.weight.detach()[:, 0].tolist()
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][0] > found[0][1] > found[0][2]


def test_sparse_sgd_result_does_not_depend_on_the_batch_size() -> None:
    """The weights have the same bits, however rows are divided into batches."""
    x = torch.randint(30, (60, 5), generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 70).float()
    found = []
    for size in (1, 7, 60):
        model = bag(30)
        optimizer = pr.SparseSGD(model.parameters(), lr=0.1)
        for some, labels in zip(x.split(size), y.split(size), strict=True):
            optimizer.learn(some, None, labels)
        found.append(model.weight.detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_sparse_sgd_follows_learning_rate_schedulers() -> None:
    """A rate may be a tensor; with rate 0 nothing changes."""
    x, y = torch.tensor([[1, 2]]), torch.ones(1)
    model = bag(3)
    optimizer = pr.SparseSGD(model.parameters(), lr=torch.tensor(0.5), loss="squared")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    weights = []
    for _ in range(3):
        optimizer.learn(x, None, y)
        scheduler.step()
        weights.append(model.weight[1].item())
    # z: 0, then 2 w; w <- w - rate * 2 (z - 1)
    assert weights == [1.0, 0.5, 0.5]
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.learn(x, None, y) == 0.0 and model.weight[1].item() == 0.5


def test_sparse_sgd_resumes_exactly_from_state_dict() -> None:
    """Its state has the rate and the loss; the weights are the model's."""
    x = torch.randint(30, (60, 5), generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 70).float()
    first = bag(30)
    optimizer = pr.SparseSGD(first.parameters(), lr=0.3, loss="hinge")
    optimizer.learn(x, None, y)
    second = bag(30)
    other = pr.SparseSGD(second.parameters(), lr=9.0)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert other.learn(x, None, y) == optimizer.learn(x, None, y)
    assert torch.equal(first.weight, second.weight)


def test_a_deepcopy_of_sparse_sgd_trains_independently() -> None:
    x, y = torch.tensor([[1, 2]]), torch.ones(1)
    model = bag(3)
    optimizer = pr.SparseSGD(model.parameters(), lr=0.5, loss="squared")
    both = copy.deepcopy((model, optimizer))
    assert both[1].learn(x, None, y) == 1.0
    assert not model.weight.any() and both[0].weight[:, 0].tolist() == [0.0, 1.0, 1.0]


def test_sparse_sgd_loads_a_state_dict_of_torch_sgd() -> None:
    """It takes the saved rate, and keeps its own loss."""
    model = bag(3)
    saved = torch.optim.SGD(model.parameters(), lr=0.5).state_dict()
    optimizer = pr.SparseSGD(model.parameters(), lr=9.0, loss="squared")
    optimizer.load_state_dict(saved)
    assert optimizer.learn(torch.tensor([[1, 2]]), None, torch.ones(1)) == 1.0
    assert model.weight[:, 0].tolist() == [0.0, 1.0, 1.0]


# --- refusals ---------------------------------------------------------------------------------------

X, OFFSETS, Y = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2]), torch.tensor([0.0, 1.0])


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ((torch.tensor([0, 4, 1, 1]), OFFSETS, Y), "word 1 is 4, but there are 4 features"),
        ((torch.tensor([0, 1, -1, 1]), OFFSETS, Y), "word 2 is -1, but there are 4 features"),
        ((X.int() - 1, OFFSETS, Y), "word 0 is -1, but there are 4 features"),
        ((X.float(), OFFSETS, Y), r"words must be int32 or int64, but are torch\.float32"),
        ((X, torch.tensor([0.0, 2.7]), Y), r"offsets must be int32 or int64, but are torch\.float32"),
        ((X, OFFSETS.view(1, 2), Y), "offsets have 2 dimensions; they must be a vector"),
        ((X.numpy(), OFFSETS, Y), "words must be a tensor, but are ndarray"),
        ((X, [0, 2], Y), "offsets must be a tensor, but are list"),
        ((X, OFFSETS, [0, 1]), "labels must be a tensor, but are list"),
        ((X, OFFSETS, None), "labels must be a tensor, but are NoneType"),
        ((X, OFFSETS, Y, 1.0), "values must be a tensor, but are float"),
        ((X, None, Y), "words have 1 dimensions: they must be a matrix without offsets, or"),
        ((X.view(2, 2), OFFSETS, Y), "words have 2 dimensions"),
        ((X.view(2, 2), None, torch.ones(3)), r"there are 2 rows, but labels of shape \(3,\)"),
        ((X.view(2, 2), None, torch.ones(2, 1)), r"there are 2 rows, but labels of shape \(2, 1\)"),
        ((X[:0].view(0, 2), None, Y[:0]), r"there are 0 rows, but labels of shape \(0,\)"),
        (
            (X, torch.tensor([1, 2]), Y),
            "offset 0 is 1: offsets must begin with 0, not decrease, and not exceed",
        ),
        ((X, torch.tensor([0, 5]), Y), "offset 1 is 5"),
        ((X, torch.tensor([0, 3, 2]), torch.ones(3)), "offset 2 is 2"),
        ((X, OFFSETS, torch.tensor([0.0, torch.nan])), "label 1 is nan; it must be 0 or 1 for the logistic"),
        ((X, OFFSETS, torch.tensor([-1.0, 1.0])), "label 0 is -1; it must be 0 or 1 for the logistic loss"),
        ((X, OFFSETS, Y, torch.tensor([1, 1, 1, torch.inf])), "value 3 is inf; it must be a finite number"),
        ((X, OFFSETS, Y, torch.ones(3)), r"values have the shape \(3,\), but words \(4,\)"),
    ],
)
def test_bad_batches_change_nothing(args: Any, what: str) -> None:
    model = bag(4)
    optimizer = pr.SparseSGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=f"^SparseSGD: {what}"):
        optimizer.learn(*args)
    assert not model.weight.any()
    with pytest.raises(UsageError, match="call learn"):  # the batch is forgotten
        optimizer.step()


def test_labels_of_the_squared_loss_are_any_finite_numbers() -> None:
    optimizer = pr.SparseSGD(bag(4).parameters(), lr=0.1, loss="squared")
    assert optimizer.learn(X, OFFSETS, torch.tensor([-3.0, 4.0])) == 12.5
    with pytest.raises(UsageError, match="label 1 is inf; it must be a finite number"):
        optimizer.learn(X, OFFSETS, torch.tensor([0.0, torch.inf]))


@pytest.mark.parametrize(
    ("parameters", "settings", "what"),
    [
        ([torch.zeros(3, 2)], {}, r"one tensor of shape \(features, 1\) on the CPU.* given \(3, 2\) on cpu"),
        ([torch.zeros(3)], {}, r"given \(3,\) on cpu"),
        ([{"params": []}], {}, "given none"),
        ([torch.zeros(3, 1), torch.zeros(1, 1)], {}, r"given \(3, 1\) on cpu, \(1, 1\) on cpu"),
        ([torch.zeros(3, 1, device="meta")], {}, r"given \(3, 1\) on meta"),
        ([torch.zeros(3, 1).half()], {}, r"weights must be float32 or float64, but are torch\.float16"),
        ([torch.zeros(3, 1)], {"lr": -1}, "lr is -1; it must be a finite number, 0 or more"),
        ([torch.zeros(3, 1)], {"lr": float("nan")}, "lr is nan"),
        ([torch.zeros(3, 1)], {"loss": "log"}, "loss is 'log'; it must be one of logistic, hinge, squared"),
    ],
)
def test_sparse_sgd_refuses_unsupported_parameters_and_settings(
    parameters: list[Tensor], settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=f"^SparseSGD: .*{what}"):
        pr.SparseSGD(parameters, **{"lr": 0.1, **settings})


def test_sparse_sgd_stops_before_a_nonfinite_step() -> None:
    """The rows before it are learned; this row and the later ones are not."""
    model = bag(4, torch.float64, torch.tensor([0.0, 0.0, 1e300, 0.0], dtype=torch.float64))
    optimizer = pr.SparseSGD(model.parameters(), lr=0.1, loss="squared")
    with pytest.raises(NotFinite, match="row 1 of a batch of 3 would make a step that is not finite"):
        optimizer.learn(torch.tensor([[0], [2], [3]]), None, torch.ones(3))
    assert model.weight[:, 0].tolist() == [0.2, 0.0, 1e300, 0.0]


def test_error_for_a_diverging_sparse_sgd_names_the_worker(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init()
        model = bag(4)
        optimizer = pr.SparseSGD(model.parameters(), lr=1e30, loss="squared")
        _, optimizer = session.prepare(model, optimizer)
        for _ in range(4):
            optimizer.learn(torch.arange(4).view(1, 4), None, torch.ones(1))

    with pytest.raises(
        PolyrhythmError, match="worker 0: row 0 of a batch of 1 would make a step that is not"
    ):
        run_hogwild(main, "simulated", 1, tmp_path)


def test_sparse_sgd_without_numba_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(UsageError, match=r"SparseSGD needs numba, which is not installed: pip install"):
        pr.SparseSGD(bag(4).parameters(), lr=0.1)


# --- under a session --------------------------------------------------------------------------------


@dataclass
class Learns:
    """A user's script."""

    size: int = 96
    epochs: int = 2
    features: int = 100
    dtype: torch.dtype = torch.float32
    schedule: bool = True
    saved: Path | None = None  # resumes from this file if it exists, and saves to it

    def __call__(self) -> nn.Module:
        session = pr.init()
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(self.features, (self.size, 6), generator=generator)
        y = (x.sum(1) > 3 * self.features).float()
        model = bag(self.features, self.dtype)
        optimizer = pr.SparseSGD(model.parameters(), lr=0.1)
        if self.saved is not None and self.saved.exists():
            state = torch.load(self.saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5 if self.schedule else 1.0)
        for _ in range(self.epochs):
            for batch, labels in loader:
                loss = optimizer.learn(batch, None, labels)
                scheduler.step()
        session.log(loss=loss)
        if self.saved is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, self.saved)
        return model


@each_value(
    ("world", ["simulated", "real"]),
    ("strategy", ["hogwild", "hogwild:lock=yes"]),
    ("dtype", [torch.float32, torch.float64]),
)
def test_sparse_sgd_under_hogwild_with_one_worker_equals_plain_training(
    world: str, strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit; steps, samples and updates are counted."""
    script = Learns(dtype=dtype)
    summary = run_hogwild(script, world, 1, tmp_path, strategy)
    assert same(trained(summary), dict(script().state_dict()))
    assert summary["samples"] == 2 * 96 and summary["steps"] == 2 * 96 // 4
    assert summary["lost_updates"] == {"counted": 2 * 96 * 6, "lost": 0, "share": 0.0}
    lines = events(summary, "step")
    assert [line["samples"] for line in lines] == [4] * 48 and lines[-1]["step"] == 48
    assert 0 < summary["metrics"]["loss"] < 1


@both_worlds
@both_locks
def test_several_workers_share_the_rows(world: str, strategy: str, tmp_path: Path) -> None:
    summary = run_hogwild(Learns(), world, 3, tmp_path, strategy)
    assert summary["samples"] == 2 * 96 and summary["lost_updates"]["counted"] == 2 * 96 * 6
    assert summary["batches_undone"] == 0
    if world == "simulated" or "lock" in strategy:
        assert summary["lost_updates"]["lost"] == 0


class Slow(pr.SparseSGD):
    def step(self, closure: Any = None) -> None:
        time.sleep(0.1)
        super().step(closure)


def test_learning_is_computing_and_not_waiting(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init()
        model = bag(8)
        model, optimizer = session.prepare(model, Slow(model.parameters(), lr=0.1))
        for _ in range(5):
            optimizer.learn(torch.arange(8).view(2, 4), None, torch.ones(2))

    summary = run_hogwild(main, "real", 1, tmp_path)
    assert summary["compute_s"] >= 0.5
    assert all(line["compute_s"] >= 0.1 for line in events(summary, "step"))


def test_sparse_sgd_counts_lost_updates_on_a_sample_of_features(tmp_path: Path) -> None:
    """Of 2^20 features exactly one in 256 is counted."""

    def main() -> None:
        session = pr.init()
        model = bag(1 << 20)
        model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=1.0, loss="squared"))
        for step in range(10):
            optimizer.learn((torch.arange(512) + 512 * step).view(16, 32), None, torch.ones(16))

    for world in ("simulated", "real"):
        assert run_hogwild(main, world, 2, tmp_path)["lost_updates"]["counted"] == 2 * 10 * 64 * 8 // 256


def test_gradients_that_backward_left_are_no_updates(tmp_path: Path) -> None:
    """No step uses them."""

    def main() -> None:
        session = pr.init()
        model = bag(8)
        model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=0.1))
        model(torch.arange(8).view(2, 4)).sum().backward()
        optimizer.learn(torch.arange(4).view(1, 4), None, torch.ones(1))

    assert run_hogwild(main, "simulated", 1, tmp_path)["lost_updates"]["counted"] == 4


def test_rows_without_a_step_are_no_updates(tmp_path: Path) -> None:
    """A row beyond the margin of the hinge changes no weight, and is not counted."""

    def main() -> None:
        session = pr.init()
        model = bag(4, weights=torch.tensor([2.0, 0.0, 0.0, 0.0]))
        model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=0.125, loss="hinge"))
        assert optimizer.learn(torch.tensor([[0], [1]]), None, torch.ones(2)) == 0.5

    assert run_hogwild(main, "simulated", 1, tmp_path)["lost_updates"]["counted"] == 1


@dataclass
class Disjoint:
    """Each worker learns rows of its own features; alone, one worker learns them for all in turn."""

    workers: int
    seed: int
    rows: int = 20_000
    features: int = 500

    def __call__(self) -> nn.Module:
        session = pr.init()
        alone = session.strategy is None
        model = bag(self.workers * self.features)
        model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=0.05))
        for rank in range(self.workers) if alone else [session.rank]:
            random = np.random.default_rng([self.seed, rank])
            # Neighbors in memory belong to different workers: cache lines travel between them.
            words = random.integers(0, self.features, (self.rows, 7)) * self.workers + rank
            labels = random.integers(0, 2, self.rows)
            for some in np.array_split(np.arange(self.rows), 5):
                optimizer.learn(torch.from_numpy(words[some]), None, torch.from_numpy(labels[some]))
        return model


@each_value(
    ("world", ["simulated", "real"]), ("strategy", ["hogwild", "hogwild:lock=yes"]), ("seed", range(2))
)
def test_disjoint_features_give_the_bits_of_one_worker(
    world: str, strategy: str, seed: int, tmp_path: Path
) -> None:
    """If no two workers touch the same weight, the order of steps does not matter."""
    script = Disjoint(workers=2, seed=seed)
    summary = run_hogwild(script, world, 2, tmp_path, strategy)
    assert same(trained(summary), dict(script().state_dict()))
    assert summary["lost_updates"] == {"counted": 2 * 20_000 * 7, "lost": 0, "share": 0.0}


def ones(rows: int) -> None:
    """Each row adds 2^-24 to the same 8 weights, exactly: a lower sum means lost updates."""
    session = pr.init()
    model = bag(8)
    model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=2.0**-24, loss="hinge"))
    for _ in range(4):
        optimizer.learn(torch.arange(8).repeat(rows, 1), None, torch.ones(rows))


@both_worlds
@both_locks
def test_under_a_lock_nothing_is_lost(world: str, strategy: str, tmp_path: Path) -> None:
    """Without a lock no more updates are lost than made, by the weights and by the counters."""
    rows = 50_000
    summary = run_hogwild(lambda: ones(rows), world, 2, tmp_path, strategy)
    made = 2 * 4 * rows
    weights = trained(summary)["weight"][:, 0].double() * 2**24
    told = summary["lost_updates"]
    assert told["counted"] == 8 * made and 0 <= told["lost"] < told["counted"]
    if world == "simulated" or "lock" in strategy:
        assert weights.tolist() == [made] * 8 and told["lost"] == 0
    else:
        assert all(0 < weight <= made for weight in weights.tolist())


@pytest.mark.parametrize(("strategy", "turns"), [("hogwild", 1), ("hogwild:lock=yes", 4)])
def test_simulated_sparse_sgd_with_a_lock_takes_the_serial_time(
    strategy: str, turns: int, tmp_path: Path
) -> None:
    """A batch takes the time of a step; with a lock batches are serial."""

    def main() -> None:
        session = pr.init()
        model = bag(8)
        model, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=0.1))
        for _ in range(10):
            optimizer.learn(torch.arange(8).view(2, 4), None, torch.ones(2))

    summary = run_hogwild(main, "simulated", 4, tmp_path, strategy, cluster=SPEEDS["constant"])
    assert summary["wall_s"] == pytest.approx(turns * 10 * 0.010)


def test_interrupted_sparse_sgd_run_resumes_exactly(tmp_path: Path) -> None:
    whole = trained(run_hogwild(Learns(epochs=2, schedule=False), "simulated", 1, tmp_path))
    script = Learns(epochs=1, schedule=False, saved=tmp_path / "state.pt")
    assert not same(trained(run_hogwild(script, "simulated", 1, tmp_path)), whole)
    assert same(trained(run_hogwild(script, "simulated", 1, tmp_path)), whole)


@each_value(
    ("world", ["simulated", "real"]), ("strategy", ["allreduce", "async", "local:2", "gossip", "broadcast"])
)
def test_gradient_strategies_refuse_sparse_sgd(world: str, strategy: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{strategy} exchanges gradients, but SparseSGD computes its own"):
        run_hogwild(Learns(), world, 2, tmp_path, strategy)


def test_sparse_sgd_refuses_step_without_learn_in_a_run(tmp_path: Path) -> None:
    def main() -> None:
        session = pr.init()
        model = bag(8)
        _, optimizer = session.prepare(model, pr.SparseSGD(model.parameters(), lr=0.1))
        optimizer.step()

    with pytest.raises(UsageError, match=r"SparseSGD: call learn\(words, offsets, labels\), which takes the"):
        run_hogwild(main, "simulated", 1, tmp_path)


# --- workers that die or are stopped ----------------------------------------------------------------


@dataclass
class Killed:
    """Worker 1 is killed once, in the middle of a long row; the others learn the rest of its data."""

    mark: Path
    long: int = 30_000_000

    def __call__(self) -> None:
        session = pr.init()
        model = bag(1000)
        optimizer = pr.SparseSGD(model.parameters(), lr=1e-3, loss="hinge")
        x = torch.randint(1000, (400, 6), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, torch.ones(400)), batch_size=10)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for batch, labels in loader:
            optimizer.learn(batch, None, labels)
            time.sleep(0.005)  # so that the others are still there when they hear of a death
            if session.rank == 1 and not self.mark.exists():
                self.mark.touch()
                threading.Thread(target=self.kill, args=(optimizer,)).start()
                # The loop is compiled in `learn` above, so nearly all of the time is spent in the row.
                optimizer.learn(
                    torch.arange(1000).repeat(self.long // 1000), torch.tensor([0]), torch.ones(1)
                )
                os.kill(os.getpid(), signal.SIGKILL)  # in case the thread came too late

    def kill(self, optimizer: Any) -> None:
        lock = optimizer._lock
        while lock is not None and lock.main.holder != 1:
            time.sleep(0.0001)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@both_locks
@pytest.mark.parametrize("restarts", [0, 2])
def test_sparse_sgd_run_continues_after_a_worker_is_killed_within_a_row(
    strategy: str, restarts: int, tmp_path: Path
) -> None:
    """With the mutex or without: the others take it next, and all rows are learned."""
    summary = run_hogwild(
        Killed(tmp_path / "killed"), "real", 3, tmp_path, strategy, restarts=restarts, timeout=60.0
    )
    assert set(summary["lost"]) == {"worker 1"} and summary["batches_undone"] == 0
    assert torch.isfinite(trained(summary)["weight"]).all()
    assert 0 <= summary["lost_updates"]["lost"] <= summary["lost_updates"]["counted"]


@dataclass
class Stopped:
    """Worker 1 holds the lock and is stopped; the other waits for it, in a compiled loop or in a step."""

    mark: Path
    rows: bool

    def __call__(self) -> None:
        session = pr.init()
        model = bag(1000)
        x, y = torch.arange(1000).view(10, 100), torch.ones(10)
        optimizer: Any
        if self.rows:
            optimizer = pr.SparseSGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer)
        if session.rank == 1:
            if self.rows:
                optimizer._lock.take()
            else:
                model(x)
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        while not self.mark.exists():
            time.sleep(0.01)
        if self.rows:
            optimizer.learn(x, None, y)
        else:
            model(x).sum().backward()


@pytest.mark.slow
@few("rows", [True, False], quick=1)
def test_waiting_for_the_lock_of_a_stopped_worker_times_out_and_names_it(rows: bool, tmp_path: Path) -> None:
    """A worker that waits for it gives up after the timeout, and names the holder."""
    began = time.monotonic()
    with pytest.raises(
        PolyrhythmError, match=r"worker 0 waited \d+\.\d s for worker 1 to release the lock 'step'"
    ):
        run_hogwild(Stopped(tmp_path / "taken", rows), "real", 2, tmp_path, "hogwild:lock=yes", timeout=2.0)
    assert time.monotonic() - began > 2


INTERRUPTED = """
import os, signal, sys, threading, time
from polyrhythm.wire import Arenas
from polyrhythm.wire.shared_region import SharedRegion
arenas = Arenas(1, 1 << 30)
holder = os.fork()
if not holder:
    SharedRegion(arenas).lock("x", 7).take()
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(holder, os.WUNTRACED)
import torch, polyrhythm as pr
optimizer = pr.SparseSGD([torch.zeros(4, 1)], lr=0.1)
batch = torch.tensor([[1, 2]]), None, torch.ones(1)
optimizer.share(0, optimizer._counters, SharedRegion(arenas).lock("free"))
optimizer.learn(*batch)  # compiled by now
optimizer.param_groups[0]["params"][0].zero_()
optimizer.share(0, optimizer._counters, SharedRegion(arenas).lock("x"))

def interrupt(main):  # once the innermost Python function is the one that calls the compiled loop
    while sys._current_frames()[main].f_code.co_name != "_learn_locked":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

try:
    threading.Thread(target=interrupt, args=(threading.get_ident(),)).start()
    optimizer.learn(*batch)
except KeyboardInterrupt:
    print("interrupted", optimizer.param_groups[0]["params"][0].any().item())
finally:
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
"""


@pytest.mark.slow
def test_ctrl_c_is_heard_while_a_compiled_loop_waits() -> None:
    """It waits for a lock that is never released."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100, check=False,
        cwd=Path(pr.__file__).parents[1],
    )  # fmt: skip
    assert done.stdout == "interrupted False\n", done.stderr
