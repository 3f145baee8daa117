"""Branches: parts of a model that do not depend on each other and meet again, for workers side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.estimates import Estimate
from polyrhythm.parallel.graph import ModeGraph, ModelGraph
from polyrhythm.parallel.partition import Partition, operations_of, partition
from polyrhythm.parallel.segments import bound_positions, direct_inputs, segments_of
from polyrhythm.parallel.splits import Branches

CHEAP = 0.01  # of the time: an operation without parameters below it may lie between branches and their merge
BACKWARD = 2  # times as long as the forward pass


@dataclass(frozen=True)
class Fork:
    """Independent parts of a model, by the positions of their operations in the train graph."""

    merge: int  # the operation that takes the results of all; behind the last: the model's output
    branches: tuple[tuple[int, ...], ...]
    workers: tuple[int, ...]  # of each branch
    saved: float  # seconds, compared with one worker; without messages

    @property
    def places(self) -> dict[int, int]:
        pairs = zip(self.branches, self.workers, strict=True)
        return {position: worker for branch, worker in pairs for position in branch}


def forks(graph: ModelGraph, seconds: Sequence[float], count: int) -> list[Fork]:
    """The independent parts of a model on so many workers, those first that save most."""
    mode, total = graph.train, sum(seconds)
    direct = direct_inputs(mode)
    cheap = [
        cost < CHEAP * total and not mode.tensors_of(node)
        for node, cost in zip(mode.operations, seconds, strict=True)
    ]
    ancestors = [0] * len(seconds)  # sets of positions, as bits
    for position, inputs in enumerate(direct):
        for each in inputs:
            ancestors[position] |= ancestors[each] | 1 << each
    found = []
    for merge, inputs in enumerate([*direct, _returned(mode)]):
        if len(inputs) < 2:
            continue
        tops = _tops(inputs, direct, cheap)
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
        loads = [sum(seconds[position] for position in part) for part in parts]
        workers, longest = _assign(loads, count)
        if sum(loads) - longest >= CHEAP * max(loads, default=0.0) > 0:
            found.append(Fork(merge, tuple(parts), workers, sum(loads) - longest))
    return sorted(found, key=lambda fork: -fork.saved)


def _returned(mode: ModeGraph) -> list[int]:
    """The operations whose values the model returns."""
    outputs = mode.graph.output_node().all_input_nodes
    return sorted({mode.positions[node] for node in outputs if node in mode.positions})


def _tops(inputs: list[int], direct: list[list[int]], cheap: Sequence[bool]) -> list[int]:
    """The last expensive operations before a merge: cheap ones in between, such as additions, are passed."""
    found, todo, seen = set(), list(inputs), set(inputs)
    while todo:
        position = todo.pop()
        if not cheap[position] or not direct[position]:
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


# --- places -----------------------------------------------------------------------------------------


def choose_places(graph: ModelGraph, how: Branches, estimate: Estimate) -> list[int]:
    """The place of each operation. What is in no branch is at place 0."""
    places = _named_places(graph, how, estimate) if how.names else _best_places(graph, how, estimate)
    if idle := set(range(how.size)) - set(places):
        raise UsageError(
            f"{how} has more workers than the model has branches that can run at the same time: "
            f"use branches:{how.size - len(idle)}"
        )
    return places


def _named_places(graph: ModelGraph, how: Branches, estimate: Estimate) -> list[int]:
    """The submodules that the user names are dealt to the workers in their order."""
    chosen = {
        position: number % how.size
        for number, name in enumerate(how.names)
        for position in operations_of(graph, name)
    }
    places = _completed(graph, chosen, estimate)
    segments_of(graph, places)
    return places


def _best_places(graph: ModelGraph, how: Branches, estimate: Estimate) -> list[int]:
    """Takes fork by fork, those first that save most, as long as they save more than their messages cost."""
    none = [0] * len(estimate.seconds)
    chosen: dict[int, int] = {}
    least, reason = step_seconds(graph, none, estimate), ""
    first: list[int] | None = None
    for fork in forks(graph, estimate.seconds, how.size):
        if first is not None and fork.saved * (1 + BACKWARD) < 2 * estimate.message:
            break
        if not chosen.keys().isdisjoint(fork.places):
            continue
        places = _completed(graph, {**chosen, **fork.places}, estimate)
        try:
            partition(graph, *segments_of(graph, places))
        except UsageError as error:
            reason = reason or str(error)
            continue
        first = first or places
        if (spent := step_seconds(graph, places, estimate)) < least:
            least, chosen = spent, {**chosen, **fork.places}
    if first is None:
        why = f" ({reason})" if reason else ""
        raise UsageError(
            f"the model has no branches that can run at the same time{why}: use pipeline:{how.size}"
        )
    return _completed(graph, chosen, estimate) if chosen else first


def _completed(graph: ModelGraph, chosen: Mapping[int, int], estimate: Estimate) -> list[int]:
    """The place of each operation: the chosen one, that of all its inputs, or 0."""
    mode, inputs = graph.train, direct_inputs(graph.train)
    total = sum(estimate.seconds)
    known = dict(chosen)
    for together, _ in bound_positions(mode):  # what must run together follows the branch that it is in
        where = {known[position] for position in together if position in known}
        if len(where) == 1:
            known.update(dict.fromkeys(together, where.pop()))
    places = [known.get(position, 0) for position in range(len(inputs))]
    free = set[int]()  # cheap operations on constants and inputs of the model, which all workers have
    for position, others in enumerate(inputs):
        if position in known:
            continue
        if all(other in free for other in others):
            cost, operation = estimate.seconds[position], mode.operations[position]
            if cost < CHEAP * total and not mode.tensors_of(operation):
                free.add(position)
        else:
            where = {places[other] for other in others if other not in free}
            places[position] = where.pop() if len(where) == 1 else 0
    users: dict[int, set[int]] = {position: set() for position in free}
    for position in range(len(inputs) - 1, -1, -1):
        if position in free:
            places[position] = users[position].pop() if len(users[position]) == 1 else 0
        for other in inputs[position]:
            if other in free:
                users[other].add(places[position])
    return places


def divide_by_places(graph: ModelGraph, places: Sequence[int]) -> Partition:
    """Divides a model. The places that share a parameter own about as many bytes of such ones each."""
    parts = partition(graph, *segments_of(graph, places))
    owned = dict.fromkeys(range(max(places) + 1), 0)
    sizes = {name: _nbytes(graph, name) for name in parts.users}
    for name, users in parts.users.items():
        if len(users) == 1:
            owned[users[0]] += sizes[name]
    found = dict(parts.users)
    shared = sorted((name for name in found if len(found[name]) > 1), key=lambda name: -sizes[name])
    for name in shared:
        owner = min(found[name], key=owned.__getitem__)
        owned[owner] += sizes[name]
        found[name] = (owner, *(place for place in found[name] if place != owner))
    return replace(parts, users=found)


def _nbytes(graph: ModelGraph, name: str) -> int:
    """The bytes of a tensor of the model; 0 if it is inside a module that was captured whole."""
    return getattr(graph.train.attributes.get(name), "nbytes", 0)


# --- time -------------------------------------------------------------------------------------------


def step_seconds(graph: ModelGraph, places: Sequence[int], estimate: Estimate) -> float:
    """The time of a forward and a backward pass with operations at these places."""
    segments, homes = segments_of(graph, places)
    spent = [0.0] * len(homes)
    for segment, cost in zip(segments, estimate.seconds, strict=True):
        spent[segment] += cost
    crossing = _crossing(graph.train, segments, homes, estimate)
    order = range(len(homes))
    into = [[(a, delay) for (a, b), delay in crossing.items() if b == segment] for segment in order]
    out = [[(b, delay) for (a, b), delay in crossing.items() if a == segment] for segment in order]
    lent = sum(_nbytes(graph, name) for name in _shared(graph, places))
    ends = 2 * (estimate.message + estimate.per_byte * lent) if lent else 0.0
    if len(set(places)) > 1:
        ends += estimate.message  # the output
    forward = _schedule(order, homes, spent, into)
    return forward + _schedule(order[::-1], homes, [BACKWARD * each for each in spent], out) + ends


def _crossing(
    mode: ModeGraph, segments: Sequence[int], homes: Sequence[int], estimate: Estimate
) -> dict[tuple[int, int], float]:
    """By two segments at different places: the seconds that values take from one to the other."""
    taken: dict[tuple[int, int], int] = {}
    for node, position in mode.positions.items():
        for segment in {segments[mode.positions[user]] for user in node.users if user in mode.positions}:
            pair = (segments[position], segment)
            if homes[pair[0]] != homes[pair[1]]:
                taken[pair] = taken.get(pair, 0) + estimate.nbytes[node]
    return {pair: estimate.message + estimate.per_byte * size for pair, size in taken.items()}


def _shared(graph: ModelGraph, places: Sequence[int]) -> Iterable[str]:
    """The parameters that several places use."""
    used: dict[str, set[int]] = {}
    for node, place in zip(graph.train.operations, places, strict=True):
        for name in graph.train.tensors_of(node):
            used.setdefault(graph.names.get(name, name), set()).add(place)
    return [name for name, users in used.items() if len(users) > 1]


def _schedule(
    order: Sequence[int],
    homes: Sequence[int],
    spent: Sequence[float],
    needed: Sequence[Sequence[tuple[int, float]]],
) -> float:
    """When the last segment is done, if each begins when its place and the values that it needs are there."""
    free, done = dict.fromkeys(homes, 0.0), dict[int, float]()
    for segment in order:
        values = [done[other] + delay for other, delay in needed[segment]]
        done[segment] = max([free[homes[segment]], *values]) + spent[segment]
        free[homes[segment]] = done[segment]
    return max(free.values(), default=0.0)
