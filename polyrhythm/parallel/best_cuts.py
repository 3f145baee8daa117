"""The best cuts: the positions at which the slowest stage takes least, by dynamic programming."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.costs import Costs
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.partition import split

SLACK = 0.02  # how much slower the slowest stage may be for the sake of fewer bytes and whole layers


@dataclass(frozen=True)
class Preferences:
    """What else counts beside the time of the slowest stage."""

    slack: float = 0.0  # how much slower than necessary the slowest stage may be
    nesting: Sequence[int] = ()  # by position: how many modules a cut goes through
    needed: Sequence[
        int
    ] = ()  # by operation: a count of which every stage has at least 1, such as parameters


def best_cuts(
    costs: Costs, stages: int, seconds_per_byte: float, preferences: Preferences | None = None
) -> list[int] | None:
    """The cuts at which the slowest stage, with what it sends and receives, takes least.

    None if there are no such cuts. Among those that are as good, up to the slack, they are the ones with the
    fewest bytes, and then the ones that cut through the fewest modules. O(stages n²) for n legal positions.
    """
    preferences = preferences or Preferences()
    count = len(costs.operations)
    places = [0, *(cut for cut in range(1, count) if cut not in costs.illegal), count]
    times = _stage_times(costs, places, seconds_per_byte)
    owned = np.cumsum([0, *(preferences.needed or [1] * count)])[places]
    times[owned[:, None] >= owned[None, :]] = np.inf
    least = _slowest(times, stages)
    if least == np.inf:
        return None
    nesting = preferences.nesting or [0] * (count + 1)
    prices = np.array([costs.crossing[place] * 1000.0 + nesting[place] for place in places])
    allowed = np.where(times <= least * (1 + preferences.slack), 0.0, np.inf)
    return [places[cut] for cut in _cheapest(prices, allowed, stages)]


def slowest_stage(costs: Costs, cuts: list[int], seconds_per_byte: float) -> float:
    """The time of the slowest stage, with what it sends and receives."""
    edges = [0, *cuts, len(costs.operations)]
    pairs = itertools.pairwise(edges)
    return max(
        costs.seconds(a, b) + seconds_per_byte * (costs.crossing[a] + costs.crossing[b]) for a, b in pairs
    )


def _stage_times(costs: Costs, places: list[int], seconds_per_byte: float) -> np.ndarray:
    """By two places: the time of the stage between them; infinite if it would be empty."""
    spent = np.cumsum([0.0, *(each.seconds for each in costs.operations)])[places]
    sent = seconds_per_byte * np.array([costs.crossing[place] for place in places], float)
    times: np.ndarray = (spent[None, :] - spent[:, None]) + sent[:, None] + sent[None, :]
    times[np.tril_indices(len(places))] = np.inf
    return times


def _slowest(times: np.ndarray, stages: int) -> float:
    """The least time that the slowest of so many stages can take."""
    best = times[0]  # by end: of one stage
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], times).min(axis=0)
    return float(best[-1])


def _cheapest(prices: np.ndarray, allowed: np.ndarray, stages: int) -> list[int]:
    """The places of the cuts with the least sum of prices; `allowed` is 0 for stages that keep the limit."""
    total, choices = allowed[0], []
    for _ in range(stages - 1):
        table = (total + prices)[:, None] + allowed
        choices.append(table.argmin(axis=0))
        total = table.min(axis=0)
    cuts, end = [], len(prices) - 1
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return cuts[::-1]


def measured_cuts(
    graph: ModelGraph, costs: Costs, stages: int, seconds_per_byte: float, trained: Collection[str]
) -> list[int]:
    """The best cuts at which the graphs of both modes can be cut, between layers where that costs little.

    `trained`: the names of parameters to train. Every stage has one.
    """
    preferences = Preferences(SLACK, module_nesting(graph), own_parameters(graph, trained))
    while (cuts := best_cuts(costs, stages, seconds_per_byte, preferences)) is not None:
        refused = {cut for cut in cuts if not _works(graph, [cut])}
        if not refused and _works(graph, cuts):
            return cuts
        costs = replace(costs, illegal=costs.illegal | (refused or set(cuts)))
    most = stages - 1
    while most > 1 and best_cuts(costs, most, seconds_per_byte, preferences) is None:
        most -= 1
    raise UsageError(
        f"this model cannot be cut into {stages} stages with a parameter to train in each: use {most} at most"
    )


def own_parameters(graph: ModelGraph, trained: Collection[str]) -> list[int]:
    """By operation: how many parameters to train it is the first to use."""
    seen: set[str] = set()
    counts = []
    for operation in graph.train.operations:
        names = {graph.names.get(name, name) for name in graph.train.tensors_of(operation)} & set(trained)
        counts.append(len(names - seen))
        seen |= names
    return counts


def module_nesting(graph: ModelGraph) -> list[int]:
    """By position: how many nested modules a cut goes through, and one more if no module begins there."""
    paths = [
        path.split(".") if (path := graph.train.module_of(number)) else []
        for number in range(len(graph.train.operations))
    ]
    found = [0]
    for before, after in itertools.pairwise(paths):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        nested = len(list(same))
        found.append(nested + (nested == len(after)))
    return [*found, 0]


def _works(graph: ModelGraph, cuts: list[int]) -> bool:
    try:
        split(graph, cuts)
    except UsageError:
        return False
    return True
