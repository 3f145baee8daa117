"""The compiled loops of quantizers. Each works on a block that stays in the first-level cache.

Without `fastmath`: products and sums round as in torch, so that both backends give the same bits. Loops have
no branches that depend on a number, so the compiler vectorizes them. 32-bit numbers are cast at every step,
because numba would continue with 64 bits.

Loops that call each other are in one file: numba considers its cache on disk valid as long as the file of the
outermost loop has not changed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyrhythm.compress.kernels.dense import BITS, SUMS, TRITS
from polyrhythm.core.compiling import compiled

Array = np.ndarray[Any, Any]

FULL = 0x43E00000  # 448 as a 32-bit float: the largest 8-bit float
LEAST = 0x3C800000  # 2**-6: the smallest normal 8-bit float


@compiled
def add(residual: Array, values: Array) -> None:
    for i in range(len(values)):
        residual[i] += values[i]


@compiled
def subtract(residual: Array, whole: Array, unit: Any) -> None:
    for i in range(len(residual)):
        residual[i] -= type(unit)(whole[i]) * unit


@compiled
def increase(into: Array, whole: Array, unit: Any) -> None:
    for i in range(len(into)):
        into[i] += type(unit)(whole[i]) * unit


@compiled
def largest(bits: Array, mask: Any) -> Any:
    """The largest magnitude, as bits: they have the same order as the floats, and can be vectorized."""
    most = mask ^ mask
    for i in range(len(bits)):
        most = max(most, bits[i] & mask)
    return most


@compiled
def nearest(values: Array, inverse: Any, magic: Any, whole: Array) -> None:
    for i in range(len(values)):
        # Rounds to even: floats as large as `magic` have no fractions.
        whole[i] = np.int32((values[i] * inverse + magic) - magic)


@compiled
def drawn(values: Array, inverse: Any, top: int, seed: Any, start: int, whole: Array) -> None:
    """Rounds up or down by a hash of the index; see `plain.drawn`."""
    low, high = np.uint32(seed & np.uint64(0xFFFFFFFF)), np.uint32(seed >> np.uint64(32))
    low = np.uint32(low + np.uint32(start))
    for i in range(len(values)):
        h = np.uint32(low + np.uint32(i))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        h = np.uint32(h * np.uint32(0x7FEB352D))
        h = np.uint32(h ^ (h >> np.uint32(15)))
        h = np.uint32(h ^ high)
        h = np.uint32(h * np.uint32(0x846CA68B))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        size = abs(values[i] * inverse)
        floor = np.int32(size)
        share = np.int32((size - type(inverse)(floor)) * type(inverse)(2147483648.0))
        rounded = np.int32(
            min(np.int32(floor + np.int32(np.int32(h >> np.uint32(1)) < share)), np.int32(top))
        )
        whole[i] = -rounded if values[i] < 0 else rounded


@compiled
def halved(row: Array, length: int) -> Any:
    """The sum of the first numbers of a row, by adding its halves; overwrites the row."""
    while length > 1:
        half = (length + 1) // 2
        for i in range(length - half):
            row[i] += row[half + i]
        length = half
    return row[0]


# Integer multiples of a unit, and 8-bit floats.


@compiled
def integers(
    values: Array, residual: Array, keep: bool, bits: Array, mask: Any, block: int, top: int, magic: Any,
    least: Any, most: Any, draw: bool, seed: Any, units: Array, body: Array,
) -> None:  # fmt: skip
    """Integer multiples of one unit per block: one to a byte, or two if `top` is at most 7."""
    source = residual if keep else values
    numbers = np.empty(1, bits.dtype)
    whole, signed = np.zeros(block + 1, np.int8), body.view(np.int8)
    wide, at = top > 7, 0
    for b in range(len(units)):
        begin = b * block
        x = source[begin : begin + block]
        if keep:
            add(x, values[begin : begin + block])
        numbers[0] = largest(bits[begin : begin + block], mask)
        unit = min(max(numbers.view(values.dtype)[0] / type(magic)(top), least), most)
        units[b] = unit
        inverse = type(magic)(1) / unit
        out = signed[begin : begin + len(x)] if wide else whole[: len(x)]
        if draw:
            drawn(x, inverse, top, seed, begin, out)
        else:
            nearest(x, inverse, magic, out)
        if keep:
            subtract(x, out, unit)
        if not wide:
            half = (len(x) + 1) // 2
            whole[len(x)] = 0
            for j in range(half):
                body[at + j] = np.uint8((whole[j] & 15) | ((whole[half + j] & 15) << 4))
            at += half


@compiled
def add_integers(units: Array, body: Array, into: Array, scale: Any, block: int, top: int) -> None:
    whole, signed, at = np.empty(block + 1, np.int8), body.view(np.int8), 0
    for b in range(len(units)):
        x = into[b * block : (b + 1) * block]
        unit = units[b] * scale
        if top > 7:
            increase(x, signed[b * block : b * block + len(x)], unit)
        else:
            half = (len(x) + 1) // 2
            for j in range(half):
                byte = body[at + j]
                whole[j] = np.int8(np.int8((byte & 15) ^ 8) - np.int8(8))
                whole[half + j] = np.int8(np.int8((byte >> 4) ^ 8) - np.int8(8))
            increase(x, whole[: len(x)], unit)
            at += half


@compiled
def floats(
    values: Array, residual: Array, keep: bool, bits: Array, mask: Any, block: int, one: Any, least: int,
    most: int, powers: Array, body: Array,
) -> None:  # fmt: skip
    """8-bit floats (4 bits of exponent, 3 of mantissa), rounded to even."""
    source = residual if keep else values
    numbers = np.empty(1, bits.dtype)
    for b in range(len(powers)):
        begin = b * block
        x = source[begin : begin + block]
        if keep:
            add(x, values[begin : begin + block])
        numbers[0] = largest(bits[begin : begin + block], mask)
        part, power = math.frexp(np.float64(numbers.view(values.dtype)[0]))
        power = min(max(power - (8 if part > 0.875 else 9), least), most)
        powers[b] = power
        unit = type(one)(math.ldexp(1.0, power))
        inverse = type(one)(math.ldexp(1.0, -power))
        out = body[begin : begin + len(x)]
        for i in range(len(x)):
            y = np.float32(x[i] * inverse)
            size = np.int32(min(np.int32(y.view(np.int32) & np.int32(0x7FFFFFFF)), np.int32(FULL)))
            even = np.int32(np.int32(size >> np.int32(20)) & np.int32(1))
            normal = np.int32(
                np.int32(np.int32(size + np.int32(0x7FFFF) + even) >> np.int32(20)) - np.int32(120 << 3)
            )
            # Subnormals are rounded by adding a large float.
            small = np.int32(np.float32(abs(y) * np.float32(512) + np.float32(12582912)).view(np.int32))
            code = np.int32(small & np.int32(15)) if size < np.int32(LEAST) else normal
            out[i] = np.uint8(code | np.int32(np.int32(y.view(np.int32) >> np.int32(24)) & np.int32(0x80)))
        if keep:
            add_eighths(x, out, -unit)


@compiled
def add_eighths(into: Array, body: Array, unit: Any) -> None:
    for i in range(len(into)):
        byte = np.int32(body[i])
        size = np.int32(byte & np.int32(0x7F))
        normal = np.int32(np.int32(size << np.int32(20)) + np.int32(120 << 23)).view(np.float32)
        small = np.float32(size) * np.float32(1 / 512)
        value = small if size < np.int32(8) else normal
        into[i] += type(unit)(-value if byte > np.int32(127) else value) * unit


@compiled
def add_floats(powers: Array, body: Array, into: Array, scale: Any, block: int) -> None:
    for b in range(len(powers)):
        x = into[b * block : (b + 1) * block]
        add_eighths(x, body[b * block : b * block + len(x)], type(scale)(math.ldexp(1.0, powers[b])) * scale)


@compiled
def largest_byte(body: Array, mask: Any) -> Any:
    most = np.uint8(0)
    for i in range(len(body)):
        most = max(most, np.uint8(body[i] & mask))
    return most


# One bit each, or three values.


@compiled
def signs(values: Array, residual: Array, keep: bool, limit: Any, sums: Array, body: Array) -> float:
    """One bit per number, set if it is below the limit; returns the sum of magnitudes."""
    source = residual if keep else values
    row = np.empty(SUMS, np.float64)
    for b in range(len(sums)):
        x = source[b * BITS : (b + 1) * BITS]
        if keep:
            add(x, values[b * BITS : (b + 1) * BITS])
        out = body[b * (BITS // 8) : (b + 1) * (BITS // 8)]
        width = (len(x) + 7) // 8
        if len(x) == BITS:
            for j in range(BITS // 2):
                row[j] = np.float64(abs(x[j])) + np.float64(abs(x[BITS // 2 + j]))
            sums[b] = halved(row, BITS // 2)
            for j in range(BITS // 8):
                byte = np.int32(0)
                for place in range(8):
                    byte |= np.int32(x[place * (BITS // 8) + j] < limit) << np.int32(place)
                out[j] = np.uint8(byte)
        else:
            row[:] = 0
            for j in range(len(x)):
                row[j] = abs(x[j])
            sums[b] = halved(row, SUMS)
            out[:width] = 0
            for j in range(len(x)):
                out[j % width] |= np.uint8(x[j] < limit) << np.uint8(j // width)
    return halved(sums, len(sums)) if len(sums) else 0.0


@compiled
def add_signs(body: Array, into: Array, unit: Any) -> None:
    for b in range((len(into) + BITS - 1) // BITS):
        x = into[b * BITS : (b + 1) * BITS]
        bits = body[b * (BITS // 8) : (b + 1) * (BITS // 8)]
        width = (len(x) + 7) // 8
        for place in range(8):
            plane = x[place * width : (place + 1) * width]
            for j in range(len(plane)):
                plane[j] += -unit if (bits[j] >> np.uint8(place)) & np.uint8(1) else unit


@compiled
def sizes(values: Array, bits: Array, mask: Any, sums: Array) -> tuple[Any, float]:
    """The largest magnitude, as bits, and the sum of squares."""
    row = np.empty(SUMS, np.float64)
    most = mask ^ mask
    for b in range(len(sums)):
        x = values[b * SUMS : (b + 1) * SUMS]
        most = max(most, largest(bits[b * SUMS : (b + 1) * SUMS], mask))
        if len(x) < SUMS:
            row[:] = 0
        for j in range(len(x)):
            row[j] = np.float64(x[j]) * np.float64(x[j])
        sums[b] = halved(row, SUMS)
    return most, (halved(sums, len(sums)) if len(sums) else 0.0)


@compiled
def trits(values: Array, inverse: Any, seed: Any, body: Array) -> None:
    whole = np.zeros(TRITS, np.int8)
    for b in range((len(values) + TRITS - 1) // TRITS):
        x = values[b * TRITS : (b + 1) * TRITS]
        drawn(x, inverse, 1, seed, b * TRITS, whole[: len(x)])
        width = (len(x) + 4) // 5
        whole[len(x) : 5 * width] = -1  # digit 0; never read
        for j in range(width):
            body[b * (TRITS // 5) + j] = np.uint8(
                121 + whole[j] + 3 * whole[width + j] + 9 * whole[2 * width + j] + 27 * whole[3 * width + j]
                + 81 * whole[4 * width + j]
            )  # fmt: skip


@compiled
def add_trits(body: Array, into: Array, unit: Any) -> None:
    for b in range((len(into) + TRITS - 1) // TRITS):
        x = into[b * TRITS : (b + 1) * TRITS]
        width = (len(x) + 4) // 5
        packed = body[b * (TRITS // 5) : b * (TRITS // 5) + width]
        for place in range(5):
            plane = x[place * width : (place + 1) * width]
            # Quotients of a byte by 3**place and by three times that, as products: exact up to 255.
            above = np.int32((65536 + 3**place - 1) // 3**place)
            below = np.int32((65536 + 3 ** (place + 1) - 1) // 3 ** (place + 1))
            for j in range(len(plane)):
                byte = np.int32(packed[j])
                quotient = np.int32(np.int32(byte * above) >> np.int32(16))
                rest = np.int32(np.int32(byte * below) >> np.int32(16))
                digit = np.int32(np.int32(quotient - np.int32(rest * np.int32(3))) - np.int32(1))
                plane[j] += type(unit)(digit) * unit


# Levels between zero and the norm of a block.


@compiled
def levels(
    values: Array, bits: Array, mask: Any, block: int, most: int, least: Any, cap: Any, seed: Any,
    units: Array, whole: Array,
) -> None:  # fmt: skip
    numbers = np.empty(1, bits.dtype)
    width = 1
    while width < block:
        width *= 2
    row = np.empty(width, np.float64)
    for b in range(len(units)):
        x = values[b * block : (b + 1) * block]
        numbers[0] = largest(bits[b * block : (b + 1) * block], mask)
        power = min(max(math.frexp(np.float64(numbers.view(values.dtype)[0]))[1], -1000), 1000)
        near = math.ldexp(1.0, -power)
        while width >= 2 * len(x):
            width //= 2
        row[len(x) : width] = 0
        for j in range(len(x)):
            y = np.float64(x[j]) * near
            row[j] = y * y
        norm = np.sqrt(halved(row, width)) * math.ldexp(1.0, power)
        unit = type(least)(min(max(norm / most, np.float64(least)), np.float64(cap)))
        units[b] = unit
        drawn(x, type(least)(1) / unit, most, seed, b * block, whole[b * block : b * block + len(x)])


@compiled
def add_levels(units: Array, whole: Array, into: Array, scale: Any, block: int) -> None:
    for b in range(len(units)):
        x = into[b * block : (b + 1) * block]
        increase(x, whole[b * block : b * block + len(x)], units[b] * scale)
