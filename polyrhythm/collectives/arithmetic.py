"""The arithmetic of every reduction: in rank order, one rounding per operation.

So a sum taken slice by slice, by whichever worker, has the same bits as one taken whole.
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


def reduce(inputs: Sequence[Tensor], op: str, outputs: Sequence[Tensor]) -> None:
    """Reduces `inputs`, given in rank order, and writes the result to every one of `outputs`.

    `op` is sum, mean, max or min. Inputs and outputs are flat and of one length; they may be the same
    tensors. A mean of one input is that input, bit for bit.
    """
    if op not in _FOLD:
        raise ValueError(f"op is {op!r}; it can be {', '.join(OPERATIONS)}")
    for start in range(0, inputs[0].numel(), BLOCK):
        block = [each[start : start + BLOCK] for each in inputs]
        result = block[0]
        for piece in block[1:]:
            result = getattr(result, _FOLD[op])(piece)
        if op == "mean" and len(inputs) > 1:
            result.div_(len(inputs))
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
