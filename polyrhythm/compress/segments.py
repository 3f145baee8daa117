"""Segments: flat vectors cut into the pieces that a codec sees one at a time.

The segments follow from the codec, the layout of the model and the range of it that is sent, so both ends
compute the same ones. A layer that travels `dense` is a segment without a code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.codec import Codec
    from polyrhythm.model.layout import Layout, Piece


class Segment(NamedTuple):
    """Elements `low` to `high` of one of the vectors that are sent."""

    part: int  # which of the vectors
    low: int
    high: int
    shapes: tuple[tuple[int, ...], ...]  # of the tensors in it; one that is cut is flat
    coded: bool  # False: travels as it is

    def of(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[self.part][self.low : self.high]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that numbers of this dtype are encoded as: at least 32 bits."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def segments_of(codec: Codec, layout: Layout, start: int, stop: int) -> Iterator[Segment]:
    """The segments of a range of the layout. With `per=layer` each tensor is one of its own."""
    dense = [word for word in codec.dense.split("/") if word]
    _check_layers(codec, layout, dense)
    offsets = [0] * len(layout.counts)
    current: Segment | None = None
    for _, piece, low, high in layout.groups(start, stop):
        begin = offsets[piece.part]
        end = offsets[piece.part] = begin + high - low
        shape = tuple(piece.shape) if high - low == piece.shape.numel() else (high - low,)
        coded = not any(_is_in(piece, word) for word in dense)
        new = Segment(piece.part, begin, end, (shape,), coded)
        joins = codec.per == "vector" or not coded
        if current and joins and (current.part, current.high, current.coded) == (new.part, begin, coded):
            current = current._replace(high=end, shapes=(*current.shapes, shape))
            continue
        if current:
            yield current
        current = new
    if current:
        yield current


def _check_layers(codec: Codec, layout: Layout, dense: Iterable[str]) -> None:
    """Raises UsageError if the model lacks a layer that is to travel as it is."""
    for word in dense:
        if word != "1d" and not any_within((piece.name for piece in layout.pieces), word):
            layers = (piece.name.rpartition(".")[0] or piece.name for piece in layout.pieces)
            known = ", ".join(dict.fromkeys(layers))
            raise UsageError(
                f"{codec}: the model has no layer {word!r} to leave uncompressed; it has: {known}"
            )


def any_within(names: Iterable[str], layer: str) -> bool:
    """True if one of these parameters is that layer or inside it."""
    return any(name == layer or name.startswith(f"{layer}.") for name in names)


def _is_in(piece: Piece, word: str) -> bool:
    return len(piece.shape) <= 1 if word == "1d" else any_within([piece.name], word)
