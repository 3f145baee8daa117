"""Measured costs: memory and bytes are exact, and measuring leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.parallel.costs import Costs, OperationCost, measure
from polyrhythm.parallel.estimates import _BYTES, _FLOPS, estimate
from polyrhythm.parallel.graph import capture
from polyrhythm.parallel.partition import split
from tests.parallel.models import CASES, loss_of, unequal


def all_operations(costs: Costs) -> tuple[int, int]:
    return 0, len(costs.operations)


@pytest.mark.parametrize("name", ["residual", "several", "lstm", "chain"])
def test_costs_of_a_model(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    args, kwargs = case.call(6)
    graph = capture(model, args, kwargs)
    before = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    costs = measure(graph, args, kwargs, repeats=2)
    after = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1]) and all(p.grad is None for p in model.parameters())
    assert all(each.forward >= 0 and each.backward >= 0 for each in costs.operations)
    used = {first for first, stages in split(graph, []).users.items() if stages}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {first for each in costs.operations for first, _ in each.parameters} >= used
    assert costs.parameter_bytes(*all_operations(costs)) >= sum(tensors[first].nbytes for first in used)
    assert costs.crossing[0] == 0 == costs.crossing[-1]
    check_crossing(graph, costs, args, kwargs)


def check_crossing(graph: Any, costs: Costs, args: Any, kwargs: Any) -> None:
    """The bytes over a cut are those of what the second stage takes from the first, and of its gradient."""
    legal = [cut for cut in range(1, len(costs.operations)) if cut not in costs.illegal]
    for cut in legal[:: max(1, len(legal) // 4)]:
        first, second = split(graph, [cut]).train
        values = graph.values(args, kwargs)
        made = dict(zip(first.outputs, first.module(*[values[name] for name in first.inputs]), strict=True))
        crossing = [value for name in second.inputs if isinstance(value := made.get(name), Tensor)]
        expected = sum(value.nbytes * (1 + value.requires_grad) for value in crossing)
        assert costs.crossing[cut] == expected


def test_saved_bytes_are_what_autograd_keeps() -> None:
    """The sum over the operations is what a forward pass of the whole model keeps."""
    model, x = unequal(), torch.randn(6, 8)
    graph = capture(model, (x,), {})
    costs = measure(graph, (x,), {}, repeats=1)
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert costs.saved_bytes(*all_operations(costs)) == sum(kept.values())
    loss_of(output).backward()


def test_what_two_operations_share_counts_once() -> None:
    one = OperationCost(1.0, 2.0, (("w", 8),), (("value 0", 4), ("relu", 2)))
    two = OperationCost(1.0, 2.0, (("w", 8), ("b", 1)), (("value 0", 4),))
    costs = Costs((one, two), (0, 0, 0))
    assert costs.parameter_bytes(0, 2) == 9 and costs.saved_bytes(0, 2) == 6 and costs.seconds(0, 2) == 6


def test_frozen_parameters_need_no_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    x = torch.randn(6, 4)
    costs = measure(capture(model, (x,), {}), (x,), {}, repeats=1)
    assert costs.operations[0].backward == 0 == costs.operations[1].backward
    assert costs.crossing[1] == x.nbytes  # no gradient comes back


def test_estimates_count_the_work_of_each_operation_by_itself() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LSTM(128, 32, batch_first=True))
    graph = capture(model, (x := torch.randn(4, 10, 64),), {})
    found = estimate(graph.train, graph.values((x,), {}))
    costs = {node.name: cost for node, cost in zip(graph.train.operations, found.seconds, strict=True)}
    rows, moved = 4 * 10, 1 / _BYTES
    assert math.isclose(costs["linear"], 2 * rows * 64 * 128 / _FLOPS + 4 * rows * 128 * moved)
    assert math.isclose(costs["relu"], 4 * rows * 128 * moved)
    assert costs["lstm"] > 2 * rows * 4 * 32 * (128 + 32) / _FLOPS
