"""A captured model whose layers are divided computes what the whole model computes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import capture
from polyrhythm.parallel.partition import split
from polyrhythm.parallel.splits import TensorParallel
from polyrhythm.parallel.tensor_parallel import OwnRandomNumbers, TensorAxis, divide_tensors, join_shards
from polyrhythm.parallel.tensor_plan import choose_plan
from tests.parallel.tensor_models import GPT, HEADS, MODELS, WIDTH, Attention, encoder, mlp, tokens, vectors
from tests.support.combine import few


class Threads:
    """Sums over threads, in the order of their ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.tensors: dict[int, Tensor] = {}
        self.sums = [0] * size

    def run(self, body: Callable[[int], Any], size: int) -> list[Any]:
        found: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                found[rank] = body(rank)
            except BaseException as error:
                found[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for result in found.values():
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return [found[rank] for rank in range(size)]

    def sum(self, rank: int, tensor: Tensor) -> None:
        self.tensors[rank] = tensor.clone()
        self.sums[rank] += 1
        self.barrier.wait()
        total = torch.stack([self.tensors[each] for each in sorted(self.tensors)]).sum(0)
        self.barrier.wait()
        tensor.copy_(total)


class Divided:
    """A model on several threads."""

    def __init__(self, model: nn.Module, example: Tensor, how: TensorParallel) -> None:
        self.size, self.threads = how.size, Threads(how.size)
        self.graph = capture(model, (example,), {})
        self.plan = choose_plan(self.graph, how)
        self._held: list[dict[str, nn.Parameter]] = [{} for _ in range(how.size)]

    def run(self, body: Callable[[Callable[[str, Tensor], Tensor]], Any]) -> list[Any]:
        axes = [TensorAxis(rank, self.size) for rank in range(self.size)]
        graphs = [divide_tensors(self.graph, self.plan, axis) for axis in axes]  # not safe in threads

        def one(rank: int) -> Any:
            axis, mine, held = axes[rank], graphs[rank], self._held[rank]
            axis.all_reduce = lambda tensor: self.threads.sum(rank, tensor)
            for mode in (mine.train, mine.eval):
                for name, value in mode.attributes.items():
                    if isinstance(value, nn.Parameter):
                        sharding = self.plan.shards.get(name)
                        copied = value.detach().clone() if sharding is None else axis.shard(value, sharding)
                        held.setdefault(name, nn.Parameter(copied))
                mode.attributes.update(held)  # type: ignore[attr-defined]
            parts = split(mine, [])
            return body(lambda mode, x: parts.run(mode, mine.values((x,), {})))

        return self.threads.run(one, self.size)

    def gradient(self, name: str) -> Tensor:
        each = [held[name].grad for held in self._held]
        if name in self.plan.shards:
            return join_shards([one for one in each if one is not None], self.plan.shards[name])
        assert each[0] is not None
        for other in each[1:]:
            assert other is not None and torch.equal(each[0], other)
        return each[0]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch for each thread of a test would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@few("name, size", [("gpt", 4), ("mlp", 4), *((name, 2) for name in MODELS)], quick=4)
def test_outputs_and_gradients_are_those_of_the_whole_model(name: str, size: int) -> None:
    torch.manual_seed(1)
    make, inputs = MODELS[name]
    whole = make().double()
    batches = [inputs(5), inputs(3)]
    divided = Divided(whole, inputs(4), TensorParallel(size))
    assert divided.plan.shards

    def body(call: Any) -> list[Tensor]:
        found = []
        for each in batches:
            found.append(call("train", each))
            found[-1].square().mean().backward()
        with torch.no_grad():
            return [each.detach() for each in found] + [call("eval", batches[0])]

    expected = [whole(each) for each in batches]
    for each in expected:
        each.square().mean().backward()
    expected.append(whole.eval()(batches[0]))
    found = divided.run(body)
    for outputs in found:
        for mine, first, true in zip(outputs, found[0], expected, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, true.detach(), rtol=0, atol=1e-12)
    for parameter, tensor in whole.named_parameters():
        assert tensor.grad is not None
        torch.testing.assert_close(divided.gradient(parameter), tensor.grad, rtol=0, atol=1e-12)


def test_blocks_are_found_by_themselves() -> None:
    graph = capture(GPT(), (tokens(3),), {})
    assert choose_plan(graph, TensorParallel(2)).layers == {
        f"h.{number}.{layer}": style
        for number in range(2)
        for layer, style in (
            ("attn.c_attn", "column"),
            ("attn.c_proj", "row"),
            ("fc", "column"),
            ("proj", "row"),
        )
    }
    chain = capture(mlp().double(), (vectors(3),), {})
    assert choose_plan(chain, TensorParallel(2)).layers == {
        "0": "column",
        "2": "row",
        "4": "column",
        "6": "row",
    }


def test_a_block_is_summed_once_forward_and_its_whole_inputs_once_backward() -> None:
    divided = Divided(Attention(), torch.randn(3, 4, WIDTH), TensorParallel(2))
    x = torch.randn(3, 4, WIDTH, requires_grad=True)
    counts = []

    def body(call: Any) -> None:
        output = call("train", x)
        counts.append(min(divided.threads.sums))
        output.sum().backward()

    divided.run(body)
    # Forward the output, and backward the gradients of the input and of the scales of the heads.
    assert counts == [1] * 2 and divided.threads.sums == [3] * 2


def test_only_blocks_that_pay_are_divided() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 512))
            self.large = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.large(self.small(x).softmax(-1))  # type: ignore[no-any-return]

    plan = choose_plan(capture(Two(), (torch.randn(256, 8),), {}), TensorParallel(2))
    assert plan.layers == {"large.0": "column", "large.2": "row"}


# --- operations ---------------------------------------------------------------------------------------

OPERATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "elementwise, broadcast": lambda h: torch.where(h > 0, h * torch.arange(24.0), h / 3).clamp(max=2),
    "normalized over another dimension": lambda h: F.softmax(h, 1) + F.log_softmax(h, 0),
    "flatten": lambda h: h.flatten(0, 1).unflatten(0, (-1, 4)),
    "heads in the batch": lambda h: h.transpose(0, 1).reshape(4, -1, 6).exp().view(4, -1, 24).transpose(0, 1),
    "permute": lambda h: h.permute(2, 0, 1).movedim(0, -1).swapaxes(0, 1).transpose(0, 1),
    "squeeze": lambda h: h.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(-1),
    "chunk": lambda h: torch.cat(list(h.chunk(3, -1)), -1),
    "chunk, gated": lambda h: torch.cat([h.chunk(2, -1)[0] * h.chunk(2, -1)[1].sigmoid()] * 2, -1),
    "slices": lambda h: torch.cat([h[..., :12], h[..., 12:].neg()], -1),
    "select": lambda h: torch.stack([h.view(-1, 4, 3, 8)[:, :, i] for i in range(3)], 2).flatten(2),
    "unbind": lambda h: torch.cat([each * 2 for each in h.view(-1, 4, 3, 8).unbind(2)], -1),
    "sizes": lambda h: h.split([8, 8, 8], -1)[0].repeat_interleave(3, dim=-1),
    "expand": lambda h: h.unsqueeze(1).expand(-1, 2, -1, -1).sum(1),
    "layer norm of another dimension": lambda h: F.layer_norm(h.transpose(1, 2), (4,)).transpose(1, 2),
    "matmul by a whole matrix": lambda h: (torch.arange(16.0).view(4, 4) @ h),
    "mean": lambda h: h.mean(1, keepdim=True) + h.amax(1, True) + h,
    "in place": lambda h: F.relu_(h.mul_(2)),
    "casts": lambda h: h.to(torch.float64).contiguous().clone().type_as(h).float().detach() + h,
}  # fmt: skip


class Between(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 8)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operation(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_parts_is_a_part_of_the_operation(name: str) -> None:
    torch.manual_seed(2)
    whole, x = Between(OPERATIONS[name]), torch.randn(3, 4, 8)
    plan = {"first": "column", "second": "row"}
    divided = Divided(whole, torch.randn(5, 4, 8), TensorParallel(2, plan=plan))
    output = whole(x)
    output.square().sum().backward()

    def body(call: Any) -> Tensor:
        found: Tensor = call("train", x)
        found.square().sum().backward()
        return found.detach()

    for each in divided.run(body):
        torch.testing.assert_close(each, output.detach(), rtol=1e-4, atol=1e-4)
    gradient = whole.first.weight.grad
    assert gradient is not None
    torch.testing.assert_close(divided.gradient("first.weight"), gradient, rtol=1e-4, atol=1e-4)


WHOLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(-1),
    "layer norm": lambda h: F.layer_norm(h, (24,)),
    "sum": lambda h: h / h.sum(-1, keepdim=True),
    "one place": lambda h: h * h[..., :1],
    "product": lambda h: h @ h.mT @ h,
    "unknown": lambda h: h.sort(-1)[0],
    "batch norm": lambda h: F.batch_norm(h.flatten(0, 1), None, None, training=True).view_as(h),
    "in place on a whole value": lambda h: torch.zeros(4, 24).add_(h.sum(0)) + h,
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_a_whole_value_is_never_given_parts(name: str) -> None:
    graph = capture(Between(WHOLE[name]), (torch.randn(5, 4, 8),), {})
    with pytest.raises(UsageError, match="divided where it is needed whole: after first"):
        choose_plan(graph, TensorParallel(2, plan={"first": "column", "second": "row"}))
    with pytest.raises(UsageError, match="can divide no layer"):
        choose_plan(graph, TensorParallel(2))


# --- random numbers -----------------------------------------------------------------------------------


def test_the_numbers_of_divided_regions_differ_and_follow_from_those_of_all() -> None:
    def drawn(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        own = OwnRandomNumbers(TensorAxis(rank, 2), torch.ops.aten.dropout.default)
        return own(torch.ones(64), 0.5, True), torch.rand(64)

    (first, after), (second, after_too), (again, _) = drawn(0), drawn(1), drawn(0)
    assert not torch.equal(first, second) and torch.equal(first, again)
    assert torch.equal(after, after_too)


# --- bad input ----------------------------------------------------------------------------------------

REFUSED = {
    "heads": (
        Attention, (3, 4, WIDTH), TensorParallel(8),
        f"tensor:8 can divide no layer.*{HEADS} × 4.*tensor:2, tensor:4 would work",
    ),
    "heads of a plan": (
        Attention, (3, 4, WIDTH), TensorParallel(8, plan={"c_attn": "column", "c_proj": "row"}),
        f"tensor:8 does not fit.*after c_attn.*{HEADS} × 4.*tensor:2, tensor:4 would work",
    ),
    "features": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), (3, 6), TensorParallel(4),
        "tensor:4 can divide no layer.*6 outputs, which 4 does not divide; tensor:2, tensor:3",
    ),
    "unknown layer": (
        mlp, (3, 4, WIDTH), TensorParallel(2, plan={"hidden.0": "column"}),
        "no linear layer.*'hidden.0'; similar ones",
    ),
    "left divided": (
        encoder, (3, 4, WIDTH), TensorParallel(2, plan={"layers.0.linear1": "column"}),
        "needed whole: after layers.0.linear1, linear in layers.0.linear2 needs it whole",
    ),
    "output": (
        mlp, (3, 4, WIDTH), TensorParallel(2, plan={"6": "column"}),
        "after 6, linear in 7 needs it whole",
    ),
    "nothing": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), (3, 4, WIDTH), TensorParallel(2),
        "tensor:2 can divide no layer of the model: it has no linear layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_in_one_line(name: str) -> None:
    make, shape, how, message = REFUSED[name]
    with pytest.raises(UsageError) as error:
        choose_plan(capture(make(), (torch.randn(*shape),), {}), how)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_plans_are_checked_when_they_are_made() -> None:
    with pytest.raises(UsageError, match="'columns'; a layer is divided as 'column' or as 'row'"):
        TensorParallel(2, plan={"fc": "columns"})
    with pytest.raises(UsageError, match="fc is both a column and a row"):
        TensorParallel(2, column="fc", row="fc")
    assert (
        str(TensorParallel(4, plan={"a.b": "column", "c": "row", "d": "column"}))
        == "tensor:4,column=a.b/d,row=c"
    )
