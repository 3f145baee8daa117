"""The arithmetic of reductions: in rank order, one rounding per operation.

So a sum taken slice by slice, by whichever worker, has the same bits as one taken whole. (A ring has an order
of its own.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import BLOCK, split

if TYPE_CHECKING:
    from torch import Tensor

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

    if op == "mean" and len(inputs) > 1 and inputs[0].dtype in (torch.float16, torch.bfloat16):
        return _mean_of_short(inputs, outputs)
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


def _mean_of_short(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """The mean of short floats, whose sum would overflow sooner: added up in 32 bits, rounded once."""
    for start in range(0, inputs[0].numel(), BLOCK):
        total = inputs[0][start : start + BLOCK].float()
        for each in inputs[1:]:
            total.add_(each[start : start + BLOCK])
        total.div_(len(inputs))
        for output in outputs:
            output[start : start + BLOCK].copy_(total)


def checked(tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """The tensors as flat vectors, if they can be reduced in place; otherwise UsageError."""
    if op not in OPERATIONS:
        raise UsageError(f"op is {op!r}; it can be {', '.join(OPERATIONS)}")
    for tensor in tensors:
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UsageError(f"the mean of {tensor.dtype} is no {tensor.dtype}: take the sum, or floats")
        if not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise UsageError(f"a tensor of shape {shape} is reduced in place: it must be contiguous")
    return [tensor.detach().view(-1) for tensor in tensors]


def sent(count: int, parts: int, index: int) -> int:
    """How many of `count` elements one of so many workers sends in all to reduce them, slice by slice: its
    part of the others' slices, and its own reduced to each of them."""
    low, high = split(count, parts)[index]
    return count - (high - low) + (parts - 1) * (high - low)


def sent_to(count: int, parts: int, index: int, to: Collection[int]) -> int:
    """How many of these elements go to those of the others: to each the own slice, and its part of theirs."""
    slices = [high - low for low, high in split(count, parts)]
    return len(to) * slices[index] + sum(slices[other] for other in to)
