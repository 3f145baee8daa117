"""The loops themselves, on arrays. Each works on a block that stays in the first cache.

Without `fastmath`: products and sums round as in torch, so that both roads give the same bits. Loops have no
branches that depend on a number, and the compiler makes vector instructions of them. Numbers of 32 bits are
cast at every step, for numba would go on with 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

FULL = 0x43E00000  # 448 as a 32-bit float, the largest of the 8-bit ones
LEAST = 0x3C800000  # 2**-6, the smallest of them that is not subnormal


def compiled(function: Function) -> Function:
    """Compiled on its first call, kept on disk for the next process, and run without Python's lock."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy")(function))


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
    """The largest magnitude, as bits: these have the order of the floats, and vector instructions."""
    most = mask ^ mask
    for i in range(len(bits)):
        most = max(most, bits[i] & mask)
    return most


@compiled
def nearest(values: Array, inverse: Any, magic: Any, whole: Array) -> None:
    for i in range(len(values)):
        whole[i] = np.int32((values[i] * inverse + magic) - magic)  # to even: such floats have no fractions


@compiled
def drawn(values: Array, inverse: Any, top: int, seed: Any, start: int, whole: Array) -> None:
    """Up or down by a hash of the index; see `plain.drawn`."""
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
    """The sum of the first numbers of a row, by adding its halves; spoils it."""
    while length > 1:
        half = (length + 1) // 2
        for i in range(length - half):
            row[i] += row[half + i]
        length = half
    return row[0]


@compiled
def integers(
    values: Array, residual: Array, keep: bool, bits: Array, mask: Any, block: int, top: int, magic: Any,
    least: Any, most: Any, draw: bool, seed: Any, units: Array, body: Array,
) -> None:  # fmt: skip
    """Whole multiples of a unit a block: one to a byte, or with 7 at most, two."""
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
    """8-bit floats (4 bits of exponent, 3 of mantissa), rounded to even; small ones by adding a large one."""
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
