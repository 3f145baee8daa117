"""Estimates of what operations cost, from shapes: the same on all machines and in every run.

Measured times would differ from run to run, and so would the division. `polyrhythm plan` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from polyrhythm.parallel.graph import ModeGraph
from polyrhythm.parallel.progress_bars import without_progress_bars
from polyrhythm.parallel.tracing import value_name

# One core of a processor: only their ratio matters.
_FLOPS, _BYTES = 4e10, 1e10  # a second
MESSAGE, PER_BYTE = 2e-4, 5e-10  # seconds, between two processes of one host


def _mkldnn_rnn(data: Sequence[int], *shapes: Any, **_: Any) -> int:
    return 2 * math.prod(data[:-1]) * sum(map(math.prod, shapes[:2]))


def _cudnn_rnn(data: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    return 2 * math.prod(data[:-1]) * sum(map(math.prod, weights))


# Recurrent layers as one operation, which torch does not count: every step multiplies by all weights.
_RECURRENT = {torch.ops.aten.mkldnn_rnn_layer: _mkldnn_rnn, torch.ops.aten._cudnn_rnn: _cudnn_rnn}


@dataclass(frozen=True)
class Estimate:
    """The costs of the operations of a graph."""

    seconds: tuple[float, ...]  # by position: of the forward pass
    nbytes: Mapping[fx.Node, int]  # of the tensors that a node computes
    message: float = MESSAGE  # seconds to send anything, and
    per_byte: float = PER_BYTE  # for each byte of it


def estimate(mode: ModeGraph, inputs: dict[str, Any]) -> Estimate:
    """Estimates the cost of each operation: work, and bytes moved."""
    shapes = tuple(
        (name, tuple(each.shape), each.dtype) for name, each in inputs.items() if isinstance(each, Tensor)
    )
    if shapes not in mode.estimates:
        mode.estimates[shapes] = _estimate(mode, inputs)
    return mode.estimates[shapes]


def _estimate(mode: ModeGraph, inputs: dict[str, Any]) -> Estimate:
    estimator = _Estimator(mode)
    estimator.estimate(inputs)
    costs = [0.0] * len(mode.operations)
    for node, cost in estimator.costs.items():
        if node in mode.positions:
            costs[mode.positions[node]] += cost
    return Estimate(tuple(costs), estimator.nbytes, MESSAGE)


class _Estimator(fx.Interpreter):
    """Runs the operations on shapes, without data, and counts the work of each."""

    def __init__(self, mode: ModeGraph) -> None:
        root = torch.nn.Module()
        super().__init__(root, graph=mode.graph, garbage_collect_values=True)
        self._mode, self.costs, self.nbytes = mode, dict[fx.Node, float](), dict[fx.Node, int]()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._counter = FlopCounterMode(display=False, custom_mapping=_RECURRENT)

    def estimate(self, inputs: dict[str, Any]) -> None:
        with self._fake, torch.no_grad(), without_progress_bars():
            taken = [value_name(node) for node in self._mode.graph.nodes if node.op == "placeholder"]
            given = [self._faked(inputs[name]) for name in taken]
            self.run(*given, enable_io_processing=False)

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
        with self._counter:  # counts from 0
            found = super().run_node(n)
        work = self._counter.get_total_flops()
        moved = sum(each.nbytes for each in pytree.tree_leaves(found) if isinstance(each, Tensor))
        self.nbytes[n] = moved
        self.costs[n] = (
            0.0 if n.op in ("placeholder", "get_attr", "output") else work / _FLOPS + moved / _BYTES
        )
        return found

    def _faked(self, value: Any) -> Any:
        # Detached, because a view of a parameter without data asserts that it has a gradient.
        return self._fake.from_tensor(value.detach()) if isinstance(value, Tensor) else value
