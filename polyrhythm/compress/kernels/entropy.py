"""The wire format of sparse messages: sorted indexes in a vector of known length, and a value for each.

    magic "Sp" | version and mode u8 | length | count | tau f32, or a power of two i16 | [k of magnitudes u8]
    | [log2 of the block u8, directory, blocks] | plane of values | CRC32C of all before u32

Lengths and counts are varints, all else is little-endian. What is in the planes, by mode:

    signs    one bit each (1 is minus); the value is ±tau
    pulses   the same, and after each gap in a block the magnitude less one; the value is ±magnitude · tau
    trits    signs, when nearly all are there: a digit of base 3 for every parameter, five to a byte
    half     16-bit floats, times a power of two that brings the largest near the top of their range, so
             that small gradients do not vanish
    single, double    32 and 64-bit floats

Indexes are gaps (how many parameters are skipped) in Rice codes. A block starts anew: its first gap counts
from its own beginning, on a byte of its own, so blocks can be read in any order. The directory has for each
block its count and, unless that is 0, its k (layers differ in density) and its bytes. Blocks have 2^16
parameters, or 4, 16, 64, 256 times as many where entries are so few that directories would cost more than
they bring. Between all these the exact cost decides. Who sent it, when, and the layout of the model are in
the frame around it (`polyrhythm.wire.frame`).

A reader believes nothing: a message that is not exactly of this form, for a vector of exactly this length,
is a WireError, and then nothing was added to anything.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.compress.kernels import load
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAGIC, VERSION = b"Sp", 1
SIGNS, PULSES, TRITS, HALF, SINGLE, DOUBLE = range(6)
NAMES = ("signs", "pulses", "trits", "half", "single", "double")
LARGEST_TAU = 2.0**100  # so that no multiple of it is infinite
JOINS = (0, 2, 4, 6, 8)  # a block is 2**join fine ones
WRONG = (
    "",
    "a block has more entries than parameters",
    "a Rice parameter is out of range",
    "blocks are longer than the message",
    "the entries are not as many as the header says",
    "a block ends within a number",
    "an index is beyond the end",
    "a block has bytes or bits that mean nothing",
    "a byte is no five digits of base 3",
)


def pack_pulses(length: int, indexes: Array, pulses: Array, tau: float) -> Array:
    """The message "pulses[j] times tau at indexes[j]", in the fewest bytes. Indexes ascend; no pulse is 0."""
    import numpy as np

    rice = load().rice
    count = len(indexes)
    scale = struct.pack("<f", tau)
    if not count:
        return _sealed(SIGNS, length, 0, scale)
    signs = np.packbits(pulses < 0, bitorder="little")
    magnitudes = np.abs(pulses)
    m = -1 if int(magnitudes.max()) == 1 else _best_k(magnitudes - 1)
    if m >= 0:
        scale += bytes([m])
    indexed = _plan(length, indexes, magnitudes, m)
    trits = (length + 4) // 5
    if m < 0 and trits < indexed.size + 1 + len(signs):
        dense = np.empty(trits, np.uint8)
        rice.write_trits(indexes, pulses < 0, dense)
        return _sealed(TRITS, length, count, scale, dense)
    blocks = indexed.write(indexes, magnitudes, m)
    return _sealed(SIGNS if m < 0 else PULSES, length, count, scale, blocks, signs)


def pack_values(length: int, indexes: Array, values: Array, half: bool) -> tuple[Array, Array]:
    """The message "values[j] at indexes[j]", and the values that its reader will get. Indexes ascend."""
    import numpy as np

    mode = HALF if half else SINGLE if values.dtype == np.float32 else DOUBLE
    scale, plane, got = b"", values, values
    if half:
        exponent = _exponent(values)
        plane = _times(values, -exponent).astype(np.float16)
        got = _times(plane.astype(values.dtype), exponent)
        scale = struct.pack("<h", exponent)
    if not len(indexes):
        return _sealed(mode, length, 0, scale), got
    ones = np.empty(0, np.int32)
    blocks = _plan(length, indexes, ones, -1).write(indexes, ones, -1)
    little = plane.astype(plane.dtype.newbyteorder("<"), copy=False)
    return _sealed(mode, length, len(indexes), scale, blocks, little.view(np.uint8)), got


def add(code: Array, into: Array, scale: float = 1.0) -> None:
    """into[i] += scale * value for all a message says; WireError, and nothing is added, if it is none."""
    message = _open(code, len(into))
    rice, kind = load().rice, into.dtype.type
    if message.count == 0:
        return
    if message.mode == TRITS or message.values is not None:
        values = message.values_as(into.dtype) * kind(scale)
        if message.mode == TRITS:
            into[message.list()[0]] += values
        else:
            rice.add_values(
                message.words, message.shift, message.counts, message.ks, message.sizes, values, into
            )
        return
    rice.add_signs(
        message.words, message.shift, message.m, message.counts, message.ks, message.sizes, message.plane,
        kind(message.tau), kind(scale), into,
    )  # fmt: skip


def count(code: Array, into: Array, tau: float) -> None:
    """into[i] += the pulses at i, whole numbers; WireError, and nothing is added, if they are not of ±tau."""
    message = _pulses(code, len(into), tau)
    if message.mode == TRITS:
        indexes, pulses = message.list()
        into[indexes] += pulses
    elif message.count:
        one = into.dtype.type(1)
        load().rice.add_signs(
            message.words, message.shift, message.m, message.counts, message.ks, message.sizes, message.plane,
            one, one, into,
        )  # fmt: skip


def unpack_pulses(code: Array, length: int, tau: float) -> tuple[Array, Array]:
    """The indexes and pulses that a message says, for those who cannot use `count`."""
    return _pulses(code, length, tau).list()


def unpack(code: Array, length: int, dtype: Any) -> tuple[Array, Array]:
    """The indexes and values that a message says, for those who cannot use `add`; WireError if it is none."""
    message = _open(code, length)
    return message.list()[0], message.values_as(dtype)


def _pulses(code: Array, length: int, tau: float) -> _Message:
    """The message that the bytes are, if it is of pulses of ±tau."""
    message = _open(code, length)
    if message.mode > TRITS:
        raise _refused("it has values, and pulses are wanted")
    if message.tau != tau:
        raise _refused(f"its pulses are of {message.tau}, not of {tau}")
    return message


class _Plan(NamedTuple):
    """How indexes are cut into blocks."""

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


def _plan(length: int, indexes: Array, magnitudes: Array, m: int) -> _Plan:
    """The cheapest way to cut."""
    rice = load().rice
    costs, starts = rice.survey(indexes, length)
    extra = rice.extra_bits(magnitudes, starts, m)
    best: _Plan | None = None
    for join in JOINS:
        size, ks, sizes = rice.plan(indexes, costs, starts, join, extra)
        if best is None or size < best.size:
            best = _Plan(starts, join, size, ks, sizes)
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


def _times(values: Array, exponent: int) -> Array:
    """values · 2^exponent."""
    import numpy as np

    if abs(exponent) > 100:  # the power itself may be beyond the range, though the product is not
        return np.ldexp(values, exponent)
    product: Array = values * values.dtype.type(2.0**exponent)
    return product


def _sealed(mode: int, length: int, count: int, *parts: bytes | Array) -> Array:
    """A message, with its header and its checksum."""
    import google_crc32c
    import numpy as np

    head = MAGIC + bytes([VERSION << 4 | mode]) + _varint(length) + _varint(count)
    arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in (head, *parts)]
    whole = np.empty(sum(map(len, arrays)) + 4, np.uint8)
    np.concatenate(arrays, out=whole[:-4])
    whole[-4:] = np.frombuffer(struct.pack("<I", google_crc32c.value(_read_only(whole[:-4]))), np.uint8)
    return whole


def _read_only(array: Array) -> Array:
    """A view that google_crc32c takes."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class _Message:
    """A message that was looked through, and is right."""

    mode: int
    count: int
    tau: float = 0.0
    exponent: int = 0
    m: int = -1
    shift: int = 0
    words: Array | None = None  # the blocks
    counts: Array | None = None
    ks: Array | None = None
    sizes: Array | None = None
    plane: Array | None = None
    values: Array | None = None  # of modes with a value each

    def list(self) -> tuple[Array, Array]:
        """All indexes and, for modes with a tau, signed pulses."""
        import numpy as np

        rice = load().rice
        indexes, pulses = np.empty(self.count, np.int64), np.ones(self.count, np.int32)
        if self.count == 0:
            return indexes, pulses
        if self.mode == TRITS:
            assert self.plane is not None
            negative = np.empty(self.count, np.bool_)
            rice.list_trits(self.plane, indexes, negative)
        else:
            rice.list_all(self.words, self.shift, self.m, self.counts, self.ks, self.sizes, indexes, pulses)
            if self.values is not None or self.plane is None:
                return indexes, pulses
            negative = np.unpackbits(self.plane, count=self.count, bitorder="little").view(np.bool_)
        np.negative(pulses, out=pulses, where=negative)
        return indexes, pulses

    def values_as(self, dtype: Any) -> Array:
        """All values."""
        import numpy as np

        kind = np.dtype(dtype).type
        if self.values is not None:
            with np.errstate(all="ignore"):  # what comes of it is looked at
                got: Array = _times(self.values.astype(dtype), self.exponent)
            if not np.isfinite(got).all():
                raise _refused("a value is not finite")
            return got
        signed: Array = self.list()[1].astype(dtype) * kind(self.tau)
        return signed


class _Reader:
    """Takes a message's bytes one part after the other; WireError where there are none left."""

    def __init__(self, code: Array) -> None:
        self.code, self.at, self.end = code, 0, len(code) - 4

    def take(self, size: int) -> Array:
        if size > self.end - self.at:
            raise _refused("it ends too early")
        self.at += size
        return self.code[self.at - size : self.at]

    def number(self) -> int:
        number = shift = 0
        while shift < 63:
            byte = int(self.take(1)[0])
            number |= (byte & 127) << shift
            if byte < 128:
                if byte or not shift:
                    return number
                break
            shift += 7
        raise _refused("a number in its header has no end")


def _open(code: Array, length: int) -> _Message:
    """The message that the bytes are, for a vector of this length."""
    import google_crc32c
    import numpy as np

    if code.dtype != np.uint8 or code.ndim != 1 or len(code) < 9:
        raise _refused("it is too short")
    if code[:2].tobytes() != MAGIC:
        raise _refused("it does not begin with the bytes of one")
    if code[2] >> 4 != VERSION:
        raise _refused(f"its format has version {code[2] >> 4}, and this one reads {VERSION}")
    if google_crc32c.value(_read_only(code[:-4])) != struct.unpack("<I", code[-4:].tobytes())[0]:
        raise _refused("its checksum is wrong")
    mode = int(code[2] & 15)
    if mode > DOUBLE:
        raise _refused(f"there is no mode {mode}")
    reader = _Reader(code)
    reader.take(3)
    if (said := reader.number()) != length:
        raise _refused(f"it is about {said} numbers, not {length}")
    if (count := reader.number()) > length:
        raise _refused(f"it has {count} entries for {length} numbers")
    found: dict[str, Any] = {}
    if mode <= TRITS:
        found["tau"] = struct.unpack("<f", reader.take(4).tobytes())[0]
        if not 0 < found["tau"] <= LARGEST_TAU:
            raise _refused(f"its tau is {found['tau']}")
    elif mode == HALF:
        found["exponent"] = struct.unpack("<h", reader.take(2).tobytes())[0]
    if mode == PULSES:
        found["m"] = int(reader.take(1)[0])
        if found["m"] > load().rice.LARGEST_K:
            raise _refused(WRONG[2])
    if count and mode != TRITS:
        found |= _blocks(reader, length, count, found.get("m", -1))
    if count:
        found["plane"] = plane = reader.take(_plane_size(mode, length, count))
        if mode >= HALF:
            found["values"] = _values(mode, plane)
        elif mode == TRITS:
            found["plane"] = plane = plane.copy()  # it may be memory that another process can write to
            _check(load().rice.inspect_trits(plane, length, count))
        elif count % 8 and plane[-1] >> count % 8:
            raise _refused(WRONG[7])
    if reader.at != reader.end:
        raise _refused(f"it goes on for {reader.end - reader.at} bytes after its end")
    return _Message(mode, count, **found)


def _blocks(reader: _Reader, length: int, count: int, m: int) -> dict[str, Any]:
    """The directory, after all blocks were looked through."""
    import numpy as np

    rice = load().rice
    shift = int(reader.take(1)[0])
    if shift - rice.FINE not in JOINS:
        raise _refused(f"its blocks have 2^{shift} parameters")
    counts, ks, sizes = (np.empty(((length - 1) >> shift) + 1, np.int64) for _ in range(3))
    wrong, at = rice.directory(reader.code, reader.at, reader.end, length, count, shift, counts, ks, sizes)
    _check(wrong)
    reader.at = at
    blocks = reader.take(int(sizes.sum()))
    # A copy: aligned, with zeros to read behind the end, and out of the reach of other processes.
    words = np.zeros(len(blocks) // 8 + 3, "<u8")
    words.view(np.uint8)[: len(blocks)] = blocks
    _check(rice.inspect(words, length, shift, m, counts, ks, sizes))
    return {"shift": shift, "words": words, "counts": counts, "ks": ks, "sizes": sizes}


def _plane_size(mode: int, length: int, count: int) -> int:
    return ((count + 7) // 8, (count + 7) // 8, (length + 4) // 5, 2 * count, 4 * count, 8 * count)[mode]


def _values(mode: int, plane: Array) -> Array:
    """The numbers of a plane, aligned and in this machine's order."""
    import numpy as np

    return np.frombuffer(plane.tobytes(), {HALF: "<f2", SINGLE: "<f4", DOUBLE: "<f8"}[mode])


def _check(wrong: int) -> None:
    if wrong:
        raise _refused(WRONG[wrong])


def _refused(why: str) -> WireError:
    return WireError(f"this is no sparse message: {why}")


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 128:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])
