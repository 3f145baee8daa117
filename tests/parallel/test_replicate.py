"""replicate: the output and the gradient are those of the plain model on the whole batch."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.model.hooks import Hook
from polyrhythm.parallel.replicate import Replicated
from tests.support.programs import CLASSES, FEATURES, Examples, mlp, normed, odd, trained
from tests.support.runs import run_in

CPUS = ["cpu"] * 4


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Tensor]


class Nested(nn.Module):
    """Takes and returns nested structures; an LSTM keeps its weights in a second list."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(FEATURES, 4, batch_first=True)
        self.out = nn.ParameterList([nn.Parameter(torch.randn(4, CLASSES))])

    def forward(self, x: Tensor, more: dict[str, Any]) -> Pair:
        y = self.recurrent(torch.stack([x, more["offset"]], 1))[0][:, -1] @ self.out[0]
        return Pair(y, {"squares": y.square() * more["factor"], "name": more["name"]})  # type: ignore[dict-item]


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    return found


def same(one: list[Tensor | None], other: list[Tensor | None], tolerance: float) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=tolerance, rtol=0.0)


@given(examples=st.integers(1, 11), devices=st.integers(1, 5), build=st.sampled_from([mlp, odd]))
def test_gradient_is_that_of_the_whole_batch(
    examples: int, devices: int, build: Callable[[], nn.Module]
) -> None:
    """For batches of any size, also with fewer examples than devices; bit for bit on one device."""
    torch.manual_seed(examples)
    plain = build()
    replicated = pr.replicate(copy.deepcopy(plain), ["cpu"] * devices)
    tolerance = 0.0 if min(examples, devices) == 1 else 1e-12
    x, y = torch.randn(examples, FEATURES, dtype=torch.float64), torch.arange(examples) % CLASSES
    for _ in range(2):  # in turns, then side by side
        outputs = [model(x) for model in (plain, replicated)]
        torch.testing.assert_close(outputs[0], outputs[1], atol=tolerance, rtol=0.0)
        for output in outputs:
            F.cross_entropy(output, y).backward()
        same(gradients(plain), gradients(replicated), tolerance)


def test_nested_inputs_and_outputs_are_divided_and_merged() -> None:
    plain = Nested().double()
    replicated = pr.replicate(copy.deepcopy(plain), CPUS)
    x = torch.randn(7, FEATURES, dtype=torch.float64, requires_grad=True)
    more = {"offset": x * 2, "factor": torch.tensor(3.0), "name": "squares"}
    ours, theirs = replicated(x, more=more), plain(x, more=more)
    assert isinstance(ours, Pair) and ours.rest["name"] == "squares"
    torch.testing.assert_close(ours.first, theirs.first, atol=1e-12, rtol=0.0)
    inputs = []
    for model, output in ((plain, theirs), (replicated, ours)):
        (output.first.sum() + output.rest["squares"].mean()).backward(retain_graph=True)
        inputs.append(x.grad)
        x.grad = None
        output.first.detach_()
        inputs.append(next(model.parameters()).grad)
    same(inputs[:2], inputs[2:], 1e-12)


def test_passes_can_be_repeated_bit_for_bit() -> None:
    """Threads that end in another order add up gradients in the same order; dropout draws the same masks."""
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        model = pr.replicate(nn.Sequential(nn.Linear(8, 64), nn.Dropout(dropout), nn.Linear(64, 1)), CPUS)
        x, found = torch.randn(13, 8), []
        for _ in range(5):
            torch.manual_seed(1)
            model(x).square().mean().backward()
            found.append(gradients(model))
        for other in found[1:]:
            same(found[0], other, 0.0)


def test_replicas_drop_different_units() -> None:
    torch.manual_seed(0)
    model = pr.replicate(nn.Dropout(0.5), ["cpu", "cpu"])
    for _ in range(3):
        first, second = model(torch.ones(2, 64))
        assert not torch.equal(first, second)
    assert torch.equal(model.eval()(torch.ones(2, 64)), torch.ones(2, 64))


def test_replicas_run_in_threads_at_the_same_time() -> None:
    """Each waits for all others; autograd, autocast and inference mode are those of the caller."""
    barrier = threading.Barrier(3, timeout=30)
    seen: list[tuple[bool, bool, torch.dtype]] = []

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.bias[0] == 0:  # not in the first pass, in which replicas take turns
                barrier.wait()
                seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x.T).dtype))
            return super().forward(x)

    model = pr.replicate(Waits(4, 4), ["cpu"] * 3)
    model(torch.ones(3, 4))
    nn.init.zeros_(model.module.bias)  # type: ignore[arg-type]
    model(torch.ones(3, 4))
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        model(torch.ones(3, 4))
    assert seen == [(True, False, torch.float32)] * 3 + [(False, True, torch.float16)] * 3


def test_an_error_in_a_replica_reaches_the_caller() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if (x < 0).any():
                raise ValueError("negative")
            return super().forward(x)

    model = pr.replicate(Fails(1, 1), ["cpu", "cpu"])
    model(torch.ones(2, 1))
    with pytest.raises(ValueError, match="negative") as raised:
        model(torch.tensor([[1.0], [-1.0]]))
    assert "replica on cpu" in raised.value.__notes__[0]
    assert model(torch.ones(3, 1)).shape == (3, 1)


def test_buffers_are_those_of_the_first_device() -> None:
    plain, model = nn.BatchNorm1d(3), pr.replicate(nn.BatchNorm1d(3), ["cpu", "cpu"])
    x = torch.randn(7, 3)
    for _ in range(2):
        plain(x[:4])
        merged = model(x)
    assert all(torch.equal(*pair) for pair in zip(plain.buffers(), model.buffers(), strict=True))
    torch.testing.assert_close(merged[:4], plain(x[:4]))
    torch.testing.assert_close(merged[4:], nn.BatchNorm1d(3)(x[4:]))


def test_parameters_are_copied_to_devices_and_outputs_merged_elsewhere() -> None:
    """The one other device that every machine has computes shapes only."""
    model = pr.replicate(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), ["meta", "meta"], "meta", "cpu")
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}
    output = model(torch.ones(5, 3))
    assert output.device.type == "meta" and output.shape == (5, 4) and output.requires_grad
    one = pr.replicate(nn.Linear(3, 4), ["cpu"], merge_device="meta")
    assert one(torch.ones(5, 3)).device.type == "meta"
    mixed = pr.replicate(nn.Linear(3, 4), ["cpu", "meta"], merge_device="meta")
    assert mixed(torch.ones(5, 3)).shape == (5, 4)


def test_buffers_that_change_on_another_device_are_copied_back() -> None:
    """A module whose tensors are elsewhere works on copies; here the copies are on the same device."""
    model = pr.replicate(nn.BatchNorm1d(3), ["cpu", "cpu"])
    before = {name: each.clone() for name, each in model.named_buffers()}
    model.devices[0] = torch.device("cpu", 0)  # compares unequal to "cpu", as another device would
    model(torch.randn(8, 3))
    assert all(not torch.equal(each, before[name]) for name, each in model.named_buffers())
    model.eval()(torch.randn(8, 3))
    assert model.module.num_batches_tracked == 1


def test_state_names_modes_and_copies_are_those_of_the_module() -> None:
    plain = odd()
    model = pr.replicate(plain, ["cpu", "cpu"])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.module is plain and "on cpu, cpu" in repr(model)
    assert model.eval() is model and not plain.training and not model.training
    other = copy.deepcopy(model)
    assert other.get_parameter("last.weight") is other.module.get_parameter("last.weight")
    assert other.get_parameter("last.weight") is not plain.get_parameter("last.weight")
    model.load_state_dict({name: each + 1 for name, each in other.state_dict().items()})
    assert torch.equal(plain.state_dict()["last.bias"], other.state_dict()["last.bias"] + 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    x = torch.randn(5, FEATURES, dtype=torch.float64)
    assert torch.equal(read(x), model(x)) and read.float()(x.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mlp(), "cpu"), "pass a list of devices"),
        ((mlp(), []), "pass a list of devices"),
        ((mlp(), ["nonsense"]), "'nonsense' is no device"),
        ((mlp(), ["cuda:0", "cuda:99"]), "there is no cuda:"),
        ((mlp, ["cpu"]), "takes a plain torch.nn.Module, not function"),
        ((pr.replicate(mlp(), ["cpu"]), ["cpu"]), "not Replicated"),
        ((nn.LazyLinear(3), ["cpu"]), "run a batch through the model first"),
    ],
)
def test_what_cannot_be_replicated_is_refused(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(pr.UsageError, match=message):
        pr.replicate(*arguments)


@pytest.mark.parametrize(
    ("returns", "arguments", "message"),
    [
        (lambda x: x.mean(), [torch.ones(4, 2)], r"shapes \(\), \(\) for 2, 2 examples.*row per example"),
        (lambda x: x.T, [torch.ones(6, 2)], r"shapes \(2, 3\), \(2, 3\) for 3, 3 examples"),
        (lambda x: [x] * len(x), [torch.ones(3, 2)], "different structure"),
        (len, [torch.ones(3, 2)], "different values, 2 and others"),
        (lambda x: x, [3], "without a tensor"),
        (lambda x, y: x, [torch.ones(3, 2), torch.ones(2)], r"\(3, 2\), \(2,\), which cannot be divided"),
    ],
)
def test_what_cannot_be_divided_or_merged_is_refused(
    returns: Callable[..., Any], arguments: list[Any], message: str
) -> None:
    class Returns(nn.Module):
        def forward(self, *args: Any) -> Any:
            return returns(*args)

    with pytest.raises(pr.UsageError, match=message):
        pr.replicate(Returns(), ["cpu", "cpu"])(*arguments)


def test_hooks_of_a_session_run_once_in_a_pass() -> None:
    """They are about the whole batch; those of the script run for each replica."""
    calls: list[str] = []
    model = pr.replicate(mlp(), CPUS)
    layer: Any = model.get_submodule("0")
    layer.register_forward_hook(Hook(lambda *_: calls.append("session")))
    layer.register_forward_hook(lambda *_: calls.append("script"))
    for _ in range(2):
        model(torch.randn(8, FEATURES, dtype=torch.float64))
    assert calls.count("session") == 2 and calls.count("script") == 2 * len(CPUS)


def program(replicas: int, build: Callable[[], nn.Module] = mlp) -> Callable[[], None]:
    def train() -> None:
        torch.manual_seed(0)
        session = pr.init()
        model = build()
        if replicas:
            model = pr.replicate(model, ["cpu"] * replicas)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(Examples(42), batch_size=5)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert isinstance(session.consensus(), Replicated) == bool(replicas)

    return train


@pytest.mark.parametrize(
    ("world", "strategy"), [("simulated", "allreduce"), ("simulated", "async"), ("real", "allreduce")]
)
def test_a_session_trains_the_plain_model(world: str, strategy: str, tmp_path: Any) -> None:
    """The result has the same names, and the same values within rounding."""
    plain, ours = (
        trained(run_in(world, program(replicas), strategy=strategy, workers=2, runs=tmp_path / str(replicas)))
        for replicas in (0, 3)
    )
    assert plain.keys() == ours.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-12, rtol=0.0)


def test_borrowed_batches_change_no_statistics_in_a_session() -> None:
    """Five batches on two workers: in the last round the second one has none of its own."""
    counts: dict[int, int] = {}

    def train() -> None:
        session = pr.init()
        model: Any = pr.replicate(normed(), ["cpu", "cpu"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [list(range(start, start + 8)) for start in range(0, 40, 8)]
        loader: Any = DataLoader(Examples(40), batch_sampler=batches)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        counts[session.rank] = int(model.get_buffer("1.num_batches_tracked"))

    run_in("simulated", train, strategy="allreduce", workers=2)
    assert counts == {0: 3, 1: 2}


def test_replicas_do_not_wait_for_other_workers_in_batch_norm() -> None:
    with pytest.raises(pr.UsageError, match="one worker per device"):
        run_in("simulated", program(2, normed), strategy="allreduce", workers=2, batch_norm="sync")
