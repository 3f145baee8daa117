"""ResultPart: where in the file with the final parameters some bytes belong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]


class ResultPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal pieces of a file of `size` bytes, `stride` bytes apart: the first begins at `start`.

    A whole tensor is one piece. Of a tensor that is divided along a dimension, a worker has several.
    """

    size: Natural
    start: Natural
    piece: Natural
    stride: Natural = 0

    def places(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """The beginning and end of each piece, if all have so many bytes; ValueError if they do not fit."""
        count = nbytes // self.piece if self.piece else 0
        last = self.start + max(count - 1, 0) * self.stride + self.piece
        if count * self.piece != nbytes or last > self.size or (count > 1 and self.stride < self.piece):
            raise ValueError(f"{nbytes} bytes are no pieces of {self.piece} in a file of {self.size}")
        for number in range(count):
            begin = self.start + number * self.stride
            yield begin, begin + self.piece
