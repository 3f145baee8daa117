"""Reads sparse messages, and checks every byte of them first."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.compress.kernels import load
from polyrhythm.compress.kernels.entropy.format import (
    DOUBLE,
    HALF,
    JOINS,
    LARGEST_TAU,
    MAGIC,
    PULSES,
    SINGLE,
    TRITS,
    VERSION,
    WRONG,
    plane_size,
    read_only,
    refused,
    times,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def add(code: Array, into: Array, scale: float = 1.0) -> None:
    """into[i] += scale * value for each entry of a message. Adds nothing if it is invalid: WireError."""
    message = open_message(code, len(into))
    rice, kind = load().rice, into.dtype.type
    if message.count == 0:
        return
    if message.mode == TRITS or message.values is not None:
        values = message.values_as(into.dtype) * kind(scale)
        if message.mode == TRITS:
            into[message.list()[0]] += values
        else:
            words, shift, _, counts, ks, sizes = message.coded_blocks
            rice.add_values(words, shift, counts, ks, sizes, values, into)
        return
    rice.add_signs(*message.coded_blocks, message.plane, kind(message.tau), kind(scale), into)


def count(code: Array, into: Array, tau: float) -> None:
    """into[i] += the number of pulses at i. Adds nothing if they are not of ±tau: WireError."""
    message = _pulses(code, len(into), tau)
    if message.mode == TRITS:
        indexes, pulses = message.list()
        into[indexes] += pulses
    elif message.count:
        one = into.dtype.type(1)
        load().rice.add_signs(*message.coded_blocks, message.plane, one, one, into)


def unpack_pulses(code: Array, length: int, tau: float) -> tuple[Array, Array]:
    """The indexes and pulses of a message, for vectors that are not on the CPU."""
    return _pulses(code, length, tau).list()


def unpack(code: Array, length: int, dtype: Any) -> tuple[Array, Array]:
    """The indexes and values of a message, for vectors that are not on the CPU."""
    message = open_message(code, length)
    return message.list()[0], message.values_as(dtype)


def _pulses(code: Array, length: int, tau: float) -> SparseMessage:
    """Opens a message; WireError unless it has pulses of ±tau."""
    message = open_message(code, length)
    if message.mode > TRITS:
        raise refused("it has values in place of pulses")
    if message.tau != tau:
        raise refused(f"its pulses are of {message.tau}, not of {tau}")
    return message


class Blocks(NamedTuple):
    """The indexes of a message: Rice codes in blocks, and the directory of the blocks."""

    words: Array
    shift: int  # log2 of the parameters in a block
    m: int  # the Rice parameter of magnitudes; -1 if there are none
    counts: Array
    ks: Array
    sizes: Array


@dataclass(frozen=True)
class SparseMessage:
    """A message whose bytes have all been checked."""

    mode: int
    count: int
    tau: float = 0.0
    exponent: int = 0
    blocks: Blocks | None = None
    plane: Array | None = None
    values: Array | None = None  # in modes with a value for each index

    @property
    def coded_blocks(self) -> Blocks:
        assert self.blocks is not None
        return self.blocks

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
            rice.list_all(*self.coded_blocks, indexes, pulses)
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
            with np.errstate(all="ignore"):  # overflow is checked below
                got: Array = times(self.values.astype(dtype), self.exponent)
            if not np.isfinite(got).all():
                raise refused("a value is not finite")
            return got
        signed: Array = self.list()[1].astype(dtype) * kind(self.tau)
        return signed


class ByteReader:
    """Takes the bytes of a message in order; WireError if there are not enough."""

    def __init__(self, code: Array) -> None:
        self.code, self.at, self.end = code, 0, len(code) - 4

    def take(self, size: int) -> Array:
        if size > self.end - self.at:
            raise refused("it ends too early")
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
        raise refused("a number in its header is not terminated")


def open_message(code: Array, length: int) -> SparseMessage:
    """Checks the bytes of a message for a vector of this length; WireError says what is wrong."""
    import google_crc32c
    import numpy as np

    if code.dtype != np.uint8 or code.ndim != 1 or len(code) < 9:
        raise refused("it is too short")
    if code[:2].tobytes() != MAGIC:
        raise refused("its first bytes are wrong")
    if code[2] >> 4 != VERSION:
        raise refused(f"its format has version {code[2] >> 4}, and this program reads {VERSION}")
    if google_crc32c.value(read_only(code[:-4])) != struct.unpack("<I", code[-4:].tobytes())[0]:
        raise refused("its checksum is wrong")
    mode = int(code[2] & 15)
    if mode > DOUBLE:
        raise refused(f"there is no mode {mode}")
    reader = ByteReader(code)
    reader.take(3)
    if (said := reader.number()) != length:
        raise refused(f"it is for {said} numbers, not {length}")
    if (count := reader.number()) > length:
        raise refused(f"it has {count} entries for {length} numbers")
    found: dict[str, Any] = {}
    if mode <= TRITS:
        found["tau"] = struct.unpack("<f", reader.take(4).tobytes())[0]
        if not 0 < found["tau"] <= LARGEST_TAU:
            raise refused(f"its tau is {found['tau']}")
    elif mode == HALF:
        found["exponent"] = struct.unpack("<h", reader.take(2).tobytes())[0]
    m = -1
    if mode == PULSES:
        m = int(reader.take(1)[0])
        if m > load().rice.LARGEST_K:
            raise refused(WRONG[2])
    if count and mode != TRITS:
        found["blocks"] = _blocks(reader, length, count, m)
    if count:
        found["plane"] = plane = reader.take(plane_size(mode, length, count))
        if mode >= HALF:
            found["values"] = _values(mode, plane)
        elif mode == TRITS:
            found["plane"] = plane = plane.copy()  # another process may be able to write to the original
            _check(load().rice.inspect_trits(plane, length, count))
        elif count % 8 and plane[-1] >> count % 8:
            raise refused(WRONG[7])
    if reader.at != reader.end:
        raise refused(f"{reader.end - reader.at} bytes follow its end")
    return SparseMessage(mode, count, **found)


def _blocks(reader: ByteReader, length: int, count: int, m: int) -> Blocks:
    """Reads and checks the directory and the blocks."""
    import numpy as np

    rice = load().rice
    shift = int(reader.take(1)[0])
    if shift - rice.FINE not in JOINS:
        raise refused(f"its blocks have 2^{shift} parameters")
    counts, ks, sizes = (np.empty(((length - 1) >> shift) + 1, np.int64) for _ in range(3))
    wrong, at = rice.directory(reader.code, reader.at, reader.end, length, count, shift, counts, ks, sizes)
    _check(wrong)
    reader.at = at
    blocks = reader.take(int(sizes.sum()))
    # A copy: aligned, with zeros after the end that may be read, and safe from writes of other processes.
    words = np.zeros(len(blocks) // 8 + 3, "<u8")
    words.view(np.uint8)[: len(blocks)] = blocks
    _check(rice.inspect(words, length, shift, m, counts, ks, sizes))
    return Blocks(words, shift, m, counts, ks, sizes)


def _values(mode: int, plane: Array) -> Array:
    """The numbers of a plane, aligned and in this machine's order."""
    import numpy as np

    return np.frombuffer(plane.tobytes(), {HALF: "<f2", SINGLE: "<f4", DOUBLE: "<f8"}[mode])


def _check(wrong: int) -> None:
    if wrong:
        raise refused(WRONG[wrong])
