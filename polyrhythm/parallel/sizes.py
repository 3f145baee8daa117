"""Sizes: the numbers in a graph that follow from the shapes of tensors. Each stage computes its own.

A transformer asks for the number of rows once, and uses it in all layers. If sizes were values like others,
they would be sent from stage to stage.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_ARITHMETIC = {torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_int, torch.sym_float, torch.sym_sum}


def size_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose value is a size of a tensor, or computed from sizes only."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (
            node.target is torch.ops.aten.sym_size.int
            or (
                _is_arithmetic(node.target)
                and node.args
                and all(arg in found for arg in node.all_input_nodes)
            )
        ):
            found.add(node)
    return frozenset(found)


def _is_arithmetic(target: Any) -> bool:
    module = getattr(target, "__module__", "")
    known = module in (operator.__name__, "_operator", math.__name__) or target in _ARITHMETIC
    return known and target is not operator.getitem


def size_leaves(node: fx.Node) -> list[fx.Node]:
    """The sizes of tensors that a size is computed from."""
    if node.target is torch.ops.aten.sym_size.int:
        return [node]
    return [leaf for other in node.all_input_nodes for leaf in size_leaves(other)]


def source(leaf: fx.Node, tensors: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """One of these tensors, and its dimension, that has the size; None if none has."""
    wanted = _expression(leaf.meta.get("val"))
    for node in tensors:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and wanted is not None:
            for dimension, size in enumerate(value.shape):
                if _expression(size) == wanted:
                    return node, dimension
    return None


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else None


def copy_size(
    node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node], find: Callable[[fx.Node], Any]
) -> None:
    """Copies a size, and all that it is computed from, to the end of another graph.

    `find` says which tensor of that graph has the size of a leaf.
    """
    if node in copies:
        return
    if node.target is torch.ops.aten.sym_size.int:
        tensor, dimension = find(node)
        copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (copies[tensor], dimension))
        return
    for other in node.all_input_nodes:
        copy_size(other, graph, copies, find)
    copies[node] = graph.node_copy(node, copies.__getitem__)
