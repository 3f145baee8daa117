"""Where a model is cut into stages: at layers that the user names, or where the slowest stage is fastest."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.partition import cuts_at
from polyrhythm.parallel.progress_bars import without_progress_bars
from polyrhythm.parallel.splits import Pipeline

# One core of a processor: only their ratio matters. Measured times would differ from run to run, and so would
# the cut; `polyrhythm plan` measures.
_FLOPS, _BYTES = 4e10, 1e10  # a second


def choose_cuts(
    graph: ModelGraph, pipeline: Pipeline, inputs: dict[str, Any], trained: Collection[str]
) -> list[int]:
    """The positions at which the stages of a pipeline begin. `trained`: the names of parameters to train."""
    if pipeline.layers:
        return cuts_at(graph, pipeline.layers)
    costs = estimated_costs(graph.train, inputs)
    legal = [place for place in range(1, len(costs)) if place not in graph.illegal]
    own = _own_parameters(graph, trained)
    for size in range(pipeline.size, 0, -1):
        cuts = balanced(costs, size, legal, own)
        if cuts is not None and size == pipeline.size:
            return cuts
        if cuts is not None:
            break
    raise UsageError(
        f"{pipeline} has more stages than the model has layers to train that can be apart: use {size} at most"
    )


def _own_parameters(graph: ModelGraph, trained: Collection[str]) -> list[int]:
    """How many parameters to train each operation is the first to use."""
    seen: set[str] = set()
    counts = []
    for operation in graph.train.operations:
        names = {graph.names.get(name, name) for name in graph.train.tensors_of(operation)} & set(trained)
        counts.append(len(names - seen))
        seen |= names
    return counts


def estimated_costs(mode: ModeGraph, inputs: dict[str, Any]) -> list[float]:
    """The cost of each operation from its shapes, the same on all machines: work, and bytes moved."""
    found = _Estimator(mode).estimate(inputs)
    costs = [0.0] * len(mode.operations)
    for node, cost in found.items():
        if node in mode.positions:
            costs[mode.positions[node]] += cost
    return costs


def balanced(
    costs: Sequence[float], stages: int, legal: Sequence[int], needed: Sequence[int] = ()
) -> list[int] | None:
    """The cuts, of the legal ones, that minimise the cost of the slowest stage, by dynamic programming.

    `needed`: a count for each operation, of which every stage must have more than 0. None if it cannot.
    """
    sums = [0.0, *accumulate(costs)]
    counts = [0, *accumulate(needed or [1] * len(costs))]
    places = [0, *legal, len(costs)]

    def cost(low: int, high: int) -> float:
        return sums[high] - sums[low] if counts[high] > counts[low] else math.inf

    # best[j]: the slowest of k stages that cover everything before places[j].
    best = [cost(0, place) for place in places]
    begins: list[list[int]] = []  # for each k and j: where the last of these stages begins
    for k in range(2, stages + 1):
        rows = [
            min(((max(best[i], cost(places[i], place)), i) for i in range(k - 1, j)), default=(math.inf, 0))
            for j, place in enumerate(places)
        ]
        best, begins = [slowest for slowest, _ in rows], [*begins, [begin for _, begin in rows]]
    if best[-1] == math.inf:
        return None
    cuts, j = [], len(places) - 1
    for row in reversed(begins):
        j = row[j]
        cuts.append(places[j])
    return cuts[::-1]


class _Estimator(fx.Interpreter):
    """Runs the operations on shapes, without data, and counts the work of each."""

    def __init__(self, mode: ModeGraph) -> None:
        root = torch.nn.Module()
        super().__init__(root, graph=mode.graph, garbage_collect_values=True)
        self._mode, self._costs = mode, dict[fx.Node, float]()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._counter = FlopCounterMode(display=False)

    def estimate(self, inputs: dict[str, Any]) -> dict[fx.Node, float]:
        with self._fake, torch.no_grad(), without_progress_bars():
            given = [self._faked(each) for each in inputs.values()]
            self.run(*given, enable_io_processing=False)
        return self._costs

    def fetch_attr(self, target: str) -> Any:
        return self._faked(self._mode.attributes[target])

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._mode.attributes[str(target)]
        with torch.no_grad():
            states = {
                name: self._faked(each)
                for name, each in (*module.named_parameters(), *module.named_buffers())
            }
            return torch.func.functional_call(module, states, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        with self._counter:
            found = super().run_node(n)
        work = self._counter.get_total_flops() - before
        moved = sum(each.nbytes for each in pytree.tree_leaves(found) if isinstance(each, Tensor))
        self._costs[n] = (
            0.0 if n.op in ("placeholder", "get_attr", "output") else work / _FLOPS + moved / _BYTES
        )
        return found

    def _faked(self, value: Any) -> Any:
        return self._fake.from_tensor(value) if isinstance(value, Tensor) else value
