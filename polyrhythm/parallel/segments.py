"""The segments of operations that run at given places: as few as lose no time at the border of two places."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.graph import ModeGraph, ModelGraph


def direct_inputs(mode: ModeGraph) -> list[list[int]]:
    """By operation: the operations whose values it takes, or whose sizes."""

    def positions(node: fx.Node) -> set[int]:
        found: set[int] = set()
        for other in node.all_input_nodes:
            if other in mode.sizes:
                found |= positions(other)
            elif other in mode.positions:
                found.add(mode.positions[other])
        return found

    return [sorted(positions(node)) for node in mode.operations]


def bound_positions(mode: ModeGraph) -> list[tuple[set[int], str]]:
    """Sets of operations that must run together, each with the reason."""
    return [({mode.positions[node] for node in nodes}, why) for nodes, why in mode.bound]


def segments_of(graph: ModelGraph, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """The segment of each operation of the train graph, and the place of each segment.

    The depth of an operation is how often the values that it needs change places, and its height how often
    the values that need it do. The operations of one place with the same depth and height are a segment: all
    of it can run when it begins, and no other place waits for something in the middle of it. Segments in the
    order of their depths, the highest first, can run.
    """
    inputs = direct_inputs(graph.train)
    users: list[list[int]] = [[] for _ in inputs]
    for position, others in enumerate(inputs):
        for other in others:
            users[other].append(position)
    bound = bound_positions(graph.train)
    for together, why in bound:
        if len({places[position] for position in together}) > 1:
            raise UsageError(f"operations that must run on one worker would be on two: {why}")
    depths = _changes(range(len(inputs)), inputs, places, bound)
    heights = _changes(range(len(inputs) - 1, -1, -1), users, places, bound)
    keys = list(zip(depths, [-each for each in heights], places, strict=True))
    order = {key: number for number, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys], [place for _, _, place in order]


def _changes(
    order: Sequence[int], before: list[list[int]], places: Sequence[int], bound: list[tuple[set[int], str]]
) -> list[int]:
    """By operation: how often values change places on the way to it, equal in operations that are bound."""
    found, last = [0] * len(before), [-1]
    while found != last:
        last = list(found)
        for position in order:
            ways = [found[other] + (places[other] != places[position]) for other in before[position]]
            found[position] = max([found[position], *ways])
        for together, why in bound:
            most = max(found[position] for position in together)
            if most > len(before):
                raise UsageError(f"operations that must run together would wait for others in between: {why}")
            for position in together:
                found[position] = most
    return found
