"""Buckets: the gradient in the parts in which it is exchanged while `backward()` runs.

A bucket is complete when all its gradients are; then its exchange can begin. The first is small, so that the
first exchange begins early, and so is the last, so that little is left when backward is over. The order is
that in which gradients became ready in the first backward pass, the same on all workers, for they must begin
the same exchanges in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.model.layout import Layout

FIRST, LATER = 1 << 20, 8 << 20  # bytes


@dataclass
class Bucket:
    """Some parameters of a model, by index, and where their gradients lie."""

    indexes: list[int]
    gradient: tuple[Tensor, ...]
    share: float  # of all elements
    missing: set[int] = field(default_factory=set)  # gradients that this backward pass has not reached yet


def parcel(sizes: Sequence[int], first: int, later: int) -> list[list[int]]:
    """Packs items of these sizes, in this order, into buckets of a capacity; each item in exactly one.

    An item larger than a bucket gets its own. The last has no more than the first may have, if that is
    to be had by cutting it in two.

    >>> parcel([4, 4, 2], 6, 6)
    [[0], [1, 2]]
    >>> parcel([1, 7, 1, 1], 2, 9)
    [[0], [1], [2, 3]]
    """
    buckets: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not buckets or size > room:
            room = later if buckets else first
            buckets.append([])
        buckets[-1].append(index)
        room -= size
    if buckets and sum(sizes[index] for index in buckets[-1]) > first:
        *most, last = buckets
        left = list(itertools.accumulate(sizes[index] for index in reversed(last)))
        tail = sum(size <= first for size in left)
        if tail:
            return [*most, last[:-tail], last[-tail:]]
    return buckets


def arrange(layout: Layout, gradient: Sequence[Tensor], order: Sequence[int]) -> list[Bucket]:
    """The buckets of a gradient whose parameters become ready in this order."""
    sizes = [layout.pieces[index].shape.numel() * layout.parameters[index].element_size() for index in order]
    buckets = []
    for places in parcel(sizes, FIRST, LATER):
        indexes = [order[place] for place in places]
        ranges: list[list[int]] = []  # part, start, stop of adjacent parameters
        for piece in sorted((layout.pieces[index] for index in indexes), key=lambda p: (p.part, p.start)):
            if ranges and ranges[-1][0] == piece.part and ranges[-1][2] == piece.start:
                ranges[-1][2] = piece.stop
            else:
                ranges.append([piece.part, piece.start, piece.stop])
        views = tuple(gradient[part][start:stop] for part, start, stop in ranges)
        buckets.append(Bucket(indexes, views, sum(view.numel() for view in views) / layout.total))
    return buckets
