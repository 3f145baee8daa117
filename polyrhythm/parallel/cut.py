"""Where a model is cut into stages: at layers that the user names, or where the slowest stage is fastest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.best_cuts import Preferences, best_cuts, module_nesting, own_parameters
from polyrhythm.parallel.costs import Costs, OperationCost
from polyrhythm.parallel.estimates import estimate
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.partition import cuts_at
from polyrhythm.parallel.splits import Pipeline


def choose_cuts(
    graph: ModelGraph, pipeline: Pipeline, inputs: dict[str, Any], trained: Collection[str]
) -> list[int]:
    """The positions at which the stages of a pipeline begin. `trained`: the names of parameters to train."""
    if pipeline.layers:
        return cuts_at(graph, pipeline.layers)
    estimates = estimate(graph.train, inputs).seconds
    costs = Costs(
        tuple(OperationCost(each, 0.0) for each in estimates),
        (0,) * (len(estimates) + 1),
        frozenset(graph.illegal),
    )
    preferences = Preferences(needed=own_parameters(graph, trained), nesting=module_nesting(graph))
    for size in range(pipeline.segments, 0, -1):
        cuts = best_cuts(costs, size, 0.0, preferences)
        if cuts is not None and size == pipeline.segments:
            return cuts
        if cuts is not None:
            break
    what = "stages" if pipeline.chunks == 1 else f"segments ({pipeline.size} x {pipeline.chunks})"
    raise UsageError(
        f"{pipeline} has more {what} than the model has layers to train that can be apart: use {size} at most"
    )
