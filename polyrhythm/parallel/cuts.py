"""The best cuts: the positions at which the slowest stage takes least, by dynamic programming."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.costs import Costs
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.partition import split

SLACK = 0.02  # how much slower the slowest stage may be for the sake of fewer bytes and whole layers


def best_cuts(
    costs: Costs,
    stages: int,
    seconds_per_byte: float,
    slack: float = 0.0,
    nesting: Sequence[int] = (),
) -> list[int]:
    """The cuts at which the slowest stage, with what it sends and receives, takes least.

    Among the cuts that are as good, up to the slack, those with the fewest bytes, and then those that cut
    through the fewest modules (`nesting`, by position). O(stages n²) for n legal positions.
    """
    count = len(costs.operations)
    places = [0, *(cut for cut in range(1, count) if cut not in costs.illegal), count]
    if not 1 <= stages < len(places):
        raise UsageError(
            f"cannot cut this model into {stages} stages: it can be cut at {len(places) - 2} positions; "
            f"take 1 to {len(places) - 1} stages"
        )
    times = _stage_times(costs, places, seconds_per_byte)
    limit = _slowest(times, stages) * (1 + slack)
    prices = [costs.crossing[place] * 1000.0 + (nesting[place] if nesting else 0) for place in places]
    return [places[cut] for cut in _cheapest(np.array(prices), np.where(times <= limit, 0.0, np.inf), stages)]


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


def choose_cuts(graph: ModelGraph, costs: Costs, stages: int, seconds_per_byte: float) -> list[int]:
    """The best cuts at which the graphs of both modes can be cut, between layers where it costs little."""
    nesting = module_nesting(graph)
    while True:
        cuts = best_cuts(costs, stages, seconds_per_byte, SLACK, nesting)
        refused = {cut for cut in cuts if not _works(graph, [cut])}
        if not refused and (len(cuts) == 1 or _works(graph, cuts)):
            return cuts
        costs = replace(costs, illegal=costs.illegal | (refused or set(cuts)))


def module_nesting(graph: ModelGraph) -> list[int]:
    """By position: how many nested modules a cut goes through."""
    paths = [graph.train.module_of(n).split(".") for n in range(len(graph.train.operations))]
    found = [0]
    for before, after in itertools.pairwise(paths):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1] != "", zip(before, after, strict=False))
        found.append(len(list(same)))
    return [*found, 0]


def _works(graph: ModelGraph, cuts: list[int]) -> bool:
    try:
        split(graph, cuts)
    except UsageError:
        return False
    return True
