"""Where a model is cut into stages: at layers that the user names, or where the slowest stage is fastest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.best_cuts import Preferences, best_cuts, module_nesting, own_parameters
from polyrhythm.parallel.costs import Costs, OperationCost
from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.partition import cuts_at
from polyrhythm.parallel.progress_bars import without_progress_bars
from polyrhythm.parallel.splits import Pipeline
from polyrhythm.parallel.tracing import value_name

# One core of a processor: only their ratio matters. Measured times would differ from run to run, and so would
# the cut; `polyrhythm plan` measures.
_FLOPS, _BYTES = 4e10, 1e10  # a second


def choose_cuts(
    graph: ModelGraph, pipeline: Pipeline, inputs: dict[str, Any], trained: Collection[str]
) -> list[int]:
    """The positions at which the stages of a pipeline begin. `trained`: the names of parameters to train."""
    if pipeline.layers:
        return cuts_at(graph, pipeline.layers)
    estimates = estimated_costs(graph.train, inputs)
    costs = Costs(
        tuple(OperationCost(each, 0.0) for each in estimates),
        (0,) * (len(estimates) + 1),
        frozenset(graph.illegal),
    )
    preferences = Preferences(needed=own_parameters(graph, trained), nesting=module_nesting(graph))
    for size in range(pipeline.size, 0, -1):
        cuts = best_cuts(costs, size, 0.0, preferences)
        if cuts is not None and size == pipeline.size:
            return cuts
        if cuts is not None:
            break
    raise UsageError(
        f"{pipeline} has more stages than the model has layers to train that can be apart: use {size} at most"
    )


def estimated_costs(mode: ModeGraph, inputs: dict[str, Any]) -> list[float]:
    """The cost of each operation from its shapes, the same on all machines: work, and bytes moved."""
    found = _Estimator(mode).estimate(inputs)
    costs = [0.0] * len(mode.operations)
    for node, cost in found.items():
        if node in mode.positions:
            costs[mode.positions[node]] += cost
    return costs


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
            taken = [value_name(node) for node in self._mode.graph.nodes if node.op == "placeholder"]
            given = [self._faked(inputs[name]) for name in taken]
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
        # Detached, because a view of a parameter without data asserts that it has a gradient.
        return self._fake.from_tensor(value.detach()) if isinstance(value, Tensor) else value
