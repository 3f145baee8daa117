"""The stages of the operations of the eval graph, so that every parameter is on the stages that train it."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModelGraph


def assign_eval(graph: ModelGraph, train: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Assigns each operation of the eval graph to a stage.

    The n-th use of a parameter or buffer is on the stage of its n-th use in training. An operation without
    parameters is on the latest stage of its inputs.
    """
    training = _uses(graph, train)
    totals: dict[str, int] = {}
    for node in graph.eval.operations:
        for name in graph.eval.tensors_of(node):
            totals[name] = totals.get(name, 0) + 1
    seen: dict[str, int] = {}
    stages: dict[fx.Node, int] = {}
    for node in graph.eval.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        earliest = max((stages[other] for other in node.all_input_nodes if other in stages), default=0)
        if node.target is operator.getitem or node in graph.eval.sizes:
            stages[node] = earliest
            continue
        wanted: list[set[int]] = []
        for name in graph.eval.tensors_of(node):
            number = seen[name] = seen.get(name, -1) + 1
            uses = training.get(name)
            if uses:  # otherwise only evaluation uses it: any stage may own it
                wanted.append({uses[number]} if len(uses) == totals[name] else set(uses))
        allowed = set.intersection(*wanted) if wanted else {earliest}
        chosen = min((stage for stage in allowed if stage >= earliest), default=None)
        if chosen is None:
            raise UsageError(
                f"cannot cut here: {node.meta.get('module') or node.name} would run on another stage "
                "in evaluation than in training; cut elsewhere"
            )
        stages[node] = chosen
    for nodes, reason in graph.eval.bound:
        if len({stages[node] for node in nodes}) > 1:
            raise UsageError(f"cannot cut here: in evaluation, {reason} across the cut; cut elsewhere")
    return {node: stage for node, stage in stages.items() if node not in graph.eval.sizes}


def _uses(graph: ModelGraph, train: Mapping[fx.Node, int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in graph.train.operations:
        for name in graph.train.tensors_of(node):
            found.setdefault(name, []).append(train[node])
    return found
