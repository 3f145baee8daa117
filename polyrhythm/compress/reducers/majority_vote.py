"""The majority vote of signSGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.compress.reducers.codes import GatheredCodes

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Decompressor


class MajorityVote(GatheredCodes):
    """The sign of the sum of all signs; 0 for a tie (Bernstein et al. 2018)."""

    gradients_only: ClassVar[bool] = True  # a vote has no size

    def decide(self, mean: Sequence[Tensor], decompressor: Decompressor) -> None:
        for segment in decompressor.codable(mean):
            segment.sign_()
