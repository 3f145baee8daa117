"""Parametrize a test by several axes, and run few of the combinations in the quick suite.

A fault mostly shows for one value of one axis, or for two values together. So the quick suite has every value
of every axis at least once, and the slow suite every pair of values; with three axes or more that is far less
than the cross product:

    @each_value(("codec", CODECS), ("strategy", ["allreduce", "sync"]), ("size, batch", [(8, 2), (9, 4)]))
    def test_something(codec: str, strategy: str, size: int, batch: int) -> None: ...

`where` leaves out what cannot apply. `few` has one axis, of which the quick suite has the first few values.
A test with several `pytest.mark.parametrize` is treated in the same way, but the slow suite has all of them.
The conformance suite and the golden digests are not: there every combination may fail by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Axis = tuple[str, Iterable[Any]]  # the name of a parameter, or of several with commas; and its values


def each_value(
    *axes: Axis, where: Callable[..., bool] = lambda **values: True, most: int | None = None
) -> pytest.MarkDecorator:
    """Every value of every axis at least once, and slowly every pair of values of two axes.

    A value may be a `pytest.param` with an id. `where` gets the parameters by name. `most` limits
    how many combinations are quick.
    """
    names = _names(axes)
    rows = [_Row(axes, places) for places in product(*(enumerate(values) for _, values in axes))]
    every = {place for row in rows for place in enumerate(row.index)}
    rows = [row for row in rows if where(**dict(zip(names, row.values, strict=True)))]
    if lost := every - {place for row in rows for place in enumerate(row.index)}:
        raise ValueError(f"`where` refuses every combination of {', '.join(axes[a][0] for a, _ in lost)}")
    quick = _cover([row.index for row in rows], 1)
    chosen = _cover([row.index for row in rows], min(2, len(axes)), quick)
    first = sorted(quick)[:most]
    return _parametrize(names, [(row, row.index in first) for row in rows if row.index in chosen])


def few(names: str, values: Iterable[Any], quick: int) -> pytest.MarkDecorator:
    """Parametrizes a test that takes long: the first few values are quick, and the rest is marked slow."""
    axis = (names, values)
    rows = [_Row([axis], [place]) for place in enumerate(values)]
    return _parametrize(_names([axis]), [(row, row.index[0] < quick) for row in rows])


WHOLE = ("test_conformance.py", "test_golden.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks combinations of stacked parametrizations slow if the others have all of their values."""
    products: dict[str, list[tuple[pytest.Item, list[str]]]] = {}
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec and item.path.name not in WHOLE and not item.get_closest_marker("slow"):
            # One id per parametrization; `callspec.indices` numbers the combinations instead.
            products.setdefault(item.nodeid.partition("[")[0], []).append((item, list(spec._idlist)))
    for product_ in products.values():
        axes = [list(dict.fromkeys(words)) for words in zip(*(words for _, words in product_), strict=True)]
        index = {
            item: tuple(axis.index(word) for axis, word in zip(axes, words, strict=True))
            for item, words in product_
        }
        quick = _cover(list(index.values()), 1)
        for item, place in index.items():
            if place not in quick:
                item.add_marker(pytest.mark.slow)


class _Row:
    """One combination: the index of its value on each axis, the values, and an id."""

    def __init__(self, axes: Iterable[Axis], places: Iterable[tuple[int, Any]]) -> None:
        self.index = tuple(place for place, _ in places)
        self.values: list[Any] = []
        words = []
        for (names, _), (place, value) in zip(axes, places, strict=True):
            several = "," in names
            if isinstance(value, type(pytest.param())):
                assert not value.marks, "marks of a value are not supported"
                self.values += value.values
                words.append(value.id or names)
            else:
                self.values += value if several else [value]
                words += [_word(each, f"{names}{place}") for each in (value if several else [value])]
        self.id = "-".join(words)


def _names(axes: Iterable[Axis]) -> list[str]:
    return [name.strip() for names, _ in axes for name in names.split(",")]


def _parametrize(names: list[str], rows: Iterable[tuple[_Row, bool]]) -> pytest.MarkDecorator:
    """With these combinations, of which those that are not quick are marked slow."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        names, [pytest.param(*row.values, id=row.id, marks=() if quick else slow) for row, quick in rows]
    )


def _word(value: Any, default: str) -> str:
    """The part of an id: the value itself, or the name of a class or function."""
    if isinstance(value, str | int | float | None):
        return str(value)
    name = getattr(value, "__name__", default)
    return default if name == "<lambda>" else str(name)


def _cover(
    rows: list[tuple[int, ...]], together: int, begin: Iterable[tuple[int, ...]] = ()
) -> set[tuple[int, ...]]:
    """Combinations in which every value occurs (`together` is 1), or every pair of values that a row has (2).

    Always the one that has most of those that did not occur yet. Ties go to the one whose values were taken
    least, so that no value always meets the same one.
    """
    has = {row: set(combinations(enumerate(row), together)) for row in rows}
    wanted = set().union(*has.values())
    taken = Counter[tuple[int, int]]()
    chosen: set[tuple[int, ...]] = set()

    def take(row: tuple[int, ...]) -> None:
        wanted.difference_update(has[row])
        taken.update(enumerate(row))
        chosen.add(row)

    for row in sorted(begin):
        take(row)
    while wanted:
        take(max(rows, key=lambda row: (len(wanted & has[row]), -sum(taken[p] for p in enumerate(row)))))
    return chosen
