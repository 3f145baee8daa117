"""The mesh: which workers form a group on which axes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.core.mesh import Mesh
from polyrhythm.core.plan import Plan


@st.composite
def sites(draw: st.DrawFn) -> list[list[int]]:
    """Ranks dealt to sites of any size, in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return [sorted(next(ranks) for _ in range(size)) for size in sizes]


@given(sites())
def test_groups_on_the_data_axis_are_the_sites(places: list[list[int]]) -> None:
    mesh = Mesh.of_sites(places)
    for site in places:
        for rank in site:
            assert mesh.ranks(rank, "data") == site


@given(sites())
def test_groups_on_the_site_axis_hold_at_most_one_worker_of_a_site(places: list[list[int]]) -> None:
    mesh = Mesh.of_sites(places)
    for site in places:
        for index, rank in enumerate(site):
            expected = sorted(other[index] for other in places if index < len(other))
            assert mesh.ranks(rank, "site") == expected


@given(sites())
def test_the_groups_on_any_axes_divide_the_workers(places: list[list[int]]) -> None:
    mesh = Mesh.of_sites(places)
    everyone = list(range(len(mesh.coordinates)))
    for axes in ((), ("site",), ("data",), ("site", "data")):
        groups = {tuple(mesh.ranks(rank, *axes)) for rank in everyone}
        assert sorted(rank for group in groups for rank in group) == everyone
    assert mesh.ranks(0, "site", "data") == everyone


def test_without_sites_all_workers_are_at_one() -> None:
    assert Plan(workers=3).mesh.ranks(1, "data") == [0, 1, 2]
    assert Plan(workers=3).mesh.ranks(1, "site") == [1]
