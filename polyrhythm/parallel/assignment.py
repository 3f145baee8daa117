"""The stages of the operations of the eval graph, so that every parameter is on the stages that train it."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModeGraph, ModelGraph


def assign_eval(graph: ModelGraph, train: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Assigns each operation of the eval graph to a stage.

    The n-th use of a parameter or buffer is on the stage of its n-th use in training. An operation without
    parameters is on the latest stage of its inputs, or of the operations that it must not be separated from.
    """
    floors: dict[fx.Node, int] = {}
    while True:
        stages = _assign(graph, train, floors)
        parted = [nodes for nodes, _ in graph.eval.bound if len({stages[node] for node in nodes}) > 1]
        for nodes in parted:
            floors.update(dict.fromkeys(nodes, max(stages[node] for node in nodes)))
        if not parted:
            return {node: stage for node, stage in stages.items() if node not in graph.eval.sizes}


def _assign(
    graph: ModelGraph, train: Mapping[fx.Node, int], floors: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Assigns operations, each to the stage of its floor or a later one."""
    training, evaluation = _uses(graph, graph.train), _uses(graph, graph.eval)
    seen: dict[str, int] = {}
    stages: dict[fx.Node, int] = {}
    for node in graph.eval.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        inputs = [stages[other] for other in node.all_input_nodes if other in stages]
        earliest = max(inputs, default=0)
        if node.target is operator.getitem or node in graph.eval.sizes:
            stages[node] = earliest
            continue
        earliest = max(earliest, floors.get(node, 0))
        wanted: list[set[int]] = []
        for name in _tensors_of(graph, graph.eval, node):
            number = seen[name] = seen.get(name, -1) + 1
            uses = [train[user] for user in training.get(name, ())]
            if uses:  # otherwise only evaluation uses it: any stage may own it
                wanted.append({uses[number]} if len(uses) == len(evaluation[name]) else set(uses))
        allowed = set.intersection(*wanted) if wanted else {earliest}
        chosen = min((stage for stage in allowed if stage >= earliest), default=None)
        if chosen is None:
            raise UsageError(
                f"cannot cut here: {node.meta.get('module') or node.name} would run on another stage "
                "in evaluation than in training; cut elsewhere"
            )
        stages[node] = chosen
    return stages


def _uses(graph: ModelGraph, mode: ModeGraph) -> dict[str, list[fx.Node]]:
    """The operations that use each parameter or buffer."""
    found: dict[str, list[fx.Node]] = {}
    for node in mode.operations:
        for name in _tensors_of(graph, mode, node):
            found.setdefault(name, []).append(node)
    return found


def _tensors_of(graph: ModelGraph, mode: ModeGraph, node: fx.Node) -> list[str]:
    """The parameters and buffers of an operation. A constant in the code of forward may be anywhere."""
    return [name for name in mode.tensors_of(node) if name in graph.names]
