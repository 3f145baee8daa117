"""Sparse messages: what is packed is unpacked, in as few bits as theory allows, and no bytes do harm."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import tracemalloc

import google_crc32c
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyrhythm.compress.kernels import entropy
from polyrhythm.compress.kernels.entropy.format import JOINS
from polyrhythm.compress.kernels.entropy.reader import open_message
from polyrhythm.core.errors import WireError

FINE = 1 << 16
LENGTHS = (1, 2, 5, 9, 1000, FINE - 1, FINE, FINE + 1, 5 * FINE + 77, 40 * FINE)
PATIENT = settings(deadline=None)  # the first call compiles


@st.composite
def places(draw):
    """A length and ascending indexes: none, all, the last, far apart, in a heap, or anywhere."""
    length = draw(st.sampled_from(LENGTHS))
    kind = draw(st.sampled_from(("none", "all", "last", "ends", "heap", "anywhere", "escape")))
    if kind == "all":
        length = min(length, 5 * FINE + 77)
        return length, np.arange(length)
    if kind == "heap":  # thousands of neighbours, then a gap that no Rice parameter of theirs likes
        length = max(length, FINE)
        begin = draw(st.integers(0, length - FINE // 2))
        found = [*range(begin, begin + draw(st.integers(1, 3000))), length - 1]
    elif kind == "escape":
        length = max(length, 5 * FINE)
        found = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, draw(st.integers(10, FINE - 1)), length - 1]
    elif kind == "anywhere":
        found = draw(st.lists(st.integers(0, length - 1), max_size=200))
    else:
        found = {"none": [], "last": [length - 1], "ends": [0, length - 1]}[kind]
    return length, np.unique(np.array(found, dtype=np.int64))


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(places(), st.integers(0, 99), st.sampled_from((1, 2, 40, 10**6, (1 << 24) - 1)))
@PATIENT
def test_unpacking_returns_the_packed_pulses(place, seed, largest):
    length, indexes = place
    draws = generator(seed)
    pulses = draws.integers(1, largest + 1, len(indexes)).astype(np.int32)
    pulses *= draws.choice(np.array([-1, 1], np.int32), len(indexes))
    code = entropy.pack_pulses(length, indexes, pulses, 0.25)
    for dtype in ("float32", "float64"):
        found, values = entropy.unpack(code, length, dtype)
        assert np.array_equal(found, indexes)
        assert np.array_equal(values, pulses.astype(dtype) / 4) and values.dtype == dtype
        vector = np.zeros(length, dtype)
        entropy.add(code, vector, -2.0)
        expected = np.zeros(length, dtype)
        expected[indexes] = pulses.astype(dtype) / -2
        assert np.array_equal(vector, expected)


@given(places(), st.integers(0, 99), st.sampled_from(("float32", "float64")), st.booleans())
@PATIENT
def test_unpacking_returns_the_packed_values(place, seed, dtype, half):
    length, indexes = place
    values = generator(seed).standard_normal(len(indexes)).astype(dtype)
    code, got = entropy.pack_values(length, indexes, values, half)
    found, read = entropy.unpack(code, length, dtype)
    assert np.array_equal(found, indexes)
    assert np.array_equal(read, got) and read.dtype == got.dtype == dtype
    assert half or np.array_equal(got, values)
    vector, expected = np.ones(length, dtype), np.ones(length, dtype)
    entropy.add(code, vector, 0.3)
    expected[indexes] += got * np.dtype(dtype).type(0.3)
    assert np.array_equal(vector, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-300, 1e-44, 1e-30, 1e-9, 1.0, 65519.0, 1e9, 3e38, 1e300])
def test_half_precision_values_keep_eleven_bits_at_any_magnitude(dtype, size):
    """Plain 16-bit floats would be zero below 6e-8 and infinite above 65,520."""
    values = (generator(0).uniform(0.5, 1, 1000) * min(size, float(np.finfo(dtype).max))).astype(dtype)
    _, got = entropy.pack_values(len(values), np.arange(len(values)), values, half=True)
    assert (np.abs(got - values) <= np.abs(values) * 2.0**-11).all()
    assert np.array_equal((values - got) + got, values)


def rice_bits(gap: int, k: int) -> int:
    return (gap >> k) + 1 + k if gap >> k < 32 else 56


def varint_size(number: int) -> int:
    return max(1, math.ceil(number.bit_length() / 7))


@given(places())
@settings(PATIENT, max_examples=30)
def test_pack_pulses_uses_the_shortest_encoding(place):
    """No other k for any block, nor another size of blocks, would make it shorter."""
    length, indexes = place
    assume(0 < len(indexes) <= 3000)
    ways = []
    for join in JOINS:
        size = FINE << join
        total = 1
        for begin in range(0, length, size):
            inside = indexes[(indexes >= begin) & (indexes < begin + size)]
            if len(inside):
                gaps = np.diff(inside, prepend=begin - 1) - 1
                block = min(math.ceil(sum(rice_bits(int(gap), k) for gap in gaps) / 8) for k in range(25))
                total += block + varint_size(block) + 1
            total += varint_size(len(inside))
        ways.append(total)
    plane = math.ceil(len(indexes) / 8)
    header = 3 + varint_size(length) + varint_size(len(indexes)) + 4
    code = entropy.pack_pulses(length, indexes, np.ones(len(indexes), np.int32), 1.0)
    assert len(code) == header + min(min(ways) + plane, math.ceil(length / 5)) + 4


TABLE = {0.1: 5.756, 1 / 16: 6.480, 0.03: 7.592, 0.01: 9.108, 1e-3: 12.495, 1e-4: 15.788}
HEADER = 19  # bytes that do not depend on what is in the message


@pytest.mark.parametrize("length", [1 << 20, 10_000_000])
@pytest.mark.parametrize("density", TABLE)
def test_packed_size_is_within_2_percent_of_the_rice_code_theory(density, length):
    """Rice codes of Bernoulli gaps and a bit for the sign: within 2 %, with directories and all."""
    draws = generator(1)
    indexes = np.flatnonzero(draws.random(length) < density)
    pulses = draws.choice(np.array([-1, 1], np.int32), len(indexes))
    size = len(entropy.pack_pulses(length, indexes, pulses, 1e-3))
    small = len(indexes) < 1000  # then the header is more than 2 % by itself
    bits = 8 * (size - HEADER * small) / len(indexes)
    # The number of bits of so few is itself a draw, with a deviation of about 1.2 bits each.
    assert abs(bits / TABLE[density] - 1) < 0.02 + 3 * 1.2 / TABLE[density] / math.sqrt(len(indexes)) * small


def test_one_permille_of_a_million_parameters_packs_below_1900_bytes():
    """0.1 % of 1,111,946 parameters: 12.5 bits for each entry, and hardly more."""
    indexes = np.flatnonzero(generator(2).random(1_111_946) < 1e-3)[:1112]
    assert len(indexes) > 1050
    assert len(entropy.pack_pulses(1_111_946, indexes, np.ones(len(indexes), np.int32), 1e-3)) < 1900


def test_layers_of_different_density_have_their_own_parameter():
    """A dense half and a nearly empty one cost what each costs alone."""
    draws = generator(3)
    length = 64 * FINE
    dense = np.flatnonzero(draws.random(length // 2) < 0.1)
    thin = np.flatnonzero(draws.random(length // 2) < 1e-4) + length // 2
    sizes = [
        len(entropy.pack_pulses(length, part, np.ones(len(part), np.int32), 1.0))
        for part in (dense, thin, np.concatenate([dense, thin]))
    ]
    assert sizes[2] < sizes[0] + 1.5 * sizes[1]


def test_bytes_of_a_packed_block_do_not_depend_on_other_blocks():
    """The bytes of a block do not depend on what is in the others: it can be read by itself."""
    length, draws = 4 * FINE, generator(5)
    densities = np.repeat([0.2, 0.01, 0.3, 0.005], FINE)  # alike, they would be made one
    marks = draws.random(length) < densities

    def blocks(marked):
        indexes = np.flatnonzero(marked)
        code = entropy.pack_pulses(length, indexes, np.ones(len(indexes), np.int32), 1.0)
        message = open_message(code, length).coded_blocks
        assert message.shift == 16
        ends = np.cumsum(message.sizes)
        data = message.words.view(np.uint8)
        return [data[end - size : end].tobytes() for end, size in zip(ends, message.sizes, strict=True)]

    for block in range(4):
        others = draws.random(length) < densities
        others[block * FINE : (block + 1) * FINE] = marks[block * FINE : (block + 1) * FINE]
        assert [a == b for a, b in zip(blocks(marks), blocks(others), strict=True)].index(True) == block


def test_full_vectors_take_five_signs_to_a_byte():
    code = entropy.pack_pulses(10_000, np.arange(10_000), np.ones(10_000, np.int32), 1.0)
    assert len(code) < 2000 + 20


# What no honest sender sends.


def sealed(data: bytes | bytearray) -> np.ndarray:
    """Bytes with the checksum they should have."""
    return np.frombuffer(bytes(data) + struct.pack("<I", google_crc32c.value(bytes(data))), np.uint8).copy()


def samples() -> list[tuple[int, np.ndarray]]:
    """A message of each mode, and an empty one."""
    draws = generator(4)
    made = []
    for length, density in ((3 * FINE, 0.01), (300, 0.9), (5, 0.0)):
        indexes = np.flatnonzero(draws.random(length) < density)
        signs = draws.choice(np.array([-1, 1], np.int32), len(indexes))
        values = draws.standard_normal(len(indexes))
        made += [
            (length, entropy.pack_pulses(length, indexes, signs, 1.0)),
            (length, entropy.pack_pulses(length, indexes, signs * 3, 1.0)),
            (length, entropy.pack_values(length, indexes, values, True)[0]),
            (length, entropy.pack_values(length, indexes, values, False)[0]),
            (length, entropy.pack_values(length, indexes, values.astype(np.float32), False)[0]),
        ]
    return made


SAMPLES = samples()


def refused(code: np.ndarray, length: int) -> bool:
    """Whether a message is refused; if so nothing is added, and hardly any memory was asked for."""
    vector = np.zeros(length)
    tracemalloc.start()
    try:
        entropy.add(code, vector)
    except WireError as error:
        assert not vector.any()
        assert tracemalloc.get_traced_memory()[1] < 100_000 + 16 * len(code)
        assert "sparse message" in str(error)
        return True
    finally:
        tracemalloc.stop()
    return False


@given(st.sampled_from(SAMPLES), st.data())
@PATIENT
def test_a_flipped_bit_is_refused(sample, data):
    length, code = sample
    bit = data.draw(st.integers(0, 8 * len(code) - 1))
    changed = code.copy()
    changed[bit // 8] ^= 1 << bit % 8
    assert refused(changed, length)


@given(st.sampled_from(SAMPLES), st.data())
@PATIENT
def test_a_cut_or_longer_message_is_refused(sample, data):
    length, code = sample
    assert refused(code[: data.draw(st.integers(0, len(code) - 1))], length)
    body = bytes(code[:-4])
    assert refused(sealed(body[: data.draw(st.integers(0, len(body) - 1))]), length)
    assert refused(sealed(body + b"\0"), length)


@given(st.sampled_from(SAMPLES), st.data())
@settings(PATIENT, max_examples=500)
def test_changed_bytes_with_a_valid_checksum_are_refused_or_decode_safely(sample, data):
    """They are refused, or they are another message."""
    length, code = sample
    body = bytearray(code[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        front = data.draw(st.booleans())  # headers and directories are more fragile than the rest
        place = data.draw(st.integers(0, min(len(body), 30 if front else len(body)) - 1))
        body[place] = data.draw(st.integers(0, 255))
    changed = sealed(body)
    if not refused(changed, length):
        indexes, values = entropy.unpack(changed, length, np.float64)
        assert len(indexes) == len(values) <= length
        assert (np.diff(indexes) > 0).all() and (indexes < length).all() and (indexes >= 0).all()
        assert np.isfinite(values).all()


@given(st.binary(max_size=300), st.integers(0, 5), st.sampled_from(LENGTHS[:-1]))
@settings(PATIENT, max_examples=300)
def test_unpacking_arbitrary_bytes_raises_or_decodes_safely(data, mode, length):
    refused(np.frombuffer(data, np.uint8).copy(), length)
    head = b"Sp" + bytes([1 << 4 | mode]) + varint(length)
    refused(sealed(head + data), length)


def varint(number: int) -> bytes:
    digits = []
    while number >= 128:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


ONE = struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"Sq\x10\x0a\x00" + ONE, "first bytes"),
        (b"Sp\x20\x0a\x00" + ONE, "version 2"),
        (b"Sp\x1f\x0a\x00" + ONE, "no mode 15"),
        (b"Sp\x10\x0b\x00" + ONE, "for 11 numbers, not 10"),
        (b"Sp\x10\x0a\x0b" + ONE, "11 entries for 10"),
        (b"Sp\x10\x0a\x80\x00" + ONE, "not terminated"),
        (b"Sp\x10\x0a\x00" + struct.pack("<f", math.nan), "tau is nan"),
        (b"Sp\x10\x0a\x00" + struct.pack("<f", -1), "tau is -1"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x11\x01\x00\x01\x00\x00", "2^17"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x0b\x00\x01\x00\x00", "more entries than parameters"),
        (b"Sp\x10\x0a\x02" + ONE + b"\x10\x01\x00\x01\x00\x00", "not as many"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x19\x01\x00\x00", "Rice parameter"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x09\x00\x00", "longer than the message"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x01\xff\x00", "within a number"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x02\xff\x03\x00", "beyond the end"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x01\x02\x00", "mean nothing"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x02\x00\x00\x00", "mean nothing"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x01\x00\x02", "mean nothing"),
        (b"Sp\x10\x0a\x01" + ONE + b"\x10\x01\x00\x01\x00\x01\x00", "1 bytes follow its end"),
        (b"Sp\x12\x0a\x01" + ONE + b"\xf3\x00", "five digits"),
        (b"Sp\x12\x0a\x02" + ONE + b"\x01\x00", "not as many"),
        (b"Sp\x12\x08\x01" + ONE + b"\x00\x51", "for 8 numbers"),
        (b"Sp\x13\x0a\x01\x00\x00\x10\x01\x00\x01\x00\x00\x7c", "not finite"),
        (b"Sp\x13\x0a\x01\xff\x7f\x10\x01\x00\x01\x00\x00\x70", "not finite"),
        (b"Sp\x10\x0a\x00" + struct.pack("<f", 2.0**101), "tau is 2.5"),
        (b"Sp\x14\x0a\x01\x10\x01\x00\x01\x00\x00\x00\xc0\x7f", "not finite"),
    ],
)  # fmt: skip
def test_errors_of_malformed_sparse_messages_name_the_defect(body, why):
    with pytest.raises(WireError, match=why.replace("^", r"\^")):
        entropy.add(sealed(body), np.zeros(10))


def test_a_digit_beyond_the_end_is_refused():
    with pytest.raises(WireError, match="beyond the end"):
        entropy.add(sealed(b"Sp\x12\x08\x01" + ONE + b"\x00\x51"), np.zeros(8))


@pytest.mark.slow
def test_sparse_codec_without_numba_says_what_to_install():
    """And only when a codec is used: the command line can list them without."""
    program = """if True:
        import sys
        sys.modules["numba"] = None
        import polyrhythm as pr
        from polyrhythm.core.errors import UsageError
        from polyrhythm.core.registry import describe
        assert {"topk", "randomk", "threshold"} <= {row.name for row in describe("codec")}
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        import torch
        from polyrhythm.core.registry import parse_codec
        try:
            parse_codec("topk").prepare(torch.float32)
        except UsageError as error:
            print(error)
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "numba" in done.stdout and "pip install 'polyrhythm[codecs]'" in done.stdout, done
