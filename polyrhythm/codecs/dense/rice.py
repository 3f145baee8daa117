"""Loops for levels between zero and a norm, and for the Rice codes in which they travel; see `loops`.

Rice: of a number (its sign in its lowest bit), the k lowest bits go as they are and the rest in unary, as so
many zeros and a one. Low bits travel as planes of bytes, a block at a time, so that their loops have no
branches; the unary part follows in one piece.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyrhythm.codecs.dense.loops import Array, compiled, drawn, halved, increase, largest


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


@compiled
def rice_shifts(whole: Array, block: int, shifts: Array) -> tuple[int, int]:
    """The k of every block; the bytes of low bits, and the bits in unary."""
    row = np.empty(block, np.int32)
    planes, unary = 0, 0
    for b in range(len(shifts)):
        x = whole[b * block : (b + 1) * block]
        cost = 0
        for j in range(len(x)):
            row[j] = np.int32(np.int32(x[j]) << np.int32(1)) ^ np.int32(np.int32(x[j]) >> np.int32(15))
        for j in range(len(x)):
            cost += row[j]
        k = 0
        while True:
            high = 0
            for j in range(len(x)):
                high += row[j] >> (k + 1)
            if high + (k + 1) * len(x) >= cost:
                break
            k += 1
            cost = high + k * len(x)
        shifts[b] = k
        planes += k * ((len(x) + 7) // 8)
        unary += cost - k * len(x) + len(x)
    return planes, unary


@compiled
def rice(whole: Array, block: int, shifts: Array, low: Array, unary: Array) -> None:
    """Writes the low bits as planes of bytes, and the stops as bits of words."""
    row = np.zeros(block + 8, np.int32)
    at, word, filled, bits = 0, 0, 0, np.uint64(0)
    for b in range(len(shifts)):
        x = whole[b * block : (b + 1) * block]
        k, width = int(shifts[b]), (len(x) + 7) // 8
        row[len(x) : 8 * width] = 0
        for j in range(len(x)):
            row[j] = np.int32(np.int32(x[j]) << np.int32(1)) ^ np.int32(np.int32(x[j]) >> np.int32(15))
        for place in range(k):
            for j in range(width):
                byte = np.int32(0)
                for plane in range(8):
                    digit = np.int32(np.int32(row[plane * width + j] >> np.int32(place)) & np.int32(1))
                    byte |= np.int32(digit << np.int32(plane))
                low[at + j] = np.uint8(byte)
            at += width
        for j in range(len(x)):
            filled += row[j] >> k
            while filled >= 64:
                unary[word] = bits
                word, filled, bits = word + 1, filled - 64, np.uint64(0)
            bits |= np.uint64(1) << np.uint64(filled)
            filled += 1
    while filled > 0:
        unary[word] = bits
        word, filled, bits = word + 1, filled - 64, np.uint64(0)


def _table() -> tuple[Array, Array, Array]:
    """For every byte: the zeros before each stop in it, how many stops, and the zeros after the last."""
    runs, stops, after = np.zeros((256, 8), np.uint16), np.zeros(256, np.uint8), np.zeros(256, np.uint16)
    for byte in range(256):
        for place in range(8):
            if byte >> place & 1:
                runs[byte, stops[byte]] = after[byte]
                stops[byte], after[byte] = stops[byte] + 1, 0
            else:
                after[byte] += 1
    return runs, stops, after


RUNS, STOPS, AFTER = _table()


@compiled
def unary_runs(unary: Array, count: int, runs: Array) -> int:
    """The zeros before each stop; how many stops there are, if not too many. `runs` has room for 8 more."""
    found, zeros = 0, 0
    for i in range(len(unary)):
        byte = unary[i]
        for j in range(8):
            runs[found + j] = RUNS[byte, j]
        if STOPS[byte]:
            runs[found] = np.uint16(min(zeros + runs[found], 65535))
            zeros = 0
        zeros += AFTER[byte]
        found += STOPS[byte]
        if found > count:
            break
    return int(found)


@compiled
def unrice(shifts: Array, low: Array, block: int, most: int, runs: Array, whole: Array) -> int:
    """The whole numbers, in place of the runs; returns the largest level, or more."""
    row = np.empty(block + 8, np.int32)
    at, worst = 0, np.int32(0)
    for b in range(len(shifts)):
        x, zeros = whole[b * block : (b + 1) * block], runs[b * block : (b + 1) * block]
        k, width = int(shifts[b]), (len(x) + 7) // 8
        row[:] = 0
        for place in range(k):
            for plane in range(8):
                for j in range(width):
                    digit = np.int32(np.int32(np.int32(low[at + j]) >> np.int32(plane)) & np.int32(1))
                    row[plane * width + j] |= np.int32(digit << np.int32(place))
            at += width
        limit = np.int32((2 * most) >> k)
        for j in range(len(x)):
            run = np.int32(min(np.int32(zeros[j]), np.int32(limit + 1)))
            zigzag = np.int32(np.int32(run << np.int32(k)) + row[j])
            worst = max(worst, zigzag)
            x[j] = np.int16(np.int32(zigzag >> np.int32(1)) ^ np.int32(-np.int32(zigzag & np.int32(1))))
    return (int(worst) + 1) // 2
