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
    import torch  # here, for strategies are listed without it

    fold = getattr(torch, _FOLD[op])
    # Where the first input is also an output it is the place to add up in, and one copy less.
    own = len(inputs) > 1 and outputs[0].data_ptr() == inputs[0].data_ptr()
    rest = outputs[1:] if own else outputs
    for start in range(0, inputs[0].numel(), BLOCK):
        block = [each[start : start + BLOCK] for each in inputs]
        result = block[0]
        if len(block) > 1:
            result = fold(block[0], block[1], out=block[0]) if own else fold(block[0], block[1])
        for piece in block[2:]:
            fold(result, piece, out=result)
        if op == "mean" and len(inputs) > 1:
            result.div_(len(inputs))
        for output in rest:
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


def sent(count: int, parts: int, index: int) -> int:
    """How many of `count` elements one of so many workers sends in all to reduce them, slice by slice: its
    part of the others' slices, and its own reduced to each of them."""
    low, high = split(count, parts)[index]
    return count - (high - low) + (parts - 1) * (high - low)
