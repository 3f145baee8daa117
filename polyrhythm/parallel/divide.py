"""How a model is divided, by the split that a strategy names: worker 0 chooses, and all workers follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from polyrhythm.core.split import ModelSplit
from polyrhythm.parallel.branches import choose_places, divide_by_places, step_seconds
from polyrhythm.parallel.cut import choose_cuts
from polyrhythm.parallel.estimates import Estimate, estimate
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.partition import Partition, split
from polyrhythm.parallel.splits import Branches, Pipeline, TensorParallel


def choose(graph: ModelGraph, how: ModelSplit, inputs: dict[str, Any], trained: Collection[str]) -> list[int]:
    """What one worker decides for all. `trained`: the names of parameters to train."""
    if isinstance(how, TensorParallel):
        return []
    if isinstance(how, Branches):
        return choose_places(graph, how, estimate(graph.train, inputs))
    assert isinstance(how, Pipeline)
    return choose_cuts(graph, how, inputs, trained)


def divide(graph: ModelGraph, how: ModelSplit, chosen: Sequence[int]) -> Partition:
    """The model divided as `choose` has decided."""
    return divide_by_places(graph, chosen) if isinstance(how, Branches) else split(graph, chosen, how.size)


def doubt(graph: ModelGraph, how: ModelSplit, parts: Partition, costs: Estimate) -> str:
    """A line for the user if the model is not worth dividing in this way; "": it is, or nobody knows."""
    if not isinstance(how, Branches):
        return ""
    places = [parts.train[segment].place for segment in parts.operations]
    alone, spent = (step_seconds(graph, each, costs) for each in ([0] * len(places), places))
    if spent < alone:
        return ""
    return (
        f"the branches of the model are too small to pay: by an estimate {how} takes {spent / alone:.1f} "
        "times as long as one worker; polyrhythm plan measures it"
    )
