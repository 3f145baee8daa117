"""Who talks with whom where there is no server: graphs over the workers, and what each neighbour counts.

    ring               one neighbour on each side
    torus              a grid as square as possible whose edges are joined: four neighbours
    exponential        neighbours on both sides, by turns: at the distance 1 in a round, then 2, 4, 8, ...
    exponential-all    at all these distances in every round
    hypercube          those whose number differs in one bit
    complete           everybody with everybody
    random:4           a random connected graph in which each has 4 neighbours
    0-1/1-2/2-0        these edges

Places are numbered from 0; a graph is the neighbours of each place, in order. Everything here follows from
the topology, the number of places and a seed, so that all workers know the whole graph and nothing is sent.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Graph = tuple[tuple[int, ...], ...]
Edge = tuple[int, int]

NAMED = ("ring", "torus", "exponential", "exponential-all", "hypercube", "complete")
EXAMPLES = f"{', '.join(NAMED)}, random:DEGREE, or edges such as 0-1/1-2/2-0"


@dataclass(frozen=True)
class Topology:
    """What a text like `ring`, `random:4` or `0-1/1-2` asks for, before the number of places is known."""

    text: str
    kind: str
    degree: int = 0
    edges: tuple[Edge, ...] = ()

    def __str__(self) -> str:
        return self.text

    def turns(self, places: int) -> int:
        """How many different graphs follow each other: 1, but for `exponential`."""
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
            raise UsageError(f"topology {text!r}: say how many neighbours each has, as in random:4")
        return Topology(text, "random", int(rest))
    if not colon and re.match("[0-9]", text):
        return Topology(text, "edges", edges=tuple(_edges(text)))
    near = difflib.get_close_matches(text.lower(), NAMED, n=1)
    meant = f"did you mean {near[0]}? There" if near else "there"
    raise UsageError(f"topology {text!r} is unknown; {meant} are {EXAMPLES}")


def graph(topology: Topology, places: int, seed: int = 0, turn: int | None = None) -> Graph:
    """The neighbours of each place; UsageError if there is no such graph over so many places.

    Of one that changes from round to round: those at a turn, or all that a place ever has.

    >>> graph(parse_topology("ring"), 4)
    ((1, 3), (0, 2), (1, 3), (0, 2))
    """
    if places < 1:
        raise UsageError(f"topology {topology}: a graph needs one place at least")
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
                    f"topology hypercube: {places} workers are no power of two; {below} or {2 * below} "
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
    """The neighbours of each of these ranks, whichever of the workers they are: some may have died.

    What is left is asked for the same topology. If so many cannot have it they get what is nearest to it: in
    place of a torus or hypercube `exponential-all`; of `random:D` as many neighbours as there can be, one
    more if their number and D are odd. Of an edge list what is between them, and a ring through all if that
    does not hold together.
    """
    living = sorted(ranks)
    if topology.kind == "edges":
        kept = [edge for edge in topology.edges if set(edge) <= set(living)]
        place = {rank: number for number, rank in enumerate(living)}
        edges = [(place[low], place[high]) for low, high in kept]
        found = _graph(len(living), edges)
        if not connected(found):
            ring = ((number, (number + 1) % len(living)) for number in place.values())
            found = _graph(len(living), [*edges, *ring])
    else:
        found = graph(_possible(topology, len(living)), len(living), seed, turn)
    return {living[place]: tuple(living[each] for each in near) for place, near in enumerate(found)}


def metropolis(neighbours: Graph) -> tuple[tuple[float, ...], ...]:
    """What each neighbour of each place counts: W_ij = 1 / (1 + max(d_i, d_j)), by Metropolis and Hastings.

    W_ii is the rest, and never below 1 / (1 + d_i). So W is symmetric, and its rows and columns add up to 1:
    mixing by it moves no mean.
    """
    degrees = [len(each) for each in neighbours]
    return tuple(
        tuple(1 / (1 + max(degrees[place], degrees[other])) for other in near)
        for place, near in enumerate(neighbours)
    )


def matrix(neighbours: Graph) -> NDArray[np.float64]:
    """W as a matrix."""
    import numpy as np

    size = len(neighbours)
    weights = np.zeros((size, size))
    for place, (near, given) in enumerate(zip(neighbours, metropolis(neighbours), strict=True)):
        weights[place, list(near)] = given
        weights[place, place] = 1 - math.fsum(given)
    return weights


def check_weights(weights: NDArray[np.float64], whole: bool = True) -> None:
    """Raises UsageError unless mixing by these weights brings all to their mean, and leaves that in place.

    `whole`: the graph must hold together; one that is only a turn need not.
    """
    import numpy as np

    near = 1e-12
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise UsageError(f"weights of mixing are a square matrix, and this one is {weights.shape}")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise UsageError("unbalanced topology: a weight is negative, or no number")
    if np.abs(weights - weights.T).max() > near:
        one, other = np.unravel_index(np.abs(weights - weights.T).argmax(), weights.shape)
        raise UsageError(
            f"unbalanced topology: {one} counts {weights[other, one]:g} for {other}, and {other} counts "
            f"{weights[one, other]:g} for {one}; the weights of both must be equal"
        )
    if np.abs(weights.sum(1) - 1).max() > near:
        place = int(np.abs(weights.sum(1) - 1).argmax())
        total = float(weights[place].sum())
        raise UsageError(f"unbalanced topology: the weights of worker {place} add up to {total:g}, not 1")
    if whole:
        check_connected(tuple(tuple(np.flatnonzero(row).tolist()) for row in weights))


def check_connected(neighbours: Graph) -> None:
    """Raises UsageError unless there is a way from each place to each other."""
    if len(neighbours) > 1 and not all(neighbours):
        raise UsageError(
            f"worker {neighbours.index(())} has no neighbour: name an edge of it, or leave it out"
        )
    reached = _reached(neighbours)
    if len(reached) < len(neighbours):
        rest = [place for place in range(len(neighbours)) if place not in reached]
        raise UsageError(
            f"disconnected topology: no way leads from worker 0 to {_some(rest)}, so they would never agree; "
            "join both parts by an edge"
        )


def connected(neighbours: Graph) -> bool:
    """Whether there is a way from each place to each other."""
    return len(_reached(neighbours)) == len(neighbours)


def contraction(weights: NDArray[np.float64]) -> float:
    """rho, W's second largest |eigenvalue|: one mixing leaves at most this much of the way to the mean."""
    import numpy as np

    if len(weights) == 1:
        return 0.0
    return float(np.sort(np.abs(np.linalg.eigvalsh(weights)))[-2])


# Rounds in which each has one partner, another each time.


def exponential_peer(place: int, places: int, turn: int) -> int:
    """To whom a place gives in a round: at the distance 1, 2, 4, ... and again. So all get from one, too."""
    powers = (places - 1).bit_length()
    return (place + (1 << turn % powers)) % places if powers else place


def pairs(places: int, seed: int, turn: int) -> tuple[Edge, ...]:
    """Random pairs for a round: of an odd number one is left out, another each time until all have been."""
    order = _drawn(places, seed, "pairs", turn)
    if places % 2:
        # By turns, in an order that is drawn once: nobody stays out twice before all have.
        order.remove(_drawn(places, seed, "out")[turn % places])
    return tuple(sorted((min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=True)))


# What all this is made of.


def _edges(text: str) -> Iterator[Edge]:
    seen: set[Edge] = set()
    for word in text.split("/"):
        if re.fullmatch("[0-9]+>[0-9]+", word):
            raise UsageError(
                f"unbalanced topology: {word} goes one way, and a mean stays in place only if both mix; "
                f"write {word.replace('>', '-')}"
            )
        if not re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", word):
            raise UsageError(
                f"topology: {word!r} is no edge between two workers; write edges as in 0-1/1-2/2-0"
            )
        low, high = sorted(int(end) for end in word.split("-"))
        if low == high:
            raise UsageError(f"topology: {word} makes worker {low} its own neighbour; leave it out")
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
    """Rows and columns, as many as possible of the fewer."""
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
        raise UsageError(f"topology {topology}: among {places} workers random:{places - 1} is the most")
    if degree == 1 and places > 2:
        raise UsageError(f"topology {topology}: pairs do not hold together; 2 neighbours or more would work")
    if places * degree % 2:
        raise UsageError(
            f"topology {topology}: {places} workers cannot have {degree} neighbours each, for both numbers "
            f"are odd; random:{degree - 1} or random:{degree + 1} would work"
        )
    return degree


def _possible(topology: Topology, places: int) -> Topology:
    """The topology itself, or what so many places get in its stead."""
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
    """A random graph in which each place has so many neighbours, and which holds together."""
    if degree == places - 1:
        return graph(Topology("complete", "complete"), places)
    if degree == 2:  # one of the few that hold together
        order = _drawn(places, seed, "ring")
        return _graph(places, pairwise([*order, order[0]]))
    # Few edges are quickly drawn; of many, those that are not there.
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
    """Each place has so many ends, and they are joined at random; what may not be is drawn again.

    None if what is left cannot be joined (Steger and Wormald 1999).
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
    """The numbers below `number` in random order: by hashes, which no version of any library changes."""

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


def _reached(neighbours: Graph) -> set[int]:
    reached, ahead = {0}, [0]
    while ahead:
        new = set(neighbours[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return reached


def _some(places: Sequence[int]) -> str:
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f"worker{'s' * (len(places) > 1)} {', '.join(map(str, places[:4]))}{more}"


def _times(grid: Edge) -> str:
    return f"{grid[0]}x{grid[1]}"
