"""ReducedMetrics: what the scripts of all workers have logged, as one value per name. Logic without I/O.

The value of a worker is its latest: in lockstep these are of the same step, and elsewhere no two workers are
at the same step anyway. A mean is weighted by the examples that a worker has trained on since it logged the
same name before: the examples that its value is about, if it is a loss of training. A worker that has died no
longer counts if another one has logged the name.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

from polyrhythm.coordination.membership import Incarnation
from polyrhythm.core.message import Scalar
from polyrhythm.core.requests import LogMetrics

Number = int | float


@dataclass(frozen=True)
class Logged:
    """The latest value of one worker."""

    value: Scalar
    weight: int  # examples since its value before
    samples: int  # examples in total


class ReducedMetrics:
    """The latest value of each worker, by name, and how they are reduced."""

    def __init__(self, dead: Collection[Incarnation] = ()) -> None:
        self._dead = dead
        self._values: dict[str, dict[Incarnation, Logged]] = {}
        self._reduce: dict[str, str] = {}

    def add(self, worker: Incarnation, request: LogMetrics) -> None:
        """A worker has logged values."""
        for name, value in request.values.items():
            values = self._values.setdefault(name, {})
            before = values[worker].samples if worker in values else 0
            values[worker] = Logged(value, request.samples - before, request.samples)
            self._reduce[name] = request.reduce

    def reduced(self) -> dict[str, Scalar]:
        """One value for each name, in the order in which the names were first logged."""
        return {name: _reduced(self._living(name), self._reduce[name]) for name in self._values}

    def _living(self, name: str) -> list[Logged]:
        """The values of the workers that have not died, or of all if all have, by rank."""
        values = sorted(self._values[name].items())
        return [each for worker, each in values if worker not in self._dead] or [each for _, each in values]


def _reduced(logged: list[Logged], reduce: str) -> Scalar:
    values, weights = [each.value for each in logged], [each.weight for each in logged]
    if reduce == "rank0" or not _numbers(values) or all(value == values[0] for value in values):
        return values[0]
    if any(math.isnan(value) for value in values):
        return math.nan
    if reduce == "min":
        return min(values)
    if reduce == "max":
        return max(values)
    if not any(weights):
        weights = [1] * len(values)
    pairs = zip(values, weights, strict=True)
    return round(sum(value * weight for value, weight in pairs if weight) / sum(weights), 6)


def _numbers(values: list[Scalar]) -> TypeGuard[list[Number]]:
    return all(isinstance(value, Number) and not isinstance(value, bool) for value in values)
