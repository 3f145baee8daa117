"""Compiled loops for the Rice codes of levels.

Of a number, with its sign in the lowest bit, the k lowest bits are written as they are and the rest in unary:
so many zeros, then a one. Low bits are stored as planes of bytes, block by block, so that their loops have no
branches; the unary parts follow in one piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyrhythm.core.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def shifts_of(whole: Array, block: int, shifts: Array) -> tuple[int, int]:
    """Sets the k of every block; returns the bytes of low bits, and the number of unary bits."""
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
def write(whole: Array, block: int, shifts: Array, low: Array, unary: Array) -> None:
    """Writes the low bits as planes of bytes, and the unary parts as bits of 64-bit words."""
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
    """For every byte: the zeros before each one, how many ones, and the zeros after the last."""
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
    """Counts the zeros before each one; returns how many ones, at most a few too many.

    `runs` must have room for 8 more than `count`.
    """
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
def read(shifts: Array, low: Array, block: int, most: int, runs: Array, whole: Array) -> int:
    """The numbers, in place of the runs; returns the largest level, or an upper bound above `most`."""
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
