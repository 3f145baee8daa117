"""Graphs and mixing weights: mixing preserves the mean and brings all to it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyrhythm.core.errors import UsageError
from polyrhythm.core.plan import Plan
from polyrhythm.core.registry import parse
from polyrhythm.strategies.decentralized.gossip import Gossip
from polyrhythm.strategies.decentralized.mixing import check_weights, contraction, matrix, metropolis
from polyrhythm.strategies.decentralized.topology import (
    NAMED,
    Topology,
    connected,
    exponential_peer,
    graph,
    pairs,
    parse_topology,
    regraph,
)

ANY = [*NAMED, *(f"random:{degree}" for degree in range(1, 8))]
topologies = st.sampled_from(ANY).map(parse_topology)
sizes = st.integers(1, 40)
seeds = st.integers(0, 1000)
PATIENT = settings(deadline=None)


def degrees(found: tuple[tuple[int, ...], ...]) -> set[int]:
    return {len(near) for near in found}


def of(text: str, places: int, seed: int = 0) -> np.ndarray:
    return matrix(graph(parse_topology(text), places, seed))


@PATIENT
@given(topologies, sizes, seeds)
def test_every_topology_gives_a_connected_graph_with_symmetric_weights(
    topology: Topology, places: int, seed: int
) -> None:
    """Simple, undirected, connected; W is symmetric, its rows sum to 1, and each place counts itself."""
    try:
        found = graph(topology, places, seed)
    except UsageError:
        assert topology.kind in ("torus", "hypercube", "random") and places > 1
        return
    assert len(found) == places and connected(found)
    for place, near in enumerate(found):
        assert list(near) == sorted(set(near)) and place not in near
        assert all(place in found[other] for other in near)
    weights = matrix(found)
    check_weights(weights)
    assert weights.diagonal().min() >= 1 / (1 + max(degrees(found))) - 1e-15
    assert contraction(weights) < 1
    assert found == graph(topology, places, seed)


@PATIENT
@given(topologies, st.sets(st.integers(0, 60), min_size=1, max_size=30), seeds, st.integers(0, 9))
def test_any_set_of_survivors_has_a_connected_balanced_graph(
    topology: Topology, living: set[int], seed: int, turn: int
) -> None:
    """Any survivors have a connected graph; at each turn its weights are balanced."""
    found = regraph(topology, list(living), seed)
    ranks = sorted(living)
    assert list(found) == ranks
    places = tuple(tuple(ranks.index(rank) for rank in near) for near in found.values())
    check_weights(matrix(places))
    now = regraph(topology, list(living), seed, turn)
    check_weights(matrix(tuple(tuple(ranks.index(rank) for rank in near) for near in now.values())), False)
    assert all(set(now[rank]) <= set(found[rank]) for rank in ranks)


@PATIENT
@given(st.data(), st.integers(2, 12))
def test_edges_that_are_left_are_kept(data: st.DataObject, places: int) -> None:
    """An edge list keeps the edges between survivors, and gets a ring if these do not connect them."""
    every = [(low, high) for high in range(places) for low in range(high)]
    edges = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    living = sorted(data.draw(st.sets(st.integers(0, places - 1), min_size=1)))
    topology = parse_topology("/".join(f"{low}-{high}" for low, high in edges))
    found = regraph(topology, living)
    place = {rank: number for number, rank in enumerate(living)}
    assert connected(tuple(tuple(place[rank] for rank in near) for near in found.values()))
    kept = {edge for edge in edges if set(edge) <= set(living)}
    now = {(low, high) for low in found for high in found[low] if low < high}
    ring = {tuple(sorted((rank, living[(place[rank] + 1) % len(living)]))) for rank in living}
    assert kept <= now and now - kept <= ring


def test_regraph_of_all_workers_is_the_requested_graph() -> None:
    for text in ANY:
        try:
            asked = graph(parse_topology(text), 16, 3)
        except UsageError:
            continue
        assert tuple(regraph(parse_topology(text), range(16), 3).values()) == asked


@pytest.mark.parametrize("places", [3, 4, 5, 6, 7, 16, 33])
def test_a_ring_contracts_by_the_formula(places: int) -> None:
    values = [(1 + 2 * math.cos(2 * math.pi * k / places)) / 3 for k in range(1, places)]
    assert contraction(of("ring", places)) == pytest.approx(max(map(abs, values)), abs=1e-12)
    if places == 6:
        assert contraction(of("ring", places)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("places", [2, 3, 8, 17])
def test_a_complete_graph_contracts_at_once(places: int) -> None:
    assert contraction(of("complete", places)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("power", [1, 2, 3, 4, 6])
def test_a_hypercube_contracts_by_the_formula(power: int) -> None:
    assert contraction(of("hypercube", 1 << power)) == pytest.approx((power - 1) / (power + 1), abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 4), (4, 4), (3, 5), (5, 7)])
def test_a_torus_contracts_by_the_formula(rows: int, columns: int) -> None:
    """Its eigenvalues are those of two rings: (1 + 2 cos + 2 cos) / 5."""
    waves = [
        (1 + 2 * math.cos(2 * math.pi * a / rows) + 2 * math.cos(2 * math.pi * b / columns)) / 5
        for a in range(rows)
        for b in range(columns)
        if a or b
    ]
    assert contraction(of("torus", rows * columns)) == pytest.approx(max(map(abs, waves)), abs=1e-12)


@pytest.mark.parametrize("places", [5, 8, 12, 31, 32, 33])
def test_an_exponential_graph_contracts_by_the_formula(places: int) -> None:
    """It is a circulant: its eigenvalues are the Fourier sum of its first row."""
    weights = of("exponential-all", places)
    spectrum = np.abs(np.fft.fft(weights[0]))
    assert contraction(weights) == pytest.approx(np.sort(spectrum)[-2], abs=1e-12)
    assert 2 * math.log2(places) - 3 <= degrees(graph(parse_topology("exponential-all"), places)).pop()


@PATIENT
@given(st.integers(2, 40))
def test_exponential_topology_cycles_through_its_neighbors(places: int) -> None:
    """Each has two neighbors at most at a time, and over its turns those of the exponential-all graph."""
    topology = parse_topology("exponential")
    turns = [graph(topology, places, turn=turn) for turn in range(topology.turns(places))]
    union = tuple(tuple(sorted(set().union(*(each[place] for each in turns)))) for place in range(places))
    assert union == graph(topology, places) == graph(parse_topology("exponential-all"), places)
    assert all(degrees(each) <= {1, 2} for each in turns)
    assert graph(topology, places, turn=len(turns)) == turns[0]


def test_turns_of_exponential_contract_faster_than_a_ring() -> None:
    """With the same two messages per round: over a cycle of turns W is a product."""
    topology, places = parse_topology("exponential"), 64
    product = np.eye(places)
    for turn in range(topology.turns(places)):
        product = matrix(graph(topology, places, turn=turn)) @ product
    ring = contraction(of("ring", places)) ** topology.turns(places)
    assert np.linalg.norm(product - 1 / places, 2) < 0.5 < ring


def test_a_torus_is_as_square_as_can_be() -> None:
    assert graph(parse_topology("torus"), 12)[0] == (1, 3, 4, 8)  # 3 rows of 4
    assert degrees(graph(parse_topology("torus"), 25)) == {4}


@PATIENT
@given(st.integers(3, 30), st.integers(2, 29), seeds)
def test_a_random_graph_is_regular(places: int, degree: int, seed: int) -> None:
    assume(degree < places and places * degree % 2 == 0)
    topology = parse_topology(f"random:{degree}")
    assert degrees(graph(topology, places, seed)) == {degree}


def test_random_graphs_differ_by_seed() -> None:
    topology = parse_topology("random:3")
    assert len({graph(topology, 16, seed) for seed in range(20)}) == 20


@PATIENT
@given(st.integers(2, 33), seeds, st.integers(0, 200))
def test_pairs_are_perfect_matchings(places: int, seed: int, turn: int) -> None:
    """No place is in two pairs; of an odd number one is left out, and in as many rounds each once."""
    drawn = pairs(places, seed, turn)
    members = [place for pair in drawn for place in pair]
    assert len(members) == len(set(members)) == places - places % 2
    assert all(0 <= low < high < places for low, high in drawn)
    if places % 2:
        out: Counter[int] = Counter()
        for each in range(turn, turn + places):
            out.update(set(range(places)) - {place for pair in pairs(places, seed, each) for place in pair})
        assert out == dict.fromkeys(range(places), 1)


def test_all_pairs_are_drawn_equally_often() -> None:
    drawn = Counter(pair for turn in range(3000) for pair in pairs(6, 5, turn))
    assert len(drawn) == 15 and max(abs(times - 600) for times in drawn.values()) < 100


@PATIENT
@given(st.integers(1, 40), st.integers(0, 50))
def test_exponential_peers_are_a_permutation_of_the_workers(places: int, turn: int) -> None:
    peers = [exponential_peer(place, places, turn) for place in range(places)]
    assert sorted(peers) == list(range(places))
    assert places == 1 or all(peer != place for place, peer in enumerate(peers))


def test_pushes_reach_everybody_in_one_cycle() -> None:
    """After ceil(log2 N) rounds each has heard of all."""
    for places in (2, 3, 7, 8, 12, 16):
        knows = [{place} for place in range(places)]
        for turn in range((places - 1).bit_length()):
            new = [set(each) for each in knows]
            for place in range(places):
                new[exponential_peer(place, places, turn)] |= knows[place]
            knows = new
        assert all(len(each) == places for each in knows)


def test_weights_of_unequal_neighbors_are_equal_both_ways() -> None:
    """In a star the center gives each of 3 the weight 1/4, and each gives it to the center."""
    weights = of("0-1/0-2/0-3", 4)
    assert metropolis(graph(parse_topology("0-1/0-2/0-3"), 4))[0] == (0.25, 0.25, 0.25)
    assert weights[1].tolist() == [0.25, 0.75, 0, 0]


@pytest.mark.parametrize(
    ("text", "places", "said"),
    [
        ("rong", 4, "'rong' is unknown; did you mean ring. There are ring, torus"),
        ("Torus", 4, "'Torus' is unknown; did you mean torus"),
        ("star", 4, "'star' is unknown; there are ring, torus"),
        ("０-1", 2, "is unknown"),
        ("0-１", 2, "'0-１' is not an edge"),
        ("random:３", 4, "give the number of neighbors"),
        ("random:" + "9" * 5000, 4, "give the number of neighbors"),
        ("", 4, "is unknown"),
        ("ring:2", 4, "is unknown"),
        ("random", 4, "give the number of neighbors"),
        ("random:0", 4, "give the number of neighbors"),
        ("random:x", 4, "give the number of neighbors"),
        ("random:1", 4, "pairs are not connected"),
        ("random:4", 4, "with 4 workers the most is random:3"),
        ("random:3", 7, "both numbers are odd; random:2 or random:4 would work"),
        ("torus", 7, r"an odd grid, one row of 7; 6 \(2x3\) or 8 \(2x4\) would work"),
        ("torus", 2, r"an odd grid, one row of 2; 4 \(2x2\) would work"),
        ("hypercube", 6, "not a power of two; 4 or 8 would work"),
        ("0-1/2-2", 3, "makes worker 2 its own neighbor"),
        ("0-1/1-0", 2, "between 0 and 1 is named twice"),
        ("0-1/", 2, "is not an edge"),
        ("0-1/1_2", 3, "'1_2' is not an edge"),
        ("0>1/1>2/2>0", 3, "unbalanced topology: 0>1 goes one way"),
        ("0-1/1-5", 3, "names worker 5, and the 3 workers are 0 to 2"),
        ("0-1", 1, "there is one worker, 0"),
        ("0-1/2-3", 4, "disconnected topology: no path leads from worker 0 to workers 2, 3"),
        ("0-1/1-2", 4, "worker 3 has no neighbor"),
    ],
)
def test_invalid_topologies_are_refused(text: str, places: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        graph(parse_topology(text), places)


@PATIENT
@given(
    st.text("0123456789-/>:,. randomigtus²３", max_size=24)
    | st.from_regex(r"(random:)?[0-9]{1,3}([-/>:][0-9]{0,3}){0,12}", fullmatch=True)
    | st.sampled_from(ANY),
    st.integers(1, 12),
    seeds,
)
def test_any_topology_text_is_a_valid_graph_or_a_one_line_error(text: str, places: int, seed: int) -> None:
    try:
        topology = parse_topology(text)
        found = graph(topology, places, seed)
    except UsageError as error:
        assert "\n" not in str(error) and "topology" in str(error)
        return
    assert str(topology) == text and text.isascii()
    check_weights(matrix(found))
    if topology.kind == "edges":
        ends = {tuple(sorted(map(int, edge.split("-")))) for edge in text.split("/")}
        assert ends == {(low, high) for low, near in enumerate(found) for high in near if low < high}
    if topology.kind == "random" and places > 1:
        assert degrees(found) == {int(text.partition(":")[2])}
    # As the field of a strategy it is the same text.
    strategy = Gossip(topology=text)
    assert parse(str(strategy)) == strategy
    strategy.check(Plan(strategy, places))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0.5, 0.5], [0.4, 0.6]], r"not symmetric: W\[0,1\] = 0\.5, W\[1,0\] = 0\.4"),
        ([[0.5, 0.4], [0.4, 0.5]], "weights of worker 0 add up to 0.9"),
        ([[1.5, -0.5], [-0.5, 1.5]], "negative"),
        ([[math.nan, 1], [1, 0]], "not finite"),
        ([[1, 0], [0, 1]], "disconnected topology"),
        ([[1, 0, 0], [0, 1, 0]], "square"),
    ],
)
def test_unbalanced_weights_are_refused(rows: list[list[float]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_weights(np.array(rows, dtype=float))
