"""Codecs that only shorten each number: half the bytes, and codes that can be summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.codec import Codec, Reduction
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState

PIECE = 1 << 18  # numbers that are widened at a time


@dataclass(frozen=True)
class Half(Codec):
    r"""Sends 16-bit floats with 11 bits of precision; larger numbers become the largest of them.

    $$
    \hat{g}_i = \operatorname{fp16}(g_i), \qquad \lvert \hat{g}_i - g_i \rvert \le 2^{-11} \lvert g_i \rvert
    $$

    The bound holds for magnitudes from $2^{-14}$ to 65504. Smaller numbers lose precision, and below
    $2^{-25}$ they become 0.

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress.state import CodecState
    >>> codec, got = pr.parse("allreduce+fp16").codec, torch.zeros(3)
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6, 1e-9]), CodecState.alone(count=3)), got)
    >>> got.tolist()
    [0.0999755859375, 65504.0, 0.0]
    """

    name: ClassVar[str] = "fp16"
    paper: ClassVar[str] = "Micikevicius et al. 2018, Mixed Precision Training"
    reduction: ClassVar[Reduction] = Reduction.ELEMENTWISE

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        return _shortened(values, values.half())

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        _add(code, into, scale, "float16")


@dataclass(frozen=True)
class BFloat(Codec):
    r"""Sends 16-bit floats with the range of 32-bit floats and 8 bits of precision.

    $$
    \hat{g}_i = \operatorname{bf16}(g_i), \qquad \lvert \hat{g}_i - g_i \rvert \le 2^{-8} \lvert g_i \rvert
    $$

    >>> import torch
    >>> import polyrhythm as pr
    >>> from polyrhythm.compress.state import CodecState
    >>> codec, got = pr.parse("allreduce+bf16").codec, torch.zeros(2)
    >>> codec.decode(codec.encode(torch.tensor([0.1, 1e6]), CodecState.alone(count=2)), got)
    >>> got.tolist()
    [0.10009765625, 999424.0]
    """

    name: ClassVar[str] = "bf16"
    paper: ClassVar[str] = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training"
    reduction: ClassVar[Reduction] = Reduction.ELEMENTWISE

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        return _shortened(values, values.bfloat16())

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        _add(code, into, scale, "bfloat16")


def _shortened(values: Tensor, code: Tensor) -> Tensor:
    """Finite numbers beyond the range become the largest; infinity stays, so that it is noticed."""
    import torch

    beyond = code.isinf()
    if bool(beyond.any()):
        most = torch.finfo(code.dtype).max
        code = code.where(~beyond | values.isinf(), code.clamp(-most, most))
    return code


def _add(code: Tensor, into: Tensor, scale: float, dtype: str) -> None:
    if str(code.dtype) != f"torch.{dtype}" or code.shape != into.shape:
        raise WireError(f"received {tuple(code.shape)} of {code.dtype}, not {tuple(into.shape)} of {dtype}")
    # In pieces: widening all of it at once would allocate a copy of the vector.
    for low in range(0, len(into), PIECE):
        into[low : low + PIECE].add_(code[low : low + PIECE].to(into.device), alpha=scale)
