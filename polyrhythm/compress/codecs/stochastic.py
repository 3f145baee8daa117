"""Stochastic quantizers: what arrives is unbiased, so nothing has to be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.codecs.quantize import HEADER, Int4, Quantizer, blocks_of, check_block
from polyrhythm.compress.kernels import dense
from polyrhythm.core.codec import Codec, Reduction
from polyrhythm.core.errors import UsageError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.state import CodecState


@dataclass(frozen=True)
class QSGD(Quantizer):
    r"""Rounds each number stochastically to one of `levels` fractions of its block's norm (QSGD).

    $$
    \hat{g}_i = \frac{\lVert g \rVert_2}{s} \operatorname{sign}(g_i) \xi_i, \qquad
    \xi_i = \Big\lfloor \frac{s \lvert g_i \rvert}{\lVert g \rVert_2} + U_i \Big\rfloor, \qquad
    U_i \sim [0, 1)
    $$

    It is unbiased, and its variance is at most $\min(d / s^2, \sqrt{d} / s) \lVert g \rVert^2$ for blocks of
    $d$ numbers and $s$ levels. Few numbers come near the norm, so levels are sent in Rice codes, with a
    parameter of its own for every block; where most are zero, as gaps. That takes 3.8 bits a number with 64
    levels, and 0.34 with one.

    - `levels`: the number of levels $s$
    - `block`: numbers that share one norm

    >>> import polyrhythm as pr
    >>> print(pr.parse("allreduce+qsgd:16").codec)
    qsgd:16
    """

    name: ClassVar[str] = "qsgd"
    main: ClassVar[str] = "levels"
    paper: ClassVar[str] = "Alistarh et al. 2017, QSGD"
    reduction: ClassVar[Reduction] = Reduction.HOPS
    form: ClassVar[int] = 4

    levels: int = 64
    block: int = 512

    def __post_init__(self) -> None:
        check_block(self.block)
        if not 1 <= self.levels <= 32767:
            raise UsageError("levels must be from 1 to 32767")

    def for_replies(self) -> Codec:
        return _nearest(self)

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        import torch

        units = torch.empty(blocks_of(len(values), self.block), dtype=values.dtype)
        whole = dense.backend(values).levels(values, self.block, self.levels, state.stream(), units)
        body = torch.cat([_number(0, 1), self._packed(whole)])
        if 3 * int(whole.count_nonzero()) < len(whole):
            gaps, sizes = _listed(whole)
            first = self._packed(gaps)
            few = torch.cat(
                [_number(1, 1), _number(len(gaps)), _number(len(first)), first, self._packed(sizes)]
            )
            body = min(body, few, key=len)
        return torch.cat([self.new_code(values, 0), units.view(torch.uint8), body])

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        blocks = blocks_of(len(into), self.block)
        wide = into.element_size() * blocks
        body = self.body(code, into, wide + 1, more=True)
        units = self.units(body, blocks, into.dtype, self.levels)
        mode, body = int(body[wide]), body[wide + 1 :]
        if mode == 0:
            whole = self._unpacked(body, len(into))
        elif mode == 1 and len(body) >= 12:
            count, first, body = _read(body[:6]), _read(body[6:12]), body[12:]
            if count > len(into) or first > len(body):
                raise WireError(f"qsgd: {count} non-zero numbers of {len(into)}")
            gaps, sizes = self._unpacked(body[:first], count), self._unpacked(body[first:], count)
            whole = _unlisted(gaps, sizes, len(into))
        else:
            raise WireError(f"qsgd: a code of {len(code)} bytes in mode {mode}")
        if len(into) and max(-int(whole.min()), int(whole.max())) > self.levels:
            raise WireError(f"qsgd: a level beyond {self.levels}")
        dense.backend(into).add_levels(units, whole, into, scale, self.block)

    def _packed(self, whole: Tensor) -> Tensor:
        """Rice codes of 16-bit integers."""
        import torch

        return torch.cat(dense.backend(whole).rice(whole, self.block))

    def _unpacked(self, body: Tensor, count: int) -> Tensor:
        """The numbers of a body, whose length is checked before anything is read."""
        blocks = blocks_of(count, self.block)
        shifts, body = body[:blocks], body[blocks:]
        width, last = -(-self.block // 8), -(-(count - (blocks - 1) * self.block) // 8)
        low = int(shifts.long().sum()) * width - (width - last) * int(shifts[-1:].long().sum())
        if len(shifts) < blocks or len(body) < low or bool((shifts > 16).any()):
            raise WireError(f"qsgd: {len(body)} bytes for the levels of {count} numbers")
        whole: Tensor = dense.backend(body).unrice(shifts, body, count, self.block, 32767)
        return whole


# Where most levels are zero, the others are listed: how many zeros come before each, and its level.

SPAN = 1 << 15  # the last of so many numbers is always listed, so that gaps fit into 16 bits


def _listed(whole: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    there = whole != 0
    there[SPAN - 1 :: SPAN] = True
    at = there.nonzero().view(-1)
    levels = whole[at].long()
    gaps = at.diff(prepend=torch.tensor([-1])) - 1
    # The sign is the lowest bit. 0 only occurs among those that are always listed.
    sizes = ((levels << 1) ^ (levels >> 63)) - (at % SPAN != SPAN - 1).long()
    return _signed(gaps), _signed(sizes)


def _unlisted(gaps: Tensor, sizes: Tensor, count: int) -> Tensor:
    import torch

    at = (_unsigned(gaps) + 1).cumsum(0) - 1
    last = at % SPAN == SPAN - 1
    if (len(at) and int(at[-1]) >= count) or int(last.sum()) != count // SPAN:
        raise WireError(f"qsgd: a list that does not fit {count} numbers")
    whole = torch.zeros(count, dtype=torch.int16)
    whole[at] = _signed(_unsigned(sizes) + (~last).long())
    return whole


def _signed(numbers: Tensor) -> Tensor:
    """From 0, 1, 2, 3 to 0, -1, 1, -2, as Rice codes take them."""
    import torch

    return ((numbers >> 1) ^ -(numbers & 1)).to(torch.int16)


def _unsigned(numbers: Tensor) -> Tensor:
    return (numbers.long() << 1) ^ (numbers.long() >> 15)


def _number(value: int, size: int = 6) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(value.to_bytes(size, "little")), dtype=torch.uint8)


def _read(body: Tensor) -> int:
    return int.from_bytes(bytes(body.tolist()), "little")


@dataclass(frozen=True)
class TernGrad(Quantizer):
    r"""Rounds each number stochastically to -1, 0 or 1, times one scale per layer (TernGrad).

    $$
    \hat{g}_i = S \operatorname{sign}(g_i) b_i, \qquad
    \operatorname{Pr}(b_i = 1) = \min(1, \lvert g_i \rvert / S), \qquad
    S = \min(\max_i \lvert g_i \rvert, c \sigma)
    $$

    Five numbers share a byte. $\sigma$ is taken about zero, so that equal numbers are not cut away. Codes are
    gathered and not summed, so every worker has an $S$ of its own.

    - `clip`: the factor $c$; 0 cuts nothing and is unbiased

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

    def for_replies(self) -> Codec:
        return _nearest(self)

    def encode(self, values: Tensor, state: CodecState) -> Tensor:
        import torch

        from polyrhythm.compress.kernels.dense.plain import units_between

        most, squares = dense.backend(values).sizes(values)
        sigma = math.sqrt(squares / max(1, len(values)))
        if self.clip and math.isfinite(sigma):
            most = min(most, self.clip * sigma)
        unit = torch.tensor([most], dtype=values.dtype).clamp_(*units_between(values.dtype, 1))
        wide = values.element_size()
        code = self.new_code(values, wide + dense.packed_size(len(values), dense.TRITS, 5))
        code[HEADER : HEADER + wide] = unit.view(torch.uint8)
        dense.backend(values).trits(values, unit.item(), state.stream(), code[HEADER + wide :])
        return code

    def decode(self, code: Tensor, into: Tensor, scale: float = 1.0) -> None:
        wide = into.element_size()
        body = self.body(code, into, wide + dense.packed_size(len(into), dense.TRITS, 5))
        unit, body = self.units(body, 1, into.dtype, 1), body[wide:]
        if len(body) and int(body.max()) > 242:
            raise WireError("terngrad: a byte that is not five ternary digits")
        dense.backend(into).add_trits(body, into, (unit * scale).item())


def _nearest(codec: Codec) -> Codec:
    """For differences: rounded to the nearest, in as many bits.

    What a code leaves out of a difference is in the next one. Stochastic rounding lengthens it on average, so
    that sender and receiver would diverge.
    """
    return Int4(per=codec.per, dense=codec.dense, pull=codec.pull)
