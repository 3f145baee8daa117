"""Writes sparse messages in the fewest bytes."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.compress.kernels import load
from polyrhythm.compress.kernels.entropy.format import (
    DOUBLE,
    HALF,
    JOINS,
    MAGIC,
    PULSES,
    SIGNS,
    SINGLE,
    TRITS,
    VERSION,
    read_only,
    times,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def pack_pulses(length: int, indexes: Array, pulses: Array, tau: float) -> Array:
    """The message "pulses[j] times tau at indexes[j]", in the fewest bytes. Indexes ascend; no pulse is 0."""
    import numpy as np

    rice = load().rice
    count = len(indexes)
    scale = struct.pack("<f", tau)
    if not count:
        return _message(SIGNS, length, 0, scale)
    signs = np.packbits(pulses < 0, bitorder="little")
    magnitudes = np.abs(pulses)
    m = -1 if int(magnitudes.max()) == 1 else _best_k(magnitudes - 1)
    if m >= 0:
        scale += bytes([m])
    indexed = _plan_blocks(length, indexes, magnitudes, m)
    trits = (length + 4) // 5
    if m < 0 and trits < indexed.size + 1 + len(signs):
        dense = np.empty(trits, np.uint8)
        rice.write_trits(indexes, pulses < 0, dense)
        return _message(TRITS, length, count, scale, dense)
    blocks = indexed.write(indexes, magnitudes, m)
    return _message(SIGNS if m < 0 else PULSES, length, count, scale, blocks, signs)


def pack_values(length: int, indexes: Array, values: Array, half: bool) -> tuple[Array, Array]:
    """The message "values[j] at indexes[j]", and the values that a reader gets. Indexes ascend."""
    import numpy as np

    mode = HALF if half else SINGLE if values.dtype == np.float32 else DOUBLE
    scale, plane, got = b"", values, values
    if half:
        exponent = _exponent(values)
        plane = times(values, -exponent).astype(np.float16)
        got = times(plane.astype(values.dtype), exponent)
        scale = struct.pack("<h", exponent)
    if not len(indexes):
        return _message(mode, length, 0, scale), got
    ones = np.empty(0, np.int32)
    blocks = _plan_blocks(length, indexes, ones, -1).write(indexes, ones, -1)
    little = plane.astype(plane.dtype.newbyteorder("<"), copy=False)
    return _message(mode, length, len(indexes), scale, blocks, little.view(np.uint8)), got


class BlockPlan(NamedTuple):
    """How indexes are divided into blocks."""

    starts: Array
    join: int
    size: int
    ks: Array
    sizes: Array

    def write(self, indexes: Array, magnitudes: Array, m: int) -> Array:
        import numpy as np

        out = np.empty(1 + self.size, np.uint8)
        out[0] = load().rice.FINE + self.join
        load().rice.write(indexes, magnitudes, m, self.starts, self.join, self.ks, self.sizes, out[1:])
        return out


def _plan_blocks(length: int, indexes: Array, magnitudes: Array, m: int) -> BlockPlan:
    """The cheapest division."""
    rice = load().rice
    costs, starts = rice.survey(indexes, length)
    extra = rice.extra_bits(magnitudes, starts, m)
    best: BlockPlan | None = None
    for join in JOINS:
        size, ks, sizes = rice.plan(indexes, costs, starts, join, extra)
        if best is None or size < best.size:
            best = BlockPlan(starts, join, size, ks, sizes)
        if len(ks) == 1:
            break
    assert best is not None
    return best


def _best_k(numbers: Array) -> int:
    """The Rice parameter for which these take the fewest bits; all are below 2^24."""
    import numpy as np

    rice = load().rice

    def bits(k: int) -> int:
        upper = numbers >> k
        return int(np.where(upper < rice.ESCAPE, upper + 1 + k, rice.ESCAPE + rice.WIDE).sum(dtype=np.int64))

    return min(range(int(numbers.max()).bit_length() + 1), key=bits)


def _exponent(values: Array) -> int:
    """The power of two that brings the largest of the values to 2^14 or a little more."""
    import numpy as np

    largest = float(np.abs(values).max(initial=0))
    return math.frexp(largest)[1] - 15 if 0 < largest < math.inf else 0


def _message(mode: int, length: int, count: int, *parts: bytes | Array) -> Array:
    """A message with its header and its checksum."""
    import google_crc32c
    import numpy as np

    head = MAGIC + bytes([VERSION << 4 | mode]) + _varint(length) + _varint(count)
    arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in (head, *parts)]
    whole = np.empty(sum(map(len, arrays)) + 4, np.uint8)
    np.concatenate(arrays, out=whole[:-4])
    whole[-4:] = np.frombuffer(struct.pack("<I", google_crc32c.value(read_only(whole[:-4]))), np.uint8)
    return whole


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 128:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])
