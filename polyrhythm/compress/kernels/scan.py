"""Compiled passes over a whole vector: add the gradient to the residual, find large entries, take them out.

A vector is processed in chunks that stay in the first-level cache. In each, a loop without branches, which
the compiler vectorizes, adds and marks. Then marks are checked eight at a time, and scalar code runs only
where one is set. If the output arrays are full, a pass returns how far it came, to be called again with new
ones. NaN compares as not large, so it is never taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyrhythm.core.compiling import compiled

Array = np.ndarray[Any, Any]

CHUNK = 2048
MOST = (1 << 24) - 1  # pulses at once; a float32 represents every integer up to here
DIGIT = 11  # bits that one pass of `largest_keys` sorts by


@compiled
def threshold(
    residual: Array, gradient: Array, tau: Any, many: bool, start: int, indexes: Array, pulses: Array
) -> tuple[int, int]:
    """residual += gradient; subtracts one pulse of ±tau, or all with `many`, where |residual| >= tau.

    Begins at `start`; writes indexes and signed pulses. Returns how many, and where it stopped.
    """
    kind = residual.dtype.type
    marks = np.zeros(CHUNK, np.uint8)
    words = marks.view(np.uint64)
    found = 0
    for begin in range(start, len(residual), CHUNK):
        if found + CHUNK > len(indexes):
            return found, begin
        r, g = residual[begin : begin + CHUNK], gradient[begin : begin + CHUNK]
        if len(r) < CHUNK:
            marks[:] = 0
        for j in range(len(r)):
            value = r[j] + g[j]
            r[j] = value
            marks[j] = abs(value) >= tau
        for word in range(CHUNK // 8):
            if words[word] == 0:
                continue
            for j in range(8 * word, 8 * word + 8):
                if marks[j]:
                    value = r[j]
                    times = np.int32(min(abs(value) / tau, kind(MOST)) if many else 1)
                    if value < 0:
                        times = np.int32(-times)
                    r[j] = value - kind(times) * tau
                    indexes[found] = begin + j
                    pulses[found] = times
                    found += 1
    return found, len(residual)


@compiled
def add_counts(base: Array, counts: Array, tau: Any, into: Array) -> Any:
    """into = base + tau · counts. Returns the bitwise or of all |counts|, nearly."""
    kind = base.dtype.type
    bits = np.int32(0)
    for j in range(len(base)):
        count = counts[j]
        bits |= count ^ (count >> np.int32(31))
        into[j] = base[j] + kind(count) * tau
    return bits


@compiled
def above(values: Array, least: Any, start: int, indexes: Array) -> tuple[int, int]:
    """Writes the indexes from `start` on where |values| >= least. Returns how many, and where it stopped."""
    marks = np.zeros(CHUNK, np.uint8)
    words = marks.view(np.uint64)
    found = 0
    for begin in range(start, len(values), CHUNK):
        if found + CHUNK > len(indexes):
            return found, begin
        x = values[begin : begin + CHUNK]
        if len(x) < CHUNK:
            marks[:] = 0
        for j in range(len(x)):
            marks[j] = abs(x[j]) >= least
        found = _collect(marks, words, begin, indexes, found)
    return found, len(values)


@compiled
def add_above(residual: Array, gradient: Array, least: Any, start: int, indexes: Array) -> tuple[int, int]:
    """residual += gradient, then as `above` for the sum."""
    marks = np.zeros(CHUNK, np.uint8)
    words = marks.view(np.uint64)
    found = 0
    for begin in range(start, len(residual), CHUNK):
        if found + CHUNK > len(indexes):
            return found, begin
        r, g = residual[begin : begin + CHUNK], gradient[begin : begin + CHUNK]
        if len(r) < CHUNK:
            marks[:] = 0
        for j in range(len(r)):
            value = r[j] + g[j]
            r[j] = value
            marks[j] = abs(value) >= least
        found = _collect(marks, words, begin, indexes, found)
    return found, len(residual)


@compiled
def _collect(marks: Array, words: Array, begin: int, indexes: Array, found: int) -> int:
    for word in range(CHUNK // 8):
        if words[word] == 0:
            continue
        for j in range(8 * word, 8 * word + 8):
            indexes[found] = begin + j  # overwritten by the next one, unless it is marked
            found += marks[j]
    return found


@compiled
def sample(residual: Array, gradient: Array, add: bool, stride: int, into: Array) -> None:
    """One magnitude out of every `stride` neighbours, at varying offsets to avoid patterns in the vector."""
    turn = np.uint64(0x9E3779B97F4A7C15)
    for j in range(len(into)):
        # The high bits of a counter times the golden ratio are spread evenly.
        place = (np.uint64(j) * turn) >> np.uint64(33)
        at = j * stride + np.int64(place) % stride
        value = residual[at]
        if add:
            value += gradient[at]
        into[j] = abs(value)


@compiled
def take(values: Array, indexes: Array, taken: Array) -> None:
    """values[indexes] -= taken."""
    for j in range(len(indexes)):
        values[indexes[j]] -= taken[j]


@compiled
def largest_keys(keys: Array, count: int, bits: int) -> tuple[Any, int]:
    """The count-th largest of `keys`, and how many keys equal to it are among the largest `count`.

    Radix selection from the top digit: a histogram tells which bin holds it, and only that bin is continued.
    """
    low = np.uint64((1 << (bits - 1)) - 1)  # all but the sign
    wanted, prefix, fixed = count, np.uint64(0), np.uint64(0)
    shift = bits - 1
    histogram = np.zeros(1 << DIGIT, np.int64)
    while shift > 0:
        width = min(DIGIT, shift)
        shift -= width
        histogram[:] = 0
        down, digit = np.uint64(shift), np.uint64((1 << width) - 1)
        for j in range(len(keys)):
            key = np.uint64(keys[j]) & low
            if key & fixed == prefix:
                histogram[np.int64((key >> down) & digit)] += 1
        bin_ = (1 << width) - 1
        while bin_ > 0 and histogram[bin_] < wanted:
            wanted -= histogram[bin_]
            bin_ -= 1
        prefix |= np.uint64(bin_) << down
        fixed |= digit << down
    return prefix, wanted


@compiled
def keep_largest(keys: Array, indexes: Array, count: int, bits: int) -> int:
    """Moves the `count` indexes with the largest keys to the front, in order; of equal keys the first."""
    if count >= len(indexes):
        return len(indexes)
    low = np.uint64((1 << (bits - 1)) - 1)
    least, ties = largest_keys(keys, count, bits)
    kept = 0
    for j in range(len(indexes)):
        key = np.uint64(keys[j]) & low
        if key > least or (key == least and ties > 0):
            if key == least:
                ties -= 1
            indexes[kept] = indexes[j]
            kept += 1
    return kept
