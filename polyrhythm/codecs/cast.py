"""Codecs that only shorten each number: half the bytes, no state, and sums that still make sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.strategy import Codec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Half(Codec):
    """16-bit floats with 11 bits of precision; what is beyond their range becomes the largest of them.

    >>> import torch
    >>> Half().encode(torch.tensor([0.5, 1e9]))
    tensor([5.0000e-01, 6.5504e+04], dtype=torch.float16)
    """

    name: ClassVar[str] = "fp16"
    paper: ClassVar[str] = "Micikevicius et al. 2018, Mixed Precision Training"
    summable: ClassVar[bool] = True

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.clamp(-65504.0, 65504.0).half()

    def decode(self, encoded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)


@dataclass(frozen=True)
class BFloat(Codec):
    """16-bit floats with the range of 32-bit ones and 8 bits of precision.

    >>> import torch
    >>> BFloat().encode(torch.tensor([0.5, 1e9])).dtype
    torch.bfloat16
    """

    name: ClassVar[str] = "bf16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training"
    summable: ClassVar[bool] = True

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16()

    def decode(self, encoded: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)
