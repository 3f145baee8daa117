"""The loops of `SparseSGD`, compiled by numba: several rows per microsecond.

Nothing here synchronizes processes: they read and write the same weights with plain loads and stores. With a
mutex, one process at a time learns a row. Words have been checked before; indexing with unsigned numbers
saves numba the test for negative ones.

All loops are in one file because they call each other: numba considers its cache valid as long as the file of
the outermost loop has not changed.
"""

from __future__ import annotations

import errno
import math
from typing import Any

import numpy as np
from numba import types

from polyrhythm.core.compiling import compiled, part, prefetch

Array = np.ndarray[Any, Any]

LOGISTIC, HINGE, SQUARED = range(3)
DONE, NOT_FINITE, TIMED_OUT, FAILED = range(4)  # how a loop over rows ends
FINE, OUT_OF_RANGE, BAD_OFFSET, BAD_LABEL, BAD_VALUE = range(5)  # the verdict on a batch

AHEAD, MAX_WORDS_AHEAD = 2, 64  # how many rows ahead weights are prefetched, and for how many words

_trylock: Any = types.ExternalFunction("pthread_mutex_trylock", types.intc(types.intp))
_timedlock: Any = types.ExternalFunction("pthread_mutex_timedlock", types.intc(types.intp, types.intp))
_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.intc(types.intp))
_consistent: Any = types.ExternalFunction("pthread_mutex_consistent", types.intc(types.intp))
_gettime: Any = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.intp))

_BUSY, _TIMED_OUT, _OWNER_DEAD = errno.EBUSY, errno.ETIMEDOUT, errno.EOWNERDEAD
SLICE = 500_000_000  # nanoseconds that a loop waits for the mutex before it returns and is called again


@compiled
def check(
    words: Array, offsets: Array, labels: Array, values: Array, features: int, classes: bool
) -> tuple[int, int]:
    """The verdict on a batch, and the position of the error: the row, or the word."""
    low, high = np.int64(0), np.int64(-1)
    for k in range(len(words)):
        low = min(low, np.int64(words[k]))
        high = max(high, np.int64(words[k]))
    if low < 0 or high >= features:
        for k in range(len(words)):
            if words[k] < 0 or words[k] >= features:
                return OUT_OF_RANGE, k
    before = np.int64(0)
    for i in range(len(offsets)):
        if offsets[i] < before or offsets[i] > len(words) or (i == 0 and offsets[i] != 0):
            return BAD_OFFSET, i
        before = offsets[i]
    for i in range(len(labels)):
        if not math.isfinite(labels[i]) or (classes and labels[i] != 0 and labels[i] != 1):
            return BAD_LABEL, i
    for k in range(len(values)):
        if not math.isfinite(values[k]):
            return BAD_VALUE, k
    return FINE, 0


@part
def _slope(z: float, label: float, kind: int) -> tuple[float, float]:
    """The loss of a row, and its derivative with respect to z."""
    if kind == LOGISTIC:
        small = math.exp(-abs(z))  # cannot overflow
        loss = max(z, 0.0) - label * z + math.log1p(small)
        return loss, (1.0 if z >= 0 else small) / (1.0 + small) - label
    if kind == HINGE:
        sign = 2.0 * label - 1.0
        margin = 1.0 - sign * z
        return (margin, -sign) if margin > 0 else (0.0, 0.0)
    return (z - label) * (z - label), 2.0 * (z - label)


@part
def _dot(w: Array, words: Array, values: Array, start: int, stop: int) -> float:
    """The sum of the row's weights, as four sums, because each addition waits for the one before it."""
    a = b = c = d = w.dtype.type(0)
    k = start
    if len(values):
        while k + 4 <= stop:
            a += w[np.uint64(words[k])] * values[k]
            b += w[np.uint64(words[k + 1])] * values[k + 1]
            c += w[np.uint64(words[k + 2])] * values[k + 2]
            d += w[np.uint64(words[k + 3])] * values[k + 3]
            k += 4
        while k < stop:
            a += w[np.uint64(words[k])] * values[k]
            k += 1
    else:
        while k + 4 <= stop:
            a += w[np.uint64(words[k])]
            b += w[np.uint64(words[k + 1])]
            c += w[np.uint64(words[k + 2])]
            d += w[np.uint64(words[k + 3])]
            k += 4
        while k < stop:
            a += w[np.uint64(words[k])]
            k += 1
    return np.float64((a + b) + (c + d))


@part
def _row(
    w: Array, words: Array, values: Array, start: int, stop: int, label: float, rate: float, kind: int,
    counts: Array, shift: int, made: Array,
) -> tuple[float, bool]:  # fmt: skip
    """One step of SGD on one row: its loss before the step, and False if the step is not finite."""
    z = _dot(w, words, values, start, stop)
    loss, slope = _slope(z, label, kind)
    step = w.dtype.type(rate * slope)
    if not math.isfinite(step) or not math.isfinite(loss):
        return loss, False
    if step == 0:
        return loss, True
    if len(values):
        for k in range(start, stop):
            w[np.uint64(words[k])] -= step * values[k]
    else:
        for k in range(start, stop):
            w[np.uint64(words[k])] -= step
    if len(made):
        mask = words.dtype.type((1 << shift) - 1)
        for k in range(start, stop):
            if words[k] & mask == 0:
                made[0] += 1  # first: if the worker dies in between, its count must not be too low
                counts[np.uint64(words[k] >> shift)] += 1
    return loss, True


@part
def _ahead(w: Array, words: Array, offsets: Array, row: int) -> None:
    """Prefetches the weights of a later row, from memory or from another worker's cache."""
    if row < len(offsets):
        start = offsets[row]
        stop = offsets[row + 1] if row + 1 < len(offsets) else len(words)
        for k in range(start, min(stop, start + MAX_WORDS_AHEAD)):
            prefetch(w, np.int64(words[k]))


@compiled
def learn(
    w: Array, words: Array, offsets: Array, labels: Array, values: Array, rate: float, kind: int,
    counts: Array, shift: int, made: Array,
) -> tuple[int, float, int]:  # fmt: skip
    """Learns the rows in order; returns how the loop ended, the sum of the losses, and at which row."""
    total = 0.0
    for i in range(len(labels)):
        start, stop = offsets[i], offsets[i + 1] if i + 1 < len(labels) else len(words)
        _ahead(w, words, offsets, i + AHEAD)
        loss, fine = _row(w, words, values, start, stop, labels[i], rate, kind, counts, shift, made)
        if not fine:
            return NOT_FINITE, total, i
        total += loss
    return DONE, total, len(labels)


@part
def _take(mutex: int, until: Array) -> Any:
    """Takes a mutex, or gives up after a slice; returns 0 or the error."""
    code = _trylock(mutex)
    if code == _BUSY:
        _gettime(0, until.ctypes.data)  # CLOCK_REALTIME is the clock of timedlock
        later = until[1] + SLICE
        until[0] += later // 1_000_000_000
        until[1] = later % 1_000_000_000
        code = _timedlock(mutex, until.ctypes.data)
    if code == _OWNER_DEAD:  # it died inside a row, which is applied in part
        code = _consistent(mutex)
    return code


@compiled
def learn_locked(
    w: Array, words: Array, offsets: Array, labels: Array, values: Array, rate: float, kind: int,
    counts: Array, shift: int, made: Array, first: int, line: Array, rank: int, until: Array,
) -> tuple[int, float, int]:  # fmt: skip
    """Like `learn` from row `first` on, with the mutex in this cache line for each row; may time out.

    The last word of the line is the rank of the holder plus 1: see `wire.mutex`.
    """
    total, mutex = 0.0, line.ctypes.data
    for i in range(first, len(labels)):
        start, stop = offsets[i], offsets[i + 1] if i + 1 < len(labels) else len(words)
        _ahead(w, words, offsets, i + AHEAD)
        code = _take(mutex, until)
        if code:
            return (TIMED_OUT if code == _TIMED_OUT else FAILED), total, i
        line[7] = rank + 1
        loss, fine = _row(w, words, values, start, stop, labels[i], rate, kind, counts, shift, made)
        line[7] = 0
        _unlock(mutex)
        if not fine:
            return NOT_FINITE, total, i
        total += loss
    return DONE, total, len(labels)
