"""Loops for numbers that get a bit or three values each; see `loops`."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyrhythm.codecs.dense import BITS, SUMS, TRITS
from polyrhythm.codecs.dense.loops import Array, add, compiled, drawn, halved, largest


@compiled
def signs(values: Array, residual: Array, keep: bool, limit: Any, sums: Array, body: Array) -> float:
    """A bit for each number below the limit, and the sum of magnitudes."""
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
        whole[len(x) : 5 * width] = -1  # the digit 0: what nobody reads
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
