"""Codecs that only shorten each number: half the bytes, and sums that still make sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.strategy import Codec

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.memory import Memory


@dataclass(frozen=True)
class Half(Codec):
    """16-bit floats with 11 bits of precision; what is beyond their range becomes the largest of them.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+fp16").codec)
    fp16
    """

    name: ClassVar[str] = "fp16"
    paper: ClassVar[str] = "Micikevicius et al. 2018, Mixed Precision Training"
    summable: ClassVar[bool] = True

    def encode(self, values: Tensor, memory: Memory) -> Tensor:
        return values.clamp(-65504.0, 65504.0).half()

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        into.add_(code, alpha=scale)


@dataclass(frozen=True)
class BFloat(Codec):
    """16-bit floats with the range of 32-bit ones and 8 bits of precision.

    >>> import polyrhythm as pr
    >>> print(pr.parse("diloco:100+bf16").codec)
    bf16
    """

    name: ClassVar[str] = "bf16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training"
    summable: ClassVar[bool] = True

    def encode(self, values: Tensor, memory: Memory) -> Tensor:
        return values.bfloat16()

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        into.add_(code, alpha=scale)
