"""Topologies: which workers exchange with each other where there is no server.

    ring               one neighbor on each side
    torus              a grid, as square as possible, with joined edges: four neighbors
    exponential        neighbors on both sides, by turns: at the distance 1 in a round, then 2, 4, 8, ...
    exponential-all    at all these distances in every round
    hypercube          workers whose numbers differ in one bit
    complete           all other workers
    random:4           a random connected graph in which each worker has 4 neighbors
    0-1/1-2/2-0        these edges

Places are numbered from 0; a graph lists the neighbors of each place, in order. It is a function of the
topology, the number of places and a seed, so all workers know the whole graph without a message.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise

from polyrhythm.core.errors import UsageError

Graph = tuple[tuple[int, ...], ...]
Edge = tuple[int, int]

NAMED = ("ring", "torus", "exponential", "exponential-all", "hypercube", "complete")
EXAMPLES = f"{', '.join(NAMED)}, random:DEGREE, or edges such as 0-1/1-2/2-0"


@dataclass(frozen=True)
class Topology:
    """A topology such as `ring`, `random:4` or `0-1/1-2`, for any number of places."""

    text: str
    kind: str
    degree: int = 0
    edges: tuple[Edge, ...] = ()

    def __str__(self) -> str:
        return self.text

    def turns(self, places: int) -> int:
        """The number of graphs that take turns: 1, except for `exponential`."""
        return max(1, (places - 1).bit_length()) if self.kind == "exponential" else 1


def parse_topology(text: str) -> Topology:
    """The topology that a text names; UsageError says what is wrong with it.

    >>> parse_topology("0-1/1-2").edges
    ((0, 1), (1, 2))
    """
    if text in NAMED:
        return Topology(text, text)
    kind, colon, rest = text.partition(":")
    if kind == "random":
        if not re.fullmatch("[0-9]{1,9}", rest) or int(rest) < 1:
            raise UsageError(f"topology {text!r}: give the number of neighbors, as in random:4")
        return Topology(text, "random", int(rest))
    if not colon and re.match("[0-9]", text):
        return Topology(text, "edges", edges=tuple(_edges(text)))
    near = difflib.get_close_matches(text.lower(), NAMED, n=1)
    meant = f"did you mean {near[0]}? There" if near else "there"
    raise UsageError(f"topology {text!r} is unknown; {meant} are {EXAMPLES}")


def graph(topology: Topology, places: int, seed: int = 0, turn: int | None = None) -> Graph:
    """The neighbors of each place; UsageError if so many places have no such graph.

    If the graph changes from round to round: those at a turn, or all that a place ever has.

    >>> graph(parse_topology("ring"), 4)
    ((1, 3), (0, 2), (1, 3), (0, 2))
    """
    if places < 1:
        raise UsageError(f"topology {topology}: a graph needs at least one worker")
    if topology.kind == "edges":
        return _listed(topology, places)
    if places == 1:
        return ((),)
    if topology.kind == "random":
        return _regular(places, _degree(topology, places), seed)
    distances: Iterable[int]
    match topology.kind:
        case "torus":
            rows, columns = _grid(places)
            return _graph(places, (edge for place in range(places) for edge in _cell(place, rows, columns)))
        case "hypercube":
            if places & (places - 1):
                below = 1 << (places.bit_length() - 1)
                raise UsageError(
                    f"topology hypercube: {places} workers are not a power of two; {below} or {2 * below} "
                    "would work, or the topology exponential"
                )
            flips = [1 << bit for bit in range(places.bit_length() - 1)]
            return _graph(places, ((place, place ^ flip) for place in range(places) for flip in flips))
        case "ring":
            distances = [1]
        case "complete":
            distances = range(1, places)
        case _:
            distances = [1 << power for power in range((places - 1).bit_length())]
            if topology.kind == "exponential" and turn is not None:
                distances = [distances[turn % len(distances)]]
    return _graph(places, ((place, (place + far) % places) for place in range(places) for far in distances))


def regraph(
    topology: Topology, ranks: Sequence[int], seed: int = 0, turn: int | None = None
) -> dict[int, tuple[int, ...]]:
    """The neighbors of each of these ranks. Others may have died.

    The survivors use the same topology. If so many workers have no such graph, they use the nearest one:
    `exponential-all` in place of a torus or hypercube; for `random:D` as many neighbors as possible, and one
    more if their number and D are odd. An edge list keeps the edges between survivors, and gets a ring
    through all if these do not connect them.
    """
    survivors = sorted(ranks)
    if topology.kind == "edges":
        kept = [edge for edge in topology.edges if set(edge) <= set(survivors)]
        place = {rank: number for number, rank in enumerate(survivors)}
        edges = [(place[low], place[high]) for low, high in kept]
        found = _graph(len(survivors), edges)
        if not connected(found):
            ring = ((number, (number + 1) % len(survivors)) for number in place.values())
            found = _graph(len(survivors), [*edges, *ring])
    else:
        found = graph(_possible(topology, len(survivors)), len(survivors), seed, turn)
    return {survivors[place]: tuple(survivors[each] for each in near) for place, near in enumerate(found)}


def check_connected(neighbors: Graph) -> None:
    """Raises UsageError unless a path leads from each place to each other."""
    if len(neighbors) > 1 and not all(neighbors):
        raise UsageError(f"worker {neighbors.index(())} has no neighbor: name an edge of it, or leave it out")
    reached = _reached(neighbors)
    if len(reached) < len(neighbors):
        rest = [place for place in range(len(neighbors)) if place not in reached]
        raise UsageError(
            f"disconnected topology: no path leads from worker 0 to {_some(rest)}, so they would never "
            "agree; join both parts by an edge"
        )


def connected(neighbors: Graph) -> bool:
    """True if a path leads from each place to each other."""
    return len(_reached(neighbors)) == len(neighbors)


# --- rounds in which each worker has one partner, another each time ---------------------------------


def exponential_peer(place: int, places: int, turn: int) -> int:
    """The receiver of a place in a round, at the distance 1, 2, 4, ... by turns. Each has one sender, too."""
    powers = (places - 1).bit_length()
    return (place + (1 << turn % powers)) % places if powers else place


def pairs(places: int, seed: int, turn: int) -> tuple[Edge, ...]:
    """Random pairs for a round. One of an odd number is left out, another each time until all have been."""
    order = _drawn(places, seed, "pairs", turn)
    if places % 2:
        # By turns, in an order that is drawn once: none is left out twice before all have been.
        order.remove(_drawn(places, seed, "out")[turn % places])
    return tuple(sorted((min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=True)))


@lru_cache(maxsize=64)
def partners(places: int, seed: int, turn: int) -> Mapping[int, int]:
    """The partner of each place in a round of random pairs."""
    met = pairs(places, seed, turn)
    return {one: other for pair in met for one, other in (pair, pair[::-1])}


# --- how graphs are made ----------------------------------------------------------------------------


def _edges(text: str) -> Iterator[Edge]:
    seen: set[Edge] = set()
    for word in text.split("/"):
        if re.fullmatch("[0-9]+>[0-9]+", word):
            raise UsageError(
                f"unbalanced topology: {word} goes one way, and the mean is preserved only if both mix; "
                f"write {word.replace('>', '-')}"
            )
        if not re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", word):
            raise UsageError(
                f"topology: {word!r} is not an edge between two workers; write edges as in 0-1/1-2/2-0"
            )
        low, high = sorted(int(end) for end in word.split("-"))
        if low == high:
            raise UsageError(f"topology: {word} makes worker {low} its own neighbor; leave it out")
        if (low, high) in seen:
            raise UsageError(f"topology: the edge between {low} and {high} is named twice")
        seen.add((low, high))
        yield low, high


def _listed(topology: Topology, places: int) -> Graph:
    top = max(high for _, high in topology.edges)
    if top >= places:
        raise UsageError(
            f"topology {topology}: names worker {top}, and the {places} workers are 0 to {places - 1}"
            if places > 1
            else f"topology {topology}: names worker {top}, and there is one worker, 0"
        )
    found = _graph(places, topology.edges)
    try:
        check_connected(found)
    except UsageError as error:
        raise UsageError(f"topology {topology}: {error}") from None
    return found


def _grid(places: int) -> Edge:
    """Rows and columns of a grid that is as square as possible."""
    rows = next(number for number in range(math.isqrt(places), 0, -1) if places % number == 0)
    if rows < 2:
        fitting = [number for number in (places - 1, places + 1) if number > 3 and number % 2 == 0] or [4]
        said = " or ".join(f"{each} ({_times(_grid(each))})" for each in fitting)
        raise UsageError(
            f"topology torus: {places} workers make an odd grid, one row of {places}; {said} would work, or "
            "another topology: ring, exponential"
        )
    return rows, places // rows


def _cell(place: int, rows: int, columns: int) -> tuple[Edge, Edge]:
    row, column = divmod(place, columns)
    return (
        (place, (row + 1) % rows * columns + column),
        (place, row * columns + (column + 1) % columns),
    )


def _degree(topology: Topology, places: int) -> int:
    degree = topology.degree
    if degree >= places:
        raise UsageError(f"topology {topology}: with {places} workers the most is random:{places - 1}")
    if degree == 1 and places > 2:
        raise UsageError(f"topology {topology}: pairs are not connected; 2 neighbors or more would work")
    if places * degree % 2:
        raise UsageError(
            f"topology {topology}: {places} workers cannot have {degree} neighbors each, because both "
            f"numbers are odd; random:{degree - 1} or random:{degree + 1} would work"
        )
    return degree


def _possible(topology: Topology, places: int) -> Topology:
    """The topology itself, or the one that so many places get instead."""
    try:
        graph(topology, places)
    except UsageError:
        if topology.kind != "random":
            return Topology("exponential-all", "exponential-all")
        degree = max(topology.degree, 2)
        degree += places * degree % 2
        if degree >= places:
            return Topology("complete", "complete")
        return Topology(f"random:{degree}", "random", degree)
    return topology


def _regular(places: int, degree: int, seed: int) -> Graph:
    """A random connected graph in which each place has so many neighbors."""
    if degree == places - 1:
        return graph(Topology("complete", "complete"), places)
    if degree == 2:  # few random ones are connected
        order = _drawn(places, seed, "ring")
        return _graph(places, pairwise([*order, order[0]]))
    # Few edges are drawn quickly. Of many, the missing ones are drawn.
    few = min(degree, places - 1 - degree)
    for attempt in count():
        edges = _matched(places, few, seed, attempt)
        if edges is None:
            continue
        if few != degree:
            every = {(low, high) for high in range(places) for low in range(high)}
            edges = every - edges
        found = _graph(places, edges)
        if connected(found):
            return found
    raise AssertionError


def _matched(places: int, degree: int, seed: int, attempt: int) -> set[Edge] | None:
    """Gives each place so many half-edges and joins them at random; invalid edges are drawn again.

    None if the rest cannot be joined (Steger and Wormald 1999).
    """
    edges: set[Edge] = set()
    ends = [place for place in range(places) for _ in range(degree)]
    for draw in count():
        if not ends:
            return edges
        order = [ends[number] for number in _drawn(len(ends), seed, "ends", attempt, draw)]
        ends = []
        for one, other in zip(order[::2], order[1::2], strict=True):
            edge = min(one, other), max(one, other)
            if one == other or edge in edges:
                ends += edge
            else:
                edges.add(edge)
        left = sorted(set(ends))
        if left and all((low, high) in edges for low in left for high in left if low < high):
            return None
    raise AssertionError


def _drawn(number: int, *seeds: object) -> list[int]:
    """The numbers below `number` in random order, by hashes, which are the same in all library versions."""

    def key(each: int) -> bytes:
        return hashlib.blake2b(repr((*seeds, each)).encode(), digest_size=8).digest()

    return sorted(range(number), key=key)


def _graph(places: int, edges: Iterable[Edge]) -> Graph:
    near: list[set[int]] = [set() for _ in range(places)]
    for one, other in edges:
        if one != other:
            near[one].add(other)
            near[other].add(one)
    return tuple(tuple(sorted(each)) for each in near)


def _reached(neighbors: Graph) -> set[int]:
    reached, ahead = {0}, [0]
    while ahead:
        new = set(neighbors[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return reached


def _some(places: Sequence[int]) -> str:
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f"worker{'s' * (len(places) > 1)} {', '.join(map(str, places[:4]))}{more}"


def _times(grid: Edge) -> str:
    return f"{grid[0]}x{grid[1]}"
