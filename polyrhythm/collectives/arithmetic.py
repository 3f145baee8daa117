"""The arithmetic of reductions: in rank order, one rounding per operation.

So reducing slice by slice, on any worker, gives the same bits as reducing the whole vector. (A ring adds in
another order.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError
from polyrhythm.model.vectors import BLOCK, split

if TYPE_CHECKING:
    from torch import Tensor

_FOLD = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "product": "mul"}
OPERATIONS = tuple(_FOLD)


def reduce(inputs: Sequence[Tensor], op: str, outputs: Sequence[Tensor]) -> None:
    """Reduces `inputs`, given in rank order, and writes the result to every one of `outputs`.

    `op` is sum, mean, max, min or product. Inputs and outputs are flat and of one length; they may be the
    same tensors. A mean of one input is that input, bit for bit.
    """
    if op not in _FOLD:
        raise ValueError(f"op is {op!r}; it can be {', '.join(OPERATIONS)}")
    import torch  # here, because strategies are listed without torch

    if op == "mean" and len(inputs) > 1 and inputs[0].dtype in (torch.float16, torch.bfloat16):
        return _mean_of_16_bit(inputs, outputs)
    fold = getattr(torch, _FOLD[op])
    # If the first input is also the first output, accumulate there: one copy less.
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


def _mean_of_16_bit(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """The mean of 16-bit floats, whose sum would overflow early: accumulated in 32 bits, rounded once."""
    for start in range(0, inputs[0].numel(), BLOCK):
        total = inputs[0][start : start + BLOCK].float()
        for each in inputs[1:]:
            total.add_(each[start : start + BLOCK])
        total.div_(len(inputs))
        for output in outputs:
            output[start : start + BLOCK].copy_(total)


def flat_views(tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    """Flat views of the tensors; raises UsageError if they cannot be reduced in place."""
    if op not in OPERATIONS:
        raise UsageError(f"op is {op!r}; it can be {', '.join(OPERATIONS)}")
    for tensor in tensors:
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UsageError(f"the mean of {tensor.dtype} is not {tensor.dtype}: use the sum, or floats")
        if not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise UsageError(f"a tensor of shape {shape} is reduced in place, so it must be contiguous")
    return [tensor.detach().view(-1) for tensor in tensors]


def elements_sent(count: int, parts: int, index: int) -> int:
    """The elements that worker `index` of `parts` sends to all-reduce `count` elements slice by slice.

    These are its part of each other worker's slice, and its own reduced slice to each of them.
    """
    low, high = split(count, parts)[index]
    return count - (high - low) + (parts - 1) * (high - low)


def elements_sent_to(count: int, parts: int, index: int, to: Collection[int]) -> int:
    """How many of these elements go to the workers `to`."""
    slices = [high - low for low, high in split(count, parts)]
    return len(to) * slices[index] + sum(slices[other] for other in to)
