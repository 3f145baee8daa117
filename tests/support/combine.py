"""Which combinations of parameters a test runs, where the full cross product would prove no more.

A fault mostly shows for one value, or for two values together. `each` has every value of every axis at least
once, `pairs` every pair of values of two axes. Both are deterministic, and leave out what `where` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Where = Callable[..., bool]


def each(*axes: Sequence[Any], where: Where = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations in which every value of every axis occurs: about as many as the longest axis is long."""
    return _covering(axes, 1, where)


def pairs(*axes: Sequence[Any], where: Where = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations in which every two values of different axes meet: about the product of the longest two."""
    return _covering(axes, 2, where)


def _covering(axes: Sequence[Sequence[Any]], strength: int, where: Where) -> list[tuple[Any, ...]]:
    """Takes the combination that covers most of what is not covered yet, until nothing is left.

    Ties go to the combination whose values were used least, so that no value meets the same one every time.
    """
    left = [row for row in product(*(range(len(axis)) for axis in axes)) if where(*_values(axes, row))]
    wanted = {cell for row in left for cell in _cells(row, strength)}
    used: dict[tuple[int, int], int] = {}
    chosen = []
    while wanted:
        best = max(left, key=lambda row: (len(wanted & _cells(row, strength)), -_uses(row, used)))
        wanted -= _cells(best, strength)
        left.remove(best)
        for place in enumerate(best):
            used[place] = used.get(place, 0) + 1
        chosen.append(best)
    return [_values(axes, row) for row in sorted(chosen)]


def _values(axes: Sequence[Sequence[Any]], row: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis[index] for axis, index in zip(axes, row, strict=True))


def _cells(row: Sequence[int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """What a combination covers: each of its values, or each two of them, with their axes."""
    return set(combinations(enumerate(row), strength))


def _uses(row: Sequence[int], used: dict[tuple[int, int], int]) -> int:
    return sum(used.get(place, 0) for place in enumerate(row))
