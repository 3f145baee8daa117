"""Branches are found where a model has them, and nowhere else; segments run in any division of a model."""

from __future__ import annotations

import random
from functools import cache

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.branches import BACKWARD, Fork, choose_places, divide_by_places, forks, step_seconds
from polyrhythm.parallel.estimates import Estimate, estimate
from polyrhythm.parallel.graph import ModelGraph, capture
from polyrhythm.parallel.partition import partition
from polyrhythm.parallel.place_plan import place_plan
from polyrhythm.parallel.segments import bound_positions, direct_inputs, segments_of
from polyrhythm.parallel.splits import Branches
from polyrhythm.parallel.trees import flatten
from tests.parallel.models import CASES, Residual, unequal
from tests.support.combine import few


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


def given_costs(graph: ModelGraph, weights: dict[str, float]) -> list[float]:
    """Seconds by the names of operations; a small number for all others."""
    return [
        next(
            (weight for part, weight in weights.items() if part in f"{node.name} {node.meta.get('module')}"),
            1e-4,
        )
        for node in graph.train.operations
    ]


def best(graph: ModelGraph, weights: dict[str, float], count: int) -> Fork | None:
    return next(iter(forks(graph, given_costs(graph, weights), count)), None)


def test_two_towers_are_found() -> None:
    found = best(graph := towers(), {"zeros": 1e-4, "lstm": 1.0, "out": 0.2}, 2)
    assert found is not None and "cat" in graph.train.operations[found.merge].name
    names = [{graph.train.operations[position].name for position in branch} for branch in found.branches]
    assert len(names) == 2 and {"lstm", "lstm_1"} <= names[0] ^ names[1]
    assert sorted(found.workers) == [0, 1]
    assert abs(found.saved - 1.0) < 0.01


def test_three_experts_on_two_workers() -> None:
    """The stem is in no branch, and the longest branch has a worker to itself."""
    graph = capture(Experts(), (torch.randn(3, 4),), {})
    found = best(graph, {"stem": 1.0, "experts.0": 1.0, "experts.1": 2.0, "experts.2": 1.0}, 2)
    assert found is not None and len(found.branches) == 3
    modules = [{graph.train.module_of(p) for p in branch} - {""} for branch in found.branches]
    assert [each & {"stem"} for each in modules] == [set()] * 3
    workers = {
        next(iter(m & {f"experts.{n}" for n in range(3)})): w
        for m, w in zip(modules, found.workers, strict=True)
    }
    assert workers["experts.0"] == workers["experts.2"] != workers["experts.1"]
    assert abs(found.saved - 2.0) < 0.01


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
    found = best(graph, {"linear": 1.0}, 2)
    assert found is not None and [len(branch) for branch in found.branches] == [2, 2]


def test_a_chain_has_no_branches() -> None:
    graph = capture(unequal(), (torch.randn(3, 8),), {})
    assert best(graph, {"linear": 1.0}, 4) is None


def test_a_skip_connection_is_no_branch() -> None:
    graph = capture(Residual(), (torch.randn(3, 1, 4, 4),), {})
    assert best(graph, {"conv": 1.0}, 2) is None


def test_one_worker_gains_nothing() -> None:
    assert best(towers(), {"lstm": 1.0}, 1) is None


class Heads(nn.Module):
    """Two outputs that never meet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.stem(x).tanh()
        return {"left": self.left(h), "right": self.right(h) * 2}


def test_outputs_that_never_meet_are_branches() -> None:
    graph = capture(Heads(), (torch.randn(3, 4),), {})
    found = best(graph, {"linear": 1.0}, 2)
    assert found is not None and found.merge == len(graph.train.operations)
    costs = Estimate(tuple(given_costs(graph, {"linear": 1.0})), dict.fromkeys(graph.train.graph.nodes, 4))
    places = choose_places(graph, Branches(2), costs)
    parts = divide_by_places(graph, places)
    # The stem is needed elsewhere, so it is a segment of its own: nobody waits for the branch behind it.
    assert [each.place for each in parts.train] == [0, 0, 1]
    assert parts.users["stem.weight"] == (0,) and parts.users["right.weight"] != parts.users["left.weight"]


def test_the_time_of_branches_is_that_of_the_longest() -> None:
    """Two towers of a second, a layer of 0.2 seconds behind them; messages take little of that."""
    graph = towers()
    costs = Estimate(
        tuple(given_costs(graph, {"zeros": 1e-4, "lstm": 1.0, "out": 0.2})),
        dict.fromkeys(graph.train.graph.nodes, 4),
    )
    places = choose_places(graph, Branches(2), costs)
    assert abs(step_seconds(graph, [0] * len(places), costs) - (1 + BACKWARD) * 2.2) < 0.01
    assert abs(step_seconds(graph, places, costs) - (1 + BACKWARD) * 1.2) < 0.01


def test_shared_parameters_are_owned_by_both_places() -> None:
    graph = towers()
    args = (torch.randn(3, 2, 4), torch.randn(3, 2, 4))
    parts = divide_by_places(
        graph, choose_places(graph, Branches(2), estimate(graph.train, graph.values(args, {})))
    )
    shared = {name: users for name, users in parts.users.items() if name.startswith("lstm")}
    assert {tuple(sorted(users)) for users in shared.values()} == {(0, 1)}
    assert {users[0] for users in shared.values()} == {0, 1}
    # In evaluation no tower waits for the other, either.
    for segments in (parts.train, parts.eval):
        assert [(each.place, len(each.inputs)) for each in segments] == [(1, 1), (0, 1), (0, 2)]


def random_places(graph: ModelGraph, count: int, seed: int) -> list[int]:
    """A place for each operation, such that operations that must run together do.

    Every place has some of the operations with parameters, if there are as many.
    """
    draw = random.Random(seed)
    places = [draw.randrange(count) for _ in graph.train.operations]
    if draw.random() < 0.5:  # long runs at one place
        places = [places[position // 3] for position in range(len(places))]
    trained = [
        position for position, node in enumerate(graph.train.operations) if graph.train.tensors_of(node)
    ]
    for number, position in enumerate(draw.sample(trained, len(trained))):
        places[position] = number % count
    for _ in range(len(places)):
        for together, _ in bound_positions(graph.train):
            for position in range(min(together), max(together) + 1):
                places[position] = places[min(together)]
    return places


@few("name", CASES, quick=4)
def test_segments_of_any_places_compute_the_model(name: str) -> None:
    """Every value is made before it is needed, sent once to a place, and the result is that of the model."""
    torch.manual_seed(0)
    model, (args, kwargs) = CASES[name].build(), CASES[name].call(3)
    graph = capture(model, args, kwargs)
    model.eval()
    expected = flatten(model(*args, **kwargs))[0]
    for seed in range(6):
        places = random_places(graph, 3, seed)
        segments, homes = segments_of(graph, places)
        assert [homes[segment] for segment in segments] == places
        for position, inputs in enumerate(direct_inputs(graph.train)):
            for other in inputs:
                assert segments[other] <= segments[position]
                assert (segments[other] == segments[position]) <= (places[other] == places[position])
        try:
            parts = partition(graph, segments, homes)
        except UsageError:  # in evaluation its parameters would be elsewhere
            continue
        found = flatten(parts.run("eval", graph.values(args, kwargs)))[0]
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(found, expected, strict=True)
        )
        sent: dict[tuple[str, int], int] = {}
        for place in set(places):
            plan = place_plan(parts, "train", place).segments
            received = [number for segment in plan for number in segment.sources]
            assert len(received) == len(set(received))
            for segment in plan:
                for sink, names in segment.sinks.items():
                    for value in names:
                        sent[value, sink] = sent.get((value, sink), 0) + 1
                for number, (source, names) in segment.sources.items():
                    assert number < segment.number and parts.train[number].place == source != place
                    assert set(names) <= set(parts.train[number].outputs)
        assert set(sent.values()) <= {1}
