"""A little linear algebra that gives the same bits on every machine.

All workers must compute the same from the same numbers, or replicas differ by a bit here and there. A matrix
product may round differently on another machine, with other threads, or at another address. So this module
uses only elementwise operations, each of which rounds once, and sums in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows with the same span: Gram-Schmidt, twice, in 64 bits.

    A row becomes zero if its part orthogonal to those before it may be rounding error.
    """
    import torch

    c = rows.double()
    largest = c.abs().amax(1, keepdim=True)
    c = torch.where(largest > 0, c / largest, 0.0)  # so that squares neither underflow nor overflow
    for _ in range(2):
        gram = _sum(c[:, None] * c[None]).tolist()
        c = torch.stack([_combined(factors, c) for factors in _triangle(gram)])
    return c.to(rows.dtype)


def _triangle(gram: list[list[float]]) -> list[list[float]]:
    """The lower triangular W with W gram W^T = 1, except for rows of zeros."""
    rows: list[list[float]] = []
    for j in range(len(gram)):
        row, left = [0.0] * j + [1.0], gram[j][j]
        for other in rows:
            along = 0.0
            for k, x in enumerate(other):  # not `sum`, which rounds differently in some versions of Python
                along += x * gram[k][j]
            left -= along * along
            for k, x in enumerate(other):
                row[k] -= along * x
        kept = left > 1e-14 * gram[j][j]
        rows.append([x / math.sqrt(left) if kept else 0.0 for x in row])
    return rows


def _combined(factors: Sequence[float], rows: Tensor) -> Tensor:
    total = rows[0] * factors[0]
    for factor, row in zip(factors[1:], rows[1:], strict=False):
        total += row * factor
    return total


def _sum(terms: Tensor) -> Tensor:
    """The sum over the last dimension, by adding halves."""
    while (count := terms.shape[-1]) > 1:
        half = count // 2
        total = terms[..., :half] + terms[..., half : 2 * half]
        if count % 2:
            total[..., 0] += terms[..., -1]
        terms = total
    return terms[..., 0]


def add_product(p: Tensor, q: Tensor, into: Tensor) -> None:
    """into += P^T Q, for P and Q stored by rows; in blocks, to limit the memory for products."""
    rows = max(1, (1 << 18) // into.shape[1])
    for start in range(0, into.shape[0], rows):
        block = into[start : start + rows]
        for column, row in zip(p[:, start : start + rows], q, strict=True):
            block += column[:, None] * row
