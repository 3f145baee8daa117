"""Branches: parts of a model that do not depend on each other and meet again, for workers side by side."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.parallel.costs import Costs
from polyrhythm.parallel.graph import ModelGraph

CHEAP = 0.01  # operations below this share of the time may lie between the branches and where they meet


@dataclass(frozen=True)
class Branches:
    """Independent parts of a model, by the positions of their operations in the train graph."""

    merge: int  # the operation that takes the results of all
    branches: tuple[tuple[int, ...], ...]
    workers: tuple[int, ...]  # of each branch
    seconds: float  # of the whole model on these workers
    serial: float  # on one


def branches(graph: ModelGraph, costs: Costs, count: int, least: float = 0.1) -> Branches | None:
    """The independent parts that save most time on so many workers; None if they save less than `least`.

    The operations before the branches and after them run on every worker.
    """
    seconds = [each.seconds for each in costs.operations]
    total = sum(seconds)
    direct = _inputs(graph)
    ancestors = [0] * len(seconds)  # sets of positions, as bits
    for position, inputs in enumerate(direct):
        for each in inputs:
            ancestors[position] |= ancestors[each] | 1 << each
    best: Branches | None = None
    for merge, inputs in enumerate(direct):
        if len(inputs) < 2:
            continue
        tops = _tops(inputs, direct, seconds, CHEAP * total)
        closures = [ancestors[top] | 1 << top for top in tops]
        # What another one depends on is part of that one.
        closures = [
            closure
            for top, closure in zip(tops, closures, strict=True)
            if not any(other >> top & 1 for other in closures if other != closure)
        ]
        parts = []
        for number, closure in enumerate(closures):
            others = 0
            for other in closures[:number] + closures[number + 1 :]:
                others |= other
            part = tuple(_bits(closure & ~others))
            if part:
                parts.append(part)
        if len(parts) < 2:
            continue
        loads = [sum(seconds[position] for position in part) for part in parts]
        workers, longest = _assign(loads, count)
        spent = total - sum(loads) + longest
        if spent <= (1 - least) * total and (best is None or spent < best.seconds):
            best = Branches(merge, tuple(parts), workers, spent, total)
    return best


def _inputs(graph: ModelGraph) -> list[list[int]]:
    """The operations whose results each operation takes."""
    mode = graph.train
    return [
        sorted({mode.positions[other] for other in node.all_input_nodes if other in mode.positions})
        for node in mode.operations
    ]


def _tops(inputs: list[int], direct: list[list[int]], seconds: list[float], cheap: float) -> list[int]:
    """The last expensive operations before a merge: cheap ones in between, such as additions, are passed."""
    found, todo, seen = set(), list(inputs), set(inputs)
    while todo:
        position = todo.pop()
        if seconds[position] >= cheap or not direct[position]:
            found.add(position)
            continue
        for each in direct[position]:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return sorted(found)


def _bits(number: int) -> list[int]:
    return [position for position in range(number.bit_length()) if number >> position & 1]


def _assign(loads: list[float], count: int) -> tuple[tuple[int, ...], float]:
    """Each branch to the worker with the least to do, the longest branches first."""
    busy, chosen = [0.0] * count, [0] * len(loads)
    for number in sorted(range(len(loads)), key=lambda each: -loads[each]):
        worker = busy.index(min(busy))
        busy[worker] += loads[number]
        chosen[number] = worker
    return tuple(chosen), max(busy)
