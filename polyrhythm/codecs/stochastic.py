"""Codecs that round by lot: what arrives is, in expectation, what was meant, and nothing need be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.codecs import dense
from polyrhythm.codecs.quantize import HEADER, Quantizer, blocks_of, check_block
from polyrhythm.errors import UsageError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.memory import Memory


@dataclass(frozen=True)
class QSGD(Quantizer):
    """Levels between zero and the norm of a block, drawn so that the expectation is right.

        sent = ‖g‖₂ · sgn(gᵢ) · ξᵢ / s,    ξᵢ = s|gᵢ|/‖g‖₂ rounded up or down by lot

    Its variance is at most min(d/s², √d/s)·‖g‖² for blocks of d numbers and s levels. Few numbers come near
    the norm, so levels travel in Rice codes, with a k of its own for every block.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+qsgd:16").codec)
    qsgd:16
    """

    name: ClassVar[str] = "qsgd"
    main: ClassVar[str] = "levels"
    paper: ClassVar[str] = "Alistarh et al. 2017, QSGD"
    hops: ClassVar[bool] = True
    form: ClassVar[int] = 4

    levels: int = 64
    block: int = 512

    def __post_init__(self) -> None:
        check_block(self.block)
        if not 1 <= self.levels <= 32767:
            raise UsageError("levels must be from 1 to 32767")

    def encode(self, values: Tensor, memory: Memory) -> Tensor:
        import torch

        units = torch.empty(blocks_of(len(values), self.block), dtype=values.dtype)
        whole = dense.road(values).levels(values, self.block, self.levels, memory.stream(), units)
        shifts, body = dense.road(whole).rice(whole, self.block)
        return torch.cat([self.made(values, 0), units.view(torch.uint8), shifts, body])

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        blocks = blocks_of(len(into), self.block)
        wide = into.element_size() * blocks
        body = self.opened(code, into, wide + blocks, more=True)
        units = self.units(body, blocks, into.dtype, self.levels)
        shifts, body = body[wide : wide + blocks], body[wide + blocks :]
        width = -(-self.block // 8)
        last = -(-(len(into) - (blocks - 1) * self.block) // 8)
        low = int(shifts.long().sum()) * width - (width - last) * int(shifts[-1:].long().sum())
        if len(body) < low or bool((shifts > 16).any()):
            raise WireError(f"qsgd: {len(body)} bytes of levels, {low} of them low bits")
        whole = dense.road(body).unrice(shifts, body, len(into), self.block, self.levels)
        dense.road(into).add_levels(units, whole, into, scale, self.block)


@dataclass(frozen=True)
class TernGrad(Quantizer):
    """Minus one, zero or one, times one number a layer, drawn so that the expectation is right.

        sent = S · sgn(gᵢ) · bᵢ,    bᵢ = 1 with probability |gᵢ|/S,    S = min(max|g|, clip·σ)

    Five of them share a byte. σ is taken about zero, so that equal numbers are not cut away; `clip=0` cuts
    nothing and is unbiased. Codes are gathered and not summed, so every worker has an S of its own.

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+terngrad:0").codec)
    terngrad:0
    """

    name: ClassVar[str] = "terngrad"
    main: ClassVar[str] = "clip"
    paper: ClassVar[str] = "Wen et al. 2017, TernGrad"
    form: ClassVar[int] = 5

    clip: float = 2.5
    per: Literal["vector", "layer"] = field(default="layer", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise UsageError("clip must be 0 or more")

    def encode(self, values: Tensor, memory: Memory) -> Tensor:
        import torch

        from polyrhythm.codecs.dense.plain import units_between

        most, squares = dense.road(values).sizes(values)
        sigma = math.sqrt(squares / max(1, len(values)))
        if self.clip and math.isfinite(sigma):
            most = min(most, self.clip * sigma)
        unit = torch.tensor([most], dtype=values.dtype).clamp_(*units_between(values.dtype, 1))
        wide = values.element_size()
        code = self.made(values, wide + dense.size(len(values), dense.TRITS, 5))
        code[HEADER : HEADER + wide] = unit.view(torch.uint8)
        dense.road(values).trits(values, unit.item(), memory.stream(), code[HEADER + wide :])
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        wide = into.element_size()
        body = self.opened(code, into, wide + dense.size(len(into), dense.TRITS, 5))
        unit, body = self.units(body, 1, into.dtype, 1), body[wide:]
        if len(body) and int(body.max()) > 242:
            raise WireError("terngrad: a byte that is no five digits of three")
        dense.road(into).add_trits(body, into, (unit * scale).item())
