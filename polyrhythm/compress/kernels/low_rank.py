"""A segment as matrices, each approximated by the product of two thin ones: M ~ P Q^T.

P and Q are stored with their columns as rows, which makes products with them several times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.compress.kernels.algebra import add_product, orthonormal

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass
class WarmStart:
    """What a segment keeps from one step to the next: the last Q of all its matrices, laid end to end."""

    q: Tensor | None = None


class MatrixPlace(NamedTuple):
    """Where in a segment a matrix is."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, segment: Tensor) -> Tensor:
        return segment[self.start : self.stop].view(self.rows, self.columns)


class Matrices:
    """The matrices of a segment, each with the Q to start from, and the rests between them."""

    def __init__(self, values: Tensor, state: CodecState, rank: int, warm: bool) -> None:
        self.places = places(state.shapes, rank)
        self.matrices = [place.of(values) for place in self.places]
        self.rests = rests(values, self.places)
        self._state, self._warm = state, warm
        self._starts = self._start(rank)

    def _start(self, rank: int) -> list[Tensor]:
        """The Q of each matrix to start from: the last one, or one that is drawn equally on all workers.

        Orthonormal: a Q as long as a gradient would make P as long as its square, beyond the range of floats.
        A column of zeros would stay zero for ever, so it is drawn again.
        """
        import torch

        sizes = [matrix.shape[1] * rank for matrix in self.matrices]
        kept = self._state.own(WarmStart).q if self._warm else None
        if kept is None or kept.numel() != sum(sizes):
            kept = torch.zeros(sum(sizes))
        generator = torch.Generator().manual_seed(self._state.shared_stream())
        starts = []
        for matrix, part in zip(self.matrices, split(kept, sizes), strict=True):
            q = part.view(rank, -1).to(matrix)
            dead = (q == 0).all(1, keepdim=True)
            if bool(dead.any()):
                drawn = torch.empty(q.shape, dtype=torch.float64).normal_(generator=generator)
                q = torch.where(dead, drawn.to(matrix), q)
            starts.append(orthonormal(q))
        return starts

    def times_q(self) -> list[Tensor]:
        return [q @ matrix.T for matrix, q in zip(self.matrices, self._starts, strict=True)]

    def transposed_times(self, ps: Sequence[Tensor]) -> list[Tensor]:
        return [p @ matrix for matrix, p in zip(self.matrices, ps, strict=True)]

    def keep(self, qs: Sequence[Tensor]) -> None:
        """Keeps these Q for a warm start of the next step."""
        import torch

        if qs and self._warm:
            self._state.own(WarmStart).q = torch.cat([q.reshape(-1) for q in qs])

    def subtract(self, ps: Sequence[Tensor], qs: Sequence[Tensor]) -> None:
        """Subtracts the products from the matrices, and clears the rests, which are sent in full."""
        for matrix, p, q in zip(self.matrices, ps, qs, strict=True):
            matrix.addmm_(p.T, q, alpha=-1.0)
        for rest in self.rests:
            rest.zero_()


def places(shapes: Sequence[tuple[int, ...]], rank: int) -> list[MatrixPlace]:
    """The matrices in a segment of tensors of these shapes, except those that P and Q would not shorten.

    >>> places([(8, 2, 3), (5,), (70,)], rank=1)
    [MatrixPlace(start=0, rows=8, columns=6), MatrixPlace(start=53, rows=8, columns=8)]
    """
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else math.isqrt(size)
        columns = size // max(rows, 1)
        if rank * (rows + columns) < rows * columns:
            found.append(MatrixPlace(start, rows, columns))
        start += size
    return found


def rests(segment: Tensor, matrices: Sequence[MatrixPlace]) -> list[Tensor]:
    """The parts of a segment before, between and after its matrices."""
    starts = [0, *(place.stop for place in matrices)]
    stops = [*(place.start for place in matrices), segment.numel()]
    return [segment[start:stop] for start, stop in zip(starts, stops, strict=True)]


def split(vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive views of a vector of these sizes."""
    stops = list(accumulate(sizes))
    return [vector[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]


def add_products(
    matrices: Sequence[MatrixPlace],
    ps: Sequence[Tensor],
    qs: Sequence[Tensor],
    dense: Sequence[Tensor],
    into: Tensor,
    scale: float = 1.0,
) -> None:
    """Adds scale * P Q^T to each matrix of a segment, and scale times `dense` to the rests between them."""
    for place, p, q in zip(matrices, ps, qs, strict=True):
        add_product(p * scale, q, place.of(into))
    for part, rest in zip(rests(into, matrices), dense, strict=True):
        part.add_(rest, alpha=scale)
