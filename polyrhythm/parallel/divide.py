"""How a model is divided, by the split that a strategy names: worker 0 chooses, and all workers follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from polyrhythm.core.split import ModelSplit
from polyrhythm.parallel.cut import choose_cuts
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.partition import Partition, split
from polyrhythm.parallel.splits import Pipeline, TensorParallel


def choose(graph: ModelGraph, how: ModelSplit, inputs: dict[str, Any], trained: Collection[str]) -> list[int]:
    """What one worker decides for all. `trained`: the names of parameters to train."""
    if isinstance(how, TensorParallel):
        return []
    assert isinstance(how, Pipeline)
    return choose_cuts(graph, how, inputs, trained)


def divide(graph: ModelGraph, how: ModelSplit, chosen: Sequence[int]) -> Partition:
    """The model divided as `choose` has decided."""
    assert isinstance(how, Pipeline | TensorParallel)
    return split(graph, chosen)
