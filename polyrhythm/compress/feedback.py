"""Error feedback: what a code leaves out is kept in the residual and sent later.

p = g + e;   send the code of p;   e <- p - what the code stands for
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

from polyrhythm.core.codec import FusedFeedback
from polyrhythm.core.errors import NotFinite

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState
    from polyrhythm.core.codec import Codec


def encode(codec: Codec, values: Tensor, state: CodecState) -> Tensor:
    """The code of the values and of the residual, if there is one; keeps what the code leaves out."""
    residual = state.residual
    if residual is None:
        return codec.encode(values, state)
    if _is_fused(type(codec)):
        return cast(FusedFeedback, codec).encode_with_feedback(values, residual, state)
    return encode_in_three_passes(codec, values, residual, state)


@cache
def _is_fused(kind: type[Codec]) -> bool:
    """Cached, because isinstance of a protocol takes longer than encoding a few thousand numbers."""
    return issubclass(kind, FusedFeedback)


def encode_in_three_passes(codec: Codec, values: Tensor, residual: Tensor, state: CodecState) -> Tensor:
    """What `FusedFeedback` does in one pass."""
    residual.add_(values)
    code = codec.encode(residual, state)
    codec.decode(code, residual, -1.0)  # as the receivers decode it
    return code


def check_residual(codec: Codec, residual: Tensor | None, worker: int) -> None:
    """Raises `NotFinite` if the residual has overflowed although all gradients were finite."""
    import torch

    # A sum is much cheaper than encoding, but the sum of large finite numbers may overflow too.
    if residual is None or math.isfinite(float(residual.sum())) or bool(torch.isfinite(residual).all()):
        return
    raise NotFinite(
        f"worker {worker}: the residual of {codec} has grown beyond the largest number "
        f"({residual.dtype}): lower the learning rate, clip gradients, or send more of them at a time"
    )


class ResidualRates:
    """The learning rate of each parameter group that a residual of gradients is measured by.

    The residual is kept without the learning rate. When SGD's rate changes, the residual is scaled by the old
    rate over the new one, so that the step that it becomes part of is as long as it would have been.
    """

    def __init__(self, rates: Sequence[float] = ()) -> None:
        self.rates = list(rates)

    def change(self, rates: Sequence[float]) -> list[float]:
        """The factor by which to scale the residual of each group, now that these are the rates."""
        before = self.rates or rates
        self.rates = [
            now if now > 0 else then for now, then in zip(rates, before, strict=True)
        ]  # a rate of 0 is a pause
        return [then / now if now else 1.0 for now, then in zip(self.rates, before, strict=True)]
