"""The backend of tensor operations: any device, without numba. It defines what the compiled one must give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from polyrhythm.compress.kernels.dense import BITS, SUMS, TRITS
from polyrhythm.core.errors import WireError

_32 = 0xFFFFFFFF


def rows(values: Tensor, chunk: int) -> Iterator[Tensor]:
    """The full chunks as rows of one table, then the last, shorter one as a table of its own."""
    whole = len(values) // chunk * chunk
    if whole:
        yield values[:whole].view(-1, chunk)
    if whole < len(values):
        yield values[whole:].view(1, -1)


def spread(each: Tensor, count: int, chunk: int) -> Tensor:
    """One number per chunk, repeated for every number of the chunk."""
    return each.repeat_interleave(chunk)[:count]


def fold(digits: Tensor, chunk: int, places: int, radix: int) -> Tensor:
    """Packs `places` digits into each byte."""
    parts = []
    for table in rows(digits, chunk):
        width = -(-table.shape[1] // places)
        planes = pad(table, (0, width * places - table.shape[1])).view(-1, places, width)
        weights = torch.tensor([radix**place for place in range(places)], device=digits.device)
        parts.append((planes * weights[:, None]).sum(1).to(torch.uint8).view(-1))
    return torch.cat(parts) if parts else digits.new_empty(0, dtype=torch.uint8)


def unfold(body: Tensor, count: int, chunk: int, places: int, radix: int) -> Tensor:
    """Unpacks the digits."""
    parts = []
    for table in rows(torch.empty(count, dtype=torch.uint8, device="meta"), chunk):
        width = -(-table.shape[1] // places)
        taken, body = body[: len(table) * width].view(-1, 1, width), body[len(table) * width :]
        weights = torch.tensor([radix**place for place in range(places)], device=body.device)
        planes = taken.to(torch.int16) // weights[:, None] % radix
        parts.append(planes.reshape(len(table), -1)[:, : table.shape[1]].reshape(-1))
    return torch.cat(parts) if parts else body.new_empty(0, dtype=torch.int64)


def total(values: Tensor) -> float:
    """The sum in 64 bits, in a fixed order."""
    tables = [pad(table.double(), (0, SUMS - table.shape[1])) for table in rows(values, SUMS)]
    if not tables:
        return 0.0
    return _halved(_halved(torch.cat(tables)).view(1, -1)).item()


def _halved(table: Tensor) -> Tensor:
    while table.shape[1] > 1:
        half = -(-table.shape[1] // 2)
        table = table[:, :half] + pad(table[:, half:], (0, 2 * half - table.shape[1]))
    return table[:, 0]


def drawn(ratio: Tensor, top: int, seed: int) -> Tensor:
    """The ratios rounded up or down, so that the expectation is the ratio; clamped to the top."""
    hashed = torch.arange(len(ratio), device=ratio.device)
    hashed = (hashed + (seed & _32)) & _32
    hashed ^= hashed >> 16
    hashed = (hashed * 0x7FEB352D) & _32
    hashed ^= hashed >> 15
    hashed ^= seed >> 32
    hashed = (hashed * 0x846CA68B) & _32
    hashed ^= hashed >> 16
    size = ratio.abs()
    whole = size.floor()
    up = (hashed >> 1) < ((size - whole) * 2.0**31).long()
    return (whole + up).clamp_(max=top).copysign(ratio)


def units_between(dtype: torch.dtype, most: float) -> tuple[float, float]:
    """The smallest and largest units u for which neither 1 / u nor `most` times u overflows."""
    info = torch.finfo(dtype)
    return info.tiny, info.max / most * (1 - 2**-20)


# Integer multiples of one unit per block: int8, int4.


def integers(
    values: Tensor,
    residual: Tensor | None,
    block: int,
    top: int,
    seed: int | None,
    units: Tensor,
    body: Tensor,
) -> None:
    source = values if residual is None else residual.add_(values)
    here = (largest(source, block) / top).clamp_(*units_between(values.dtype, top))
    ratio = source * spread(1 / here, len(source), block)
    whole = (ratio.round() if seed is None else drawn(ratio, top, seed)).to(torch.int8)
    units.copy_(here)
    body.copy_(whole.view(torch.uint8) if top > 7 else fold(whole & 15, block, 2, 16))
    if residual is not None:
        residual -= whole.to(source.dtype) * spread(here, len(source), block)


def add_integers(units: Tensor, body: Tensor, into: Tensor, scale: float, block: int, top: int) -> None:
    body = body.to(into.device)
    whole = body.view(torch.int8) if top > 7 else (unfold(body, len(into), block, 2, 16) ^ 8) - 8
    into += whole.to(into.dtype) * spread((units * scale).to(into.device), len(into), block)


def largest(values: Tensor, block: int) -> Tensor:
    """The largest magnitude of every block."""
    parts = [table.abs().amax(1) for table in rows(values, block)]
    return torch.cat(parts) if parts else values


# 8-bit floats, times one power of two per block.


def floats(values: Tensor, residual: Tensor | None, block: int, powers: Tensor, body: Tensor) -> None:
    source = values if residual is None else residual.add_(values)
    part, power = torch.frexp(largest(source, block))
    power = power - torch.where(part > 0.875, 8, 9)  # brings the largest to 448 or just below
    least, most = limits(values.dtype)
    power = power.clamp_(least, most).to(torch.int16)
    ratio = source * spread(_power(-power, source.dtype), len(source), block)
    eighth = ratio.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    powers.copy_(power)
    body.copy_(eighth.view(torch.uint8))
    if residual is not None:
        residual -= eighth.to(values.dtype) * spread(_power(power, source.dtype), len(source), block)


def add_floats(powers: Tensor, body: Tensor, into: Tensor, scale: float, block: int) -> None:
    values = body.to(into.device).view(torch.float8_e4m3fn).to(into.dtype)
    into += values * spread(_power(powers.to(into.device), into.dtype) * scale, len(into), block)


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """The smallest and largest exponents for which neither 2**-e nor 448 * 2**e overflows."""
    return (-126, 119) if dtype == torch.float32 else (-1022, 1015)


def _power(powers: Tensor, dtype: torch.dtype) -> Tensor:
    # Exact, by the bits of 64-bit floats: `ldexp` of 32-bit ones uses `pow`.
    bits = (powers.long() + 1023) << 52
    return bits.view(torch.float64).to(dtype)


def largest_float(body: Tensor) -> int:
    """The largest magnitude of 8-bit floats, as bits."""
    return int((body & 0x7F).max()) if len(body) else 0


# One bit per number.


def signs(values: Tensor, residual: Tensor | None, zeros: bool, body: Tensor) -> float:
    """Writes bits that are set for negative numbers, with `zeros` also for 0; returns the mean magnitude."""
    source = values if residual is None else residual.add_(values)
    negative = source <= 0 if zeros else source < 0
    body.copy_(fold(negative.to(torch.uint8), BITS, 8, 2))
    return total(source.abs()) / max(1, len(source))


def add_signs(body: Tensor, into: Tensor, unit: float) -> None:
    bits = unfold(body.to(into.device), len(into), BITS, 8, 2)
    into += (1 - 2 * bits).to(into.dtype) * unit


# Three values per number.


def sizes(values: Tensor) -> tuple[float, float]:
    """The largest magnitude, and the sum of all squares."""
    return float(values.abs().max()) if len(values) else 0.0, total(values.double().square())


def trits(values: Tensor, unit: float, seed: int, body: Tensor) -> None:
    inverse = 1 / torch.tensor(unit, dtype=values.dtype)
    whole = drawn(values * inverse.to(values.device), 1, seed)
    body.copy_(fold(whole.to(torch.int8) + 1, TRITS, 5, 3))


def add_trits(body: Tensor, into: Tensor, unit: float) -> None:
    digits = unfold(body.to(into.device), len(into), TRITS, 5, 3)
    into += (digits - 1).to(into.dtype) * unit


# Levels between zero and the norm of a block.


def levels(values: Tensor, block: int, most: int, seed: int, units: Tensor) -> Tensor:
    """The signed level of each number; sets `units` to the distances between levels."""
    norms = []
    for table in rows(values, block):
        # Scaled to about 1 first: squares of the largest 64-bit floats overflow.
        power = torch.frexp(table.abs().amax(1))[1].clamp_(-1000, 1000)
        near = table.double() * _power(-power, torch.float64)[:, None]
        width = 1 << (table.shape[1] - 1).bit_length()
        squares = _halved(pad(near.square(), (0, width - table.shape[1])))
        # By numpy: torch's square roots are off by a bit on some processors.
        roots = torch.from_numpy(np.sqrt(squares.cpu().numpy())).to(values.device)
        norms.append(roots * _power(power, torch.float64))
    here = torch.cat(norms) if norms else values.double()
    here = (here / most).clamp_(*units_between(values.dtype, most)).to(values.dtype)
    units.copy_(here)
    return drawn(values * spread(1 / here, len(values), block), most, seed).to(torch.int16).cpu()


def add_levels(units: Tensor, whole: Tensor, into: Tensor, scale: float, block: int) -> None:
    here = spread((units * scale).to(into.device), len(into), block)
    into += whole.to(into.device).to(into.dtype) * here


def rice(whole: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Rice codes: the k of each block; then the k low bits of all, in planes, and the rest in unary."""
    zigzag = (whole.int() << 1) ^ (whole.int() >> 15)
    shifts, low, high = [], [], []
    for table in rows(zigzag, block):
        length = table.shape[1]
        costs = torch.stack([(table >> k).sum(1) + k * length for k in range(18)])
        shift = (costs[1:] >= costs[:-1]).int().argmax(0)  # the first k after which the cost stops falling
        places = torch.arange(int(shift.max()))
        bits = (table[:, None] >> places[:, None]) & 1
        planes = fold(bits.reshape(-1), length, 8, 2).view(len(table), len(places), -(-length // 8))
        low.append(planes[places < shift[:, None]].view(-1))
        high.append((table >> shift[:, None]).view(-1))
        shifts.append(shift)
    if not shifts:
        return whole.to(torch.uint8), whole.to(torch.uint8)
    stops = (torch.cat(high).long() + 1).cumsum(0) - 1
    unary = torch.zeros(int(stops[-1]) + 1, dtype=torch.uint8)
    unary[stops] = 1
    return torch.cat(shifts).to(torch.uint8), torch.cat([*low, fold(unary, 8, 8, 2)])


def unrice(shifts: Tensor, body: Tensor, count: int, block: int, most: int) -> Tensor:
    """Reads Rice codes; WireError if there are not `count` numbers, or one is beyond `most`."""
    low, repeated = [], []
    for table in rows(torch.empty(count, dtype=torch.uint8, device="meta"), block):
        length, width = table.shape[1], -(-table.shape[1] // 8)
        shift, shifts = shifts[: len(table)].long(), shifts[len(table) :]
        places = torch.arange(int(shift.max()))
        size = int(shift.sum()) * width
        planes = torch.zeros(len(table), len(places), width, dtype=torch.uint8)
        planes[places < shift[:, None]] = body[:size].view(-1, width)
        body = body[size:]
        bits = unfold(planes.view(-1), planes.shape[0] * planes.shape[1] * length, length, 8, 2)
        low.append((bits.view(len(table), -1, length).long() << places[:, None]).sum(1).view(-1))
        repeated.append(shift.repeat_interleave(length))
    stops = unfold(body, 8 * len(body), 8, 8, 2).nonzero().view(-1)
    if len(stops) != count or len(body) != (int(stops[-1]) // 8 + 1 if count else 0):
        raise WireError(f"a code of {count} levels that holds {len(stops)}")
    if not count:
        return torch.empty(0, dtype=torch.int16)
    high = torch.diff(stops, prepend=torch.tensor([-1])) - 1
    zigzag = (high << torch.cat(repeated)) + torch.cat(low)
    whole = (zigzag >> 1) ^ -(zigzag & 1)
    if int(whole.abs().max()) > most:
        raise WireError(f"a code with level {int(whole.abs().max())} of {most}")
    return whole.to(torch.int16)
