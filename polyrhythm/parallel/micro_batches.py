"""Micro-batches: a batch cut into pieces, and outputs and gradients put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError

Values = dict[str, Any]  # by name: tensors, and plain numbers such as sizes


class MicroBatchOf(NamedTuple):
    """A part of a batch."""

    rows: int
    values: Values


def micro_batches(inputs: Values, batched: Sequence[str], most: int) -> list[MicroBatchOf]:
    """A batch cut along the first dimension of the inputs that have a row for each example."""
    count = len(inputs[batched[0]]) if batched else 1
    pieces = max(1, min(most, count))
    cut = {name: inputs[name].detach().tensor_split(pieces) for name in batched}
    sizes = [len(each) for each in cut[batched[0]]] if batched else [1]
    return [
        MicroBatchOf(sizes[number], {**inputs, **{name: each[number] for name, each in cut.items()}})
        for number in range(pieces)
    ]


def joined_output(pieces: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output of the model from those of the micro-batches."""
    if len(pieces) == 1:
        return pieces[0]
    if all(
        isinstance(each, Tensor) and each.dim() and len(each) == rows
        for each, rows in zip(pieces, sizes, strict=True)
    ):
        return torch.cat(list(pieces))
    raise UsageError(
        "the model returns something else than a row for each example, which micro-batches cannot be joined "
        "to: compute a loss or a mean outside the model, or use pipeline:...,micro_batches=1"
    )


def cut_gradient(gradient: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(gradient, list(sizes)) if len(sizes) > 1 else [gradient]


def joined_gradient(pieces: Sequence[Tensor | None], parts: Sequence[Tensor], batched: bool) -> Tensor:
    """The gradient of an input from those of its parts, or of all of it in each micro-batch."""
    known = [
        torch.zeros_like(part) if each is None else each for each, part in zip(pieces, parts, strict=True)
    ]
    return torch.cat(known) if batched else torch.stack(known).sum(0)


def added(pieces: Sequence[Tensor]) -> Tensor:
    total = pieces[0]
    for each in pieces[1:]:
        total = total + each
    return total


class GradientSums:
    """Sums of gradients, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count
        self._own = [False] * count  # the sum is a tensor that nothing else uses

    def add(self, number: int, gradient: Tensor | None) -> None:
        total = self.sums[number]
        if gradient is None:
            return
        if total is None:
            self.sums[number] = gradient  # autograd may return one tensor for two parameters
        elif self._own[number]:
            total.add_(gradient)
        else:
            self.sums[number], self._own[number] = total + gradient, True

    def add_product(self, number: int, one: Tensor, other: Tensor) -> None:
        """Adds the product of two matrices, where possible without a matrix of its own."""
        total = self.sums[number]
        if total is None:
            self.sums[number] = one @ other
        elif self._own[number]:
            total.addmm_(one, other)
        else:
            self.sums[number] = torch.addmm(total, one, other)
        self._own[number] = True

    def take(self, number: int) -> Tensor | None:
        """Returns a sum, which is gone then."""
        total, self.sums[number] = self.sums[number], None
        return total
