"""The arithmetic of every reduction: in rank order, one rounding per operation.

Scaling and adding are separate operations on purpose. A fused multiply-add rounds once where these round
twice, and whether a kernel fuses depends on where a slice begins and ends; with two operations a sum taken
slice by slice has the same bits as one taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Walking in pieces that stay in a core's cache halves the trips to memory.
BLOCK = 1 << 16

_FOLD = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}
OPERATIONS = tuple(_FOLD)


def reduce(inputs: Sequence[Tensor], weights: Sequence[float], op: str, outputs: Sequence[Tensor]) -> None:
    """Reduces `inputs`, given in rank order, and writes the result to every one of `outputs`.

    `op` is sum, mean, max or min; the mean is sum(weight * input) / sum(weight). Inputs and outputs are flat
    and of one length; they may be the same tensors. A mean of one input is that input, bit for bit.
    """
    if op not in _FOLD:
        raise ValueError(f"op is {op!r}; it can be {', '.join(OPERATIONS)}")
    plain = op != "mean" or all(weight == weights[0] for weight in weights)
    divisor = len(inputs) if plain else sum(weights)
    for start in range(0, inputs[0].numel(), BLOCK):
        block = [each[start : start + BLOCK] for each in inputs]
        if not plain:
            block = [piece * weight for piece, weight in zip(block, weights, strict=True) if weight]
        result = block[0]
        for piece in block[1:]:
            result = getattr(result, _FOLD[op])(piece)
        if op == "mean" and divisor != 1:
            result = result / divisor
        for output in outputs:
            output[start : start + BLOCK].copy_(result)


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Near-equal consecutive ranges of `count` elements, the longer ones first."""
    base, extra = divmod(count, parts)
    ends = [base * (part + 1) + min(part + 1, extra) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def cut(vectors: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, ...]:
    """Elements `start` to `stop` of several flat vectors laid end to end, as views; empty ones are kept."""
    pieces, offset = [], 0
    for vector in vectors:
        low, high = start - offset, stop - offset
        pieces.append(vector[max(0, low) : max(0, high)])
        offset += vector.numel()
    return tuple(pieces)
