"""Attachment: keeps the tensors of a model in the flat vectors.

`p.data = ...`, `vector_to_parameters` and `model.to(dtype)` give a parameter other memory. From
then on the script and its optimizer would use one tensor, and the strategy another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.model.layout import Layout


class Attachment:
    """Knows where in the flat vectors each parameter lies, and notices if one has been replaced."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._places: list[Tensor] = []
        self._addresses: list[int] = []

    def attach(self, vectors: Sequence[Tensor]) -> None:
        """Makes each parameter a part of these vectors, with the values that they have."""
        layout = self._layout
        self._places = [layout.tensor(vectors, piece) for piece in layout.pieces]
        for parameter, place in zip(layout.parameters, self._places, strict=True):
            parameter.data = place
        self._addresses = [place.data_ptr() for place in self._places]

    @property
    def intact(self) -> bool:
        """True if no parameter has been replaced."""
        return list(map(Tensor.data_ptr, self._layout.parameters)) == self._addresses

    def restore(self, settable: bool = True) -> None:
        """Copies replaced parameters into the flat vectors and attaches them again.

        UsageError if one has another shape, dtype or device now, or if it has other values and the script may
        not set them (`settable`).
        """
        layout = self._layout
        for parameter, place, piece in zip(layout.parameters, self._places, layout.pieces, strict=True):
            data = parameter.data
            if data.data_ptr() == place.data_ptr():
                continue
            if (data.shape, data.dtype, data.device) != (place.shape, place.dtype, place.device):
                raise UsageError(
                    f"{piece.name} was {_kind(place)} at session.prepare() and is {_kind(data)} now: convert "
                    "the model before prepare()"
                )
            if not settable and not torch.equal(data, place):
                remedy = "set parameters before prepare()"
                if not parameter.requires_grad:
                    remedy = "leave parameters that the script computes itself out of the optimizer"
                raise UsageError(
                    f"{piece.name} was given other values after session.prepare(), and the next step would "
                    f"overwrite them: {remedy}"
                )
            place.copy_(data)
            parameter.data = place


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
