"""The segments of the operations of the eval graph, so that every parameter is where it is trained."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModeGraph, ModelGraph


def assign_eval(graph: ModelGraph, train: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Assigns each operation of the eval graph to a segment.

    The n-th use of a parameter or buffer is in the segment of its n-th use in training. An operation without
    parameters is in the first segment that takes the values of its inputs in training, too, or in that of the
    operations that it must not be separated from.
    """
    floors: dict[fx.Node, int] = {}
    after = _dependencies(graph.train, train)
    while True:
        segments = _assign(graph, train, after, floors)
        parted = [nodes for nodes, _ in graph.eval.bound if len({segments[node] for node in nodes}) > 1]
        for nodes in parted:
            floors.update(dict.fromkeys(nodes, max(segments[node] for node in nodes)))
        if not parted:
            return {node: segment for node, segment in segments.items() if node not in graph.eval.sizes}


def _dependencies(mode: ModeGraph, segment_of: Mapping[fx.Node, int]) -> list[set[int]]:
    """By segment: itself, and those that it depends on."""
    after: list[set[int]] = [{number} for number in range(max(segment_of.values(), default=0) + 1)]
    pairs = {
        (segment_of[node], segment_of[other])
        for node in mode.operations
        for other in node.all_input_nodes
        if other in segment_of
    }
    for later, earlier in sorted(pairs):
        after[later] |= after[earlier]
    return after


def _assign(
    graph: ModelGraph, train: Mapping[fx.Node, int], after: list[set[int]], floors: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Assigns operations, each to the segment of its floor or a later one."""
    training, evaluation = _uses(graph, graph.train), _uses(graph, graph.eval)
    seen: dict[str, int] = {}
    segments: dict[fx.Node, int] = {}
    free: list[fx.Node] = []  # operations on constants and inputs of the model, which all workers have
    for node in graph.eval.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        inputs = [segments[other] for other in node.all_input_nodes if other in segments]
        earliest = max(inputs, default=0)
        tensors = _tensors_of(graph, graph.eval, node)
        if not inputs and not tensors and node not in floors:
            free.append(node)
            continue
        if node.target is operator.getitem or node in graph.eval.sizes:
            segments[node] = earliest
            continue
        earliest = max(earliest, floors.get(node, 0))
        wanted: list[set[int]] = []
        for name in tensors:
            number = seen[name] = seen.get(name, -1) + 1
            uses = [train[user] for user in training.get(name, ())]
            if uses:  # otherwise only evaluation uses it: any segment may have it
                wanted.append({uses[number]} if len(uses) == len(evaluation[name]) else set(uses))
        if wanted:
            allowed = [each for each in sorted(set.intersection(*wanted)) if each >= earliest]
        else:
            allowed = [*range(earliest, len(after))]
        if not allowed:
            raise UsageError(
                f"cannot cut here: {node.meta.get('module') or node.name} would run on another stage "
                "in evaluation than in training; cut elsewhere"
            )
        # A segment that does not wait for these inputs in training should not begin to in evaluation.
        segments[node] = next((each for each in allowed if after[each].issuperset(inputs)), allowed[0])
    for node in reversed(free):
        segments[node] = min((segments[user] for user in node.users if user in segments), default=0)
    for node in free:
        if node.target is operator.getitem:
            segments[node] = segments[node.args[0]]  # type: ignore[index]
    return segments


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
