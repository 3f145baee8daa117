"""Flat vectors: ranges of them, copies, and walking through them in blocks.

A model's parameters are a few flat vectors, one per dtype and device. A range of the model is a range of
these vectors laid end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Vectors = Sequence[Tensor]

# Walking in blocks that stay in a core's cache halves the trips to memory.
BLOCK = 1 << 16


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Near-equal consecutive ranges of `count` elements, the longer ones first."""
    base, extra = divmod(count, parts)
    ends = [base * (part + 1) + min(part + 1, extra) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def cut(vectors: Vectors, start: int, stop: int) -> tuple[Tensor, ...]:
    """Elements `start` to `stop` of several flat vectors laid end to end, as views; empty ones are kept."""
    pieces, offset = [], 0
    for vector in vectors:
        low, high, count = start - offset, stop - offset, vector.numel()
        whole = low <= 0 and high >= count
        pieces.append(vector if whole else vector[max(0, low) : max(0, high)])
        offset += count
    return tuple(pieces)


def copied(source: Vectors, target: Vectors) -> Vectors:
    """Copies the source into the target and returns the target."""
    for place, part in zip(target, source, strict=True):
        place.copy_(part)
    return target


def cloned(vectors: Vectors) -> list[Tensor]:
    """New vectors with the same values."""
    return [part.clone() for part in vectors]


def difference(one: Vectors, other: Vectors, into: Vectors) -> Vectors:
    """Writes one - other into place and returns the place."""
    for left, right, place in zip(one, other, into, strict=True):
        place.copy_(left).sub_(right)
    return into


def blocks(*vectors: Vectors) -> Iterator[list[Tensor]]:
    """The same blocks of several vectors, short enough to stay in a core's cache."""
    for parts in zip(*vectors, strict=True):
        for start in range(0, parts[0].numel(), BLOCK):
            yield [part[start : start + BLOCK] for part in parts]
