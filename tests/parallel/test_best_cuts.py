"""The best cuts are the best of all cuts."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.best_cuts import (
    Preferences,
    best_cuts,
    measured_cuts,
    module_nesting,
    slowest_stage,
)
from polyrhythm.parallel.costs import Costs, OperationCost
from polyrhythm.parallel.graph import capture
from polyrhythm.parallel.partition import cuts_at, split
from tests.parallel.models import CASES, Residual, unequal


def random_costs(seed: int) -> Costs:
    numbers = random.Random(seed)
    count = numbers.randint(5, 11)
    # Small integers, so that many cuts are equally good and sums are exact.
    operations = tuple(OperationCost(numbers.randint(0, 4), numbers.randint(0, 4)) for _ in range(count))
    crossing = (0, *(numbers.randint(0, 6) for _ in range(count - 1)), 0)
    illegal = frozenset(position for position in range(1, count) if numbers.random() < 0.2)
    return Costs(operations, crossing, illegal)


def every_cut(costs: Costs, stages: int) -> list[list[int]]:
    legal = [cut for cut in range(1, len(costs.operations)) if cut not in costs.illegal]
    return [list(cuts) for cuts in itertools.combinations(legal, stages - 1)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_dynamic_programming_equals_brute_force(stages: int) -> None:
    """The slowest stage takes as little as with any cuts, and no cuts as good have fewer bytes."""
    for seed in range(60):
        costs = random_costs(seed)
        every = every_cut(costs, stages)
        if not every:
            continue
        for seconds_per_byte in (0.0, 0.5):
            slow = {tuple(cuts): slowest_stage(costs, cuts, seconds_per_byte) for cuts in every}
            least = min(slow.values())
            found = best_cuts(costs, stages, seconds_per_byte)
            assert found is not None
            assert slow[tuple(found)] == least
            bytes_of = {
                cuts: sum(costs.crossing[cut] for cut in cuts) for cuts in slow if slow[cuts] == least
            }
            assert bytes_of[tuple(found)] == min(bytes_of.values())


def layers(widths: tuple[int, ...], rows: int = 256) -> Costs:
    """A linear layer and a ReLU for each pair of widths; seconds by the count of multiplications."""
    operations, crossing = [], [0]
    for a, b in itertools.pairwise(widths):
        operations += [OperationCost(a * b * rows * 2e-11, a * b * rows * 4e-11), OperationCost(1e-5, 1e-5)]
        crossing += [8 * b * rows, 8 * b * rows]
    return Costs(tuple(operations), (*crossing[:-1], 0))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_layers_of_unequal_width_are_not_cut_by_count(stages: int) -> None:
    """Equal counts of layers are at least a fifth worse than the best cuts."""
    costs = layers((768, 768, 768, 768, 256, 256, 256, 256, 256))
    found = slowest_stage(costs, best_cuts(costs, stages, 5e-10), 5e-10)
    assert found == min(slowest_stage(costs, cuts, 5e-10) for cuts in every_cut(costs, stages))
    equal = [2 * round(8 * stage / stages) for stage in range(1, stages)]
    assert slowest_stage(costs, equal, 5e-10) >= 1.2 * found


def test_bytes_decide_where_computing_does_not() -> None:
    """Behind the bottleneck of an autoencoder rather than in its widest layer."""
    costs = layers((512, 512, 8, 512, 512))
    assert best_cuts(costs, 2, 1e-6) in ([3], [4])


def test_whole_layers_stay_together_where_it_costs_little() -> None:
    """Of cuts that are as good, those between modules; with a slack also those that are nearly as good."""
    costs = Costs(tuple(OperationCost(1.0, 0.0) for _ in range(8)), (0,) * 9)
    nesting = [0, 2, 1, 2, 2, 1, 2, 2, 0]
    for slack, expected in ((0.0, [[4]]), (0.25, [[5]]), (0.5, [[2], [5]])):
        assert best_cuts(costs, 2, 0.0, Preferences(slack, nesting)) in expected


def test_nesting_counts_the_modules_that_are_cut() -> None:
    graph = capture(unequal((4, 4, 4)), (torch.randn(3, 4),), {})
    assert module_nesting(graph) == [0, 1, 0, 1, 0]
    graph = capture(Residual(), *CASES["residual"].call(3))
    begins = [number for number, count in enumerate(module_nesting(graph)) if count == 0]
    assert begins[1:-1] == cuts_at(graph, ["second", "head"])


def test_many_operations() -> None:
    """A thousand positions are no trouble."""
    costs = Costs(tuple(OperationCost(1.0, 1.0) for _ in range(1000)), (0,) * 1001)
    assert best_cuts(costs, 4, 0.0) == [250, 500, 750]


def test_every_stage_has_what_it_needs() -> None:
    """Brute force over the cuts whose stages all have a parameter."""
    for seed in range(40):
        costs = random_costs(seed)
        numbers = random.Random(seed)
        needed = [int(numbers.random() < 0.5) for _ in costs.operations]
        found = best_cuts(costs, 3, 0.5, Preferences(needed=needed))
        every = [
            cuts
            for cuts in every_cut(costs, 3)
            if all(any(needed[a:b]) for a, b in itertools.pairwise((0, *cuts, len(needed))))
        ]
        if found is None:
            assert not every
        else:
            least = min(slowest_stage(costs, cuts, 0.5) for cuts in every)
            assert slowest_stage(costs, found, 0.5) == least


def test_too_many_stages_are_refused() -> None:
    graph = capture(unequal((4, 4, 4)), (torch.randn(3, 4),), {})
    costs = Costs(tuple(OperationCost(1, 1) for _ in range(4)), (0,) * 5)
    assert measured_cuts(graph, costs, 2, 0.0, list(graph.names)) == [2]
    with pytest.raises(UsageError, match="into 3 stages with a parameter to train in each: use 2 at most"):
        measured_cuts(graph, costs, 3, 0.0, list(graph.names))


class Swapped(Residual):
    """Runs its two layers in another order in evaluation, so that it cannot be cut between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = (self.first, self.second) if self.training else (self.second, self.first)
        return self.head(two[1:](one[1:](x.expand(-1, 4, -1, -1))).flatten(1))


def test_cuts_work_in_both_modes() -> None:
    """A position that the eval graph cannot be cut at is passed over."""
    graph = capture(Swapped(), (torch.randn(3, 1, 4, 4),), {})
    count = len(graph.train.operations)
    middle = next(n for n in range(count) if graph.train.module_of(n).startswith("second"))
    seconds = [1.0 if n in (middle - 1, middle) else 0.0 for n in range(count)]
    costs = Costs(
        tuple(OperationCost(each, 0.0) for each in seconds), (0,) * (count + 1), frozenset(graph.illegal)
    )
    assert best_cuts(costs, 2, 0.0) == [middle]
    with pytest.raises(UsageError, match="another stage in evaluation than in training"):
        split(graph, [middle])
    split(graph, measured_cuts(graph, costs, 2, 0.0, list(graph.names)))


def test_illegal_positions_are_not_chosen() -> None:
    graph = capture(Residual(), *CASES["residual"].call(3))
    for position in graph.illegal:
        count = len(graph.train.operations)
        seconds = [1.0 if n in (position - 1, position) else 0.0 for n in range(count)]
        costs = Costs(
            tuple(OperationCost(each, 0.0) for each in seconds), (0,) * (count + 1), frozenset(graph.illegal)
        )
        split(graph, measured_cuts(graph, costs, 2, 0.0, list(graph.names)))
