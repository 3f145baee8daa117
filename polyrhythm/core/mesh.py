"""Mesh: the named axes along which workers cooperate.

Every worker has a coordinate on each axis. The workers that differ on one axis only form a group on it. Under
`allreduce / diloco:50` gradients are averaged in the groups on the axis `data`, one for each site, and DiLoCo
runs in the groups on the axis `site`. Under `ssp:3@pipeline:2` the workers of a group on the axis `stage`
hold one model together, and those of a group on the axis `data` hold the same stage of different copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Axis = Literal["site", "data", "stage", "tensor", "branch"]


@dataclass(frozen=True)
class Mesh:
    """The place of every worker on every axis."""

    axes: tuple[Axis, ...]
    coordinates: tuple[tuple[int, ...], ...]  # by rank; one number for each axis

    @staticmethod
    def of_sites(sites: Sequence[Sequence[int]], model: Mapping[Axis, int] | None = None) -> Mesh:
        """The mesh of the workers whose ranks are listed by site. Sites may differ in size.

        `model`: the sizes of the axes along which each model is divided. The workers of a model have
        consecutive ranks; the last axis varies fastest.
        """
        model = model or {}
        places = list(product(*map(range, model.values())))
        coordinates: dict[int, tuple[int, ...]] = {}
        for number, ranks in enumerate(sites):
            for index, rank in enumerate(sorted(ranks)):
                copy, place = divmod(index, len(places))
                coordinates[rank] = (number, copy, *places[place])
        return Mesh(("site", "data", *model), tuple(coordinates[rank] for rank in range(len(coordinates))))

    def ranks(self, rank: int, *axes: Axis) -> list[int]:
        """The ranks that differ from this one on these axes only, in order, itself included."""
        fixed = [number for number, axis in enumerate(self.axes) if axis not in axes]
        mine = self.coordinates[rank]
        return [
            other
            for other, theirs in enumerate(self.coordinates)
            if all(theirs[number] == mine[number] for number in fixed)
        ]
