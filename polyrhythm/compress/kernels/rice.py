"""The bits of sparse messages: gaps between sorted indexes in Rice codes, in blocks; signs five to a byte.

A Rice code of parameter k writes a number as its upper part in unary (so many ones, then a zero) and its k
lower bits. ESCAPE ones without the zero are followed by the whole number in WIDE bits. Bits fill bytes from
the lowest up, and each block begins on a byte of its own. Instead of raising an error, readers return its
index in `polyrhythm.compress.kernels.entropy.format.WRONG`; 0 is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polyrhythm.core.compiling import compiled, trailing_zeros

Array = np.ndarray[Any, Any]

ESCAPE, WIDE = 32, 24
FINE = 16  # the smallest blocks, called fine, have 2**16 parameters
LARGEST_K = 24  # a gap in the largest block has at most so many bits

ONE = np.uint64(1)


@compiled
def _cost(number: int, k: int) -> int:
    """The bits of a number's code."""
    upper = number >> k
    return upper + 1 + k if upper < ESCAPE else ESCAPE + WIDE


@compiled
def survey(indexes: Array, length: int) -> tuple[Array, Array]:
    """The exact bits of each fine block for each k, without its first gap; and where its indexes start.

    The first gap depends on how many fine blocks are joined, and is left to `plan`.
    """
    blocks = ((length - 1) >> FINE) + 1
    costs = np.zeros((blocks, LARGEST_K + 1), np.int64)
    starts = np.zeros(blocks + 1, np.int64)
    gaps = np.empty(1 << FINE, np.int32)
    at = 0
    for block in range(blocks):
        starts[block] = at
        end = (block + 1) << FINE
        if at >= len(indexes) or indexes[at] >= end:
            continue
        count, widest = 0, 0
        at += 1
        while at < len(indexes) and indexes[at] < end:
            gap = indexes[at] - indexes[at - 1] - 1
            gaps[count] = gap
            widest = max(widest, gap)
            count += 1
            at += 1
        for k in range(LARGEST_K + 1):
            if widest >> k == 0:
                for more in range(k, LARGEST_K + 1):
                    costs[block, more] = count * (more + 1)
                break
            total = np.int32(0)  # at most 2**16 codes of 56 bits
            for j in range(count):
                upper = gaps[j] >> np.int32(k)
                total += np.int32(upper + 1 + k) if upper < ESCAPE else np.int32(ESCAPE + WIDE)
            costs[block, k] = total
    starts[blocks] = at
    return costs, starts


@compiled
def plan(indexes: Array, costs: Array, starts: Array, join: int, extra: Array) -> tuple[int, Array, Array]:
    """The bytes of all blocks of 2**join fine ones with their directory, the best k of each, and its bytes.

    Each fine block has `extra` bits in addition, whatever the k.
    """
    fine = len(starts) - 1
    blocks = ((fine - 1) >> join) + 1
    best, sizes = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
    total = 0
    for block in range(blocks):
        first, last = block << join, min((block + 1) << join, fine)
        count = starts[last] - starts[first]
        if count == 0:
            total += 1
            continue
        fewest = -1
        for k in range(LARGEST_K + 1):
            bits = 0
            before = (first << FINE) - 1
            for each in range(first, last):
                if starts[each + 1] > starts[each]:
                    bits += costs[each, k] + extra[each]
                    bits += _cost(indexes[starts[each]] - before - 1, k)
                    before = indexes[starts[each + 1] - 1]
            if fewest < 0 or bits < fewest:
                fewest = bits
                best[block] = k
        sizes[block] = (fewest + 7) >> 3
        total += sizes[block] + 1 + _varint_size(count) + _varint_size(sizes[block])
    return total, best, sizes


@compiled
def extra_bits(magnitudes: Array, starts: Array, m: int) -> Array:
    """The bits of the magnitudes, less one, of each fine block; 0 if m < 0."""
    bits = np.zeros(len(starts) - 1, np.int64)
    if m < 0:
        return bits
    for block in range(len(bits)):
        for j in range(starts[block], starts[block + 1]):
            bits[block] += _cost(magnitudes[j] - 1, m)
    return bits


@compiled
def _varint_size(number: int) -> int:
    size = 1
    while number >= 128:
        number >>= 7
        size += 1
    return size


@compiled
def _put_varint(out: Array, at: int, number: int) -> int:
    while number >= 128:
        out[at] = np.uint8((number & 127) | 128)
        number >>= 7
        at += 1
    out[at] = np.uint8(number)
    return at + 1


@compiled
def _code(number: int, k: int) -> tuple[Any, Any]:
    """The code of a number, and how many bits it has."""
    upper = number >> k
    if upper >= ESCAPE:
        return ((ONE << np.uint64(ESCAPE)) - ONE) | (np.uint64(number) << np.uint64(ESCAPE)), np.uint64(
            ESCAPE + WIDE
        )
    low = np.uint64(number) & ((ONE << np.uint64(k)) - ONE)
    unary = (ONE << np.uint64(upper)) - ONE
    return unary | (low << np.uint64(upper + 1)), np.uint64(upper + 1 + k)


@compiled
def write(
    indexes: Array, magnitudes: Array, m: int, starts: Array, join: int, best: Array, sizes: Array, out: Array
) -> int:
    """Writes the directory and all blocks, with the magnitude of each index after its gap if m >= 0."""
    fine = len(starts) - 1
    at = 0
    for block in range(len(best)):
        count = starts[min((block + 1) << join, fine)] - starts[block << join]
        at = _put_varint(out, at, count)
        if count:
            out[at] = np.uint8(best[block])
            at = _put_varint(out, at + 1, sizes[block])
    for block in range(len(best)):
        first = block << join
        before = (first << FINE) - 1
        bits, used = np.uint64(0), np.uint64(0)
        for j in range(starts[first], starts[min((block + 1) << join, fine)]):
            code, width = _code(indexes[j] - before - 1, best[block])
            before = indexes[j]
            bits |= code << used
            used += width
            while used >= np.uint64(8):
                out[at] = np.uint8(bits & np.uint64(255))
                bits >>= np.uint64(8)
                used -= np.uint64(8)
                at += 1
            if m >= 0:
                code, width = _code(magnitudes[j] - 1, m)
                bits |= code << used
                used += width
                while used >= np.uint64(8):
                    out[at] = np.uint8(bits & np.uint64(255))
                    bits >>= np.uint64(8)
                    used -= np.uint64(8)
                    at += 1
        if used:
            out[at] = np.uint8(bits)
            at += 1
    return at


@compiled
def _get_varint(data: Array, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; -1 if it does not end, or is longer than needed or than 63 bits."""
    number: Any = 0
    shift = 0
    while at < end and shift < 63:
        byte = np.int64(data[at])
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return (-1 if byte == 0 and shift else number), at
        shift += 7
    return -1, at


@compiled
def directory(
    data: Array,
    at: int,
    end: int,
    length: int,
    count: int,
    shift: int,
    counts: Array,
    ks: Array,
    sizes: Array,
) -> tuple[int, int]:
    """Reads the directory into arrays of one element per block. Returns what is wrong, and where it ends."""
    total, payload = 0, 0
    for block in range(len(counts)):
        here, at = _get_varint(data, at, end)
        if here < 0 or here > min(length - (block << shift), 1 << shift):
            return 1, at
        counts[block] = here
        ks[block] = sizes[block] = 0
        total += here
        if here:
            if at >= end or data[at] > LARGEST_K:
                return 2, at
            ks[block] = data[at]
            size, at = _get_varint(data, at + 1, end)
            if size < 0 or size > end - at:
                return 3, at
            sizes[block] = size
            payload += size
    if total != count:
        return 4, at
    if payload > end - at:
        return 3, at
    return 0, at


@compiled
def _number(words: Array, at: Any, k: Any) -> tuple[Any, Any]:
    """The number whose code begins at bit `at`, and where it ends. Without unpredictable branches."""
    word, bit = np.int64(at >> np.uint64(6)), at & np.uint64(63)
    bits = (words[word] >> bit) | ((words[word + 1] << (np.uint64(63) - bit)) << ONE)
    upper = trailing_zeros(~bits)
    if upper >= np.uint64(ESCAPE):  # rare
        return (bits >> np.uint64(ESCAPE)) & np.uint64((1 << WIDE) - 1), at + np.uint64(ESCAPE + WIDE)
    low = (bits >> (upper + ONE)) & ((ONE << k) - ONE)
    return (upper << k) | low, at + upper + ONE + k


@compiled
def inspect(words: Array, length: int, shift: int, m: int, counts: Array, ks: Array, sizes: Array) -> int:
    """Checks all blocks: 0, or what is wrong. Two words of zeros must follow the blocks."""
    begin = np.uint64(0)
    for block in range(len(counts)):
        at, end = begin, begin + np.uint64(8 * sizes[block])
        limit = min(length, (block + 1) << shift)
        index: Any = (block << shift) - 1
        k = np.uint64(ks[block])
        for _ in range(counts[block]):
            gap, at = _number(words, at, k)
            if m >= 0 and at <= end:
                _, at = _number(words, at, np.uint64(m))
            if at > end:
                return 5
            index += np.int64(gap) + 1
        if index >= limit:  # the last is the largest
            return 6
        if at + np.uint64(7) < end:
            return 7
        while at < end:
            if (words[np.int64(at >> np.uint64(6))] >> (at & np.uint64(63))) & ONE:
                return 7
            at += ONE
        begin = end
    return 0


@compiled
def add_signs(
    words: Array, shift: int, m: int, counts: Array, ks: Array, sizes: Array, signs: Array, tau: Any,
    scale: Any, into: Array,
) -> None:  # fmt: skip
    """into[i] += ±tau · scale, times the magnitude if m >= 0, from blocks that `inspect` has accepted."""
    kind = into.dtype.type
    begin, n = np.uint64(0), 0
    for block in range(len(counts)):
        at, k = begin, np.uint64(ks[block])
        index: Any = (block << shift) - 1
        for _ in range(counts[block]):
            gap, at = _number(words, at, k)
            index += np.int64(gap) + 1
            value = tau
            if m >= 0:
                more, at = _number(words, at, np.uint64(m))
                value = kind(np.int64(more) + 1) * tau
            value *= scale
            into[index] += -value if (signs[n >> 3] >> (n & 7)) & 1 else value
            n += 1
        begin += np.uint64(8 * sizes[block])


@compiled
def add_values(
    words: Array, shift: int, counts: Array, ks: Array, sizes: Array, values: Array, into: Array
) -> None:
    """into[i] += value, from blocks that `inspect` has accepted."""
    begin, n = np.uint64(0), 0
    for block in range(len(counts)):
        at, k = begin, np.uint64(ks[block])
        index: Any = (block << shift) - 1
        for _ in range(counts[block]):
            gap, at = _number(words, at, k)
            index += np.int64(gap) + 1
            into[index] += values[n]
            n += 1
        begin += np.uint64(8 * sizes[block])


@compiled
def list_all(
    words: Array,
    shift: int,
    m: int,
    counts: Array,
    ks: Array,
    sizes: Array,
    indexes: Array,
    magnitudes: Array,
) -> None:
    """All indexes, and the magnitudes if m >= 0, from blocks that `inspect` has accepted."""
    begin, n = np.uint64(0), 0
    for block in range(len(counts)):
        at, k = begin, np.uint64(ks[block])
        index: Any = (block << shift) - 1
        for _ in range(counts[block]):
            gap, at = _number(words, at, k)
            index += np.int64(gap) + 1
            indexes[n] = index
            if m >= 0:
                more, at = _number(words, at, np.uint64(m))
                magnitudes[n] = np.int64(more) + 1
            n += 1
        begin += np.uint64(8 * sizes[block])


@compiled
def write_trits(indexes: Array, negative: Array, out: Array) -> None:
    """Writes five parameters to a byte, in base 3: absent, plus or minus."""
    out[:] = 0
    powers = (1, 3, 9, 27, 81)
    for j in range(len(indexes)):
        at = indexes[j] // 5
        out[at] += np.uint8(powers[indexes[j] - 5 * at] * (2 if negative[j] else 1))


@compiled
def inspect_trits(data: Array, length: int, count: int) -> int:
    """Checks trits: 0, or what is wrong."""
    seen = 0
    for at in range(len(data)):
        byte = data[at]
        if byte > 242:
            return 8
        for place in range(5):
            digit = byte % 3
            byte //= 3
            if digit:
                if 5 * at + place >= length:
                    return 6
                seen += 1
    return 0 if seen == count else 4


@compiled
def list_trits(data: Array, indexes: Array, negative: Array) -> None:
    """All indexes and signs, from bytes that `inspect_trits` has accepted."""
    n = 0
    for at in range(len(data)):
        byte = data[at]
        for place in range(5):
            if byte % 3:
                indexes[n] = 5 * at + place
                negative[n] = byte % 3 == 2
                n += 1
            byte //= 3
