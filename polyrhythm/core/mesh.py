"""Mesh: the named axes along which workers cooperate.

Every worker has a coordinate on each axis. The workers that differ on one axis only form a group on it. Under
`allreduce / diloco:50` gradients are averaged in the groups on the axis `data`, one for each site, and DiLoCo
runs in the groups on the axis `site`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["site", "data"]


@dataclass(frozen=True)
class Mesh:
    """The place of every worker on every axis."""

    axes: tuple[Axis, ...]
    coordinates: tuple[tuple[int, ...], ...]  # by rank; one number for each axis

    @staticmethod
    def of_sites(sites: Sequence[Sequence[int]]) -> Mesh:
        """The mesh of the workers whose ranks are listed by site. Sites may differ in size."""
        place = {
            rank: (number, index) for number, ranks in enumerate(sites) for index, rank in enumerate(ranks)
        }
        return Mesh(("site", "data"), tuple(place[rank] for rank in range(len(place))))

    def ranks(self, rank: int, *axes: Axis) -> list[int]:
        """The ranks that differ from this one on these axes only, in order, itself included."""
        fixed = [number for number, axis in enumerate(self.axes) if axis not in axes]
        mine = self.coordinates[rank]
        return [
            other
            for other, theirs in enumerate(self.coordinates)
            if all(theirs[number] == mine[number] for number in fixed)
        ]
