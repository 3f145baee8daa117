"""Branches are found where a model has them, and nowhere else."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from polyrhythm.parallel.branches import branches
from polyrhythm.parallel.costs import Costs, OperationCost
from polyrhythm.parallel.graph import ModelGraph, capture
from tests.parallel.models import Residual, unequal


class Towers(nn.Module):
    """Two sequences through one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(12, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        ends = [self.lstm(x)[0][:, -1] for x in (a, b)]
        return torch.sigmoid(self.out(torch.cat(ends, -1)))


@cache
def towers() -> ModelGraph:
    return capture(Towers(), (torch.randn(3, 2, 4), torch.randn(3, 2, 4)), {})


class Experts(nn.Module):
    """A stem, and three experts of different cost whose outputs are added one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.second = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        total = h
        for one, two in zip(self.experts, self.second, strict=True):
            total = total + two(one(h).relu())
        return total


def given_costs(graph: ModelGraph, weights: dict[str, float]) -> Costs:
    """Seconds by the names of operations; a small number for all others."""
    found = [
        next(
            (weight for part, weight in weights.items() if part in f"{node.name} {node.meta.get('module')}"),
            1e-4,
        )
        for node in graph.train.operations
    ]
    return Costs(tuple(OperationCost(each, 0.0) for each in found), (0,) * (len(found) + 1))


def test_two_towers_are_found() -> None:
    costs = given_costs(graph := towers(), {"lstm": 1.0, "out": 0.2})
    found = branches(graph, costs, 2)
    assert found is not None and "cat" in graph.train.operations[found.merge].name
    names = [{graph.train.operations[position].name for position in branch} for branch in found.branches]
    assert len(names) == 2 and {"lstm", "lstm_1"} <= names[0] ^ names[1]
    assert sorted(found.workers) == [0, 1]
    assert 1.9 < (found.serial - 0.2) / (found.seconds - 0.2) <= 2


def test_three_experts_on_two_workers() -> None:
    """The stem is in no branch, and the longest branch has a worker to itself."""
    graph = capture(Experts(), (torch.randn(3, 4),), {})
    costs = given_costs(graph, {"stem": 1.0, "experts.0": 1.0, "experts.1": 2.0, "experts.2": 1.0})
    found = branches(graph, costs, 2)
    assert found is not None and len(found.branches) == 3
    modules = [{graph.train.module_of(p) for p in branch} - {""} for branch in found.branches]
    assert [each & {"stem"} for each in modules] == [set()] * 3
    workers = {
        next(iter(m & {f"experts.{n}" for n in range(3)})): w
        for m, w in zip(modules, found.workers, strict=True)
    }
    assert workers["experts.0"] == workers["experts.2"] != workers["experts.1"]
    assert abs(found.seconds - 3.0) < 0.01 and abs(found.serial - 5.0) < 0.01


class Skips(nn.Module):
    """Two towers of two layers; the outputs of both layers of a tower are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        first, second = self.layers[0](a), self.layers[1](b)
        return torch.cat([first, self.layers[2](first), second, self.layers[3](second)], -1)


def test_a_skip_inside_a_branch_belongs_to_it() -> None:
    graph = capture(Skips(), (torch.randn(3, 4), torch.randn(3, 4)), {})
    found = branches(graph, given_costs(graph, {"linear": 1.0}), 2)
    assert found is not None and [len(branch) for branch in found.branches] == [2, 2]


def test_a_chain_has_no_branches() -> None:
    graph = capture(unequal(), (torch.randn(3, 8),), {})
    assert branches(graph, given_costs(graph, {"linear": 1.0}), 4) is None


def test_a_skip_connection_is_no_branch() -> None:
    graph = capture(Residual(), (torch.randn(3, 1, 4, 4),), {})
    assert branches(graph, given_costs(graph, {"conv": 1.0}), 2) is None


def test_one_worker_gains_nothing() -> None:
    assert branches(towers(), given_costs(towers(), {"lstm": 1.0}), 1) is None
