"""Frames: decoding inverts encoding, and invalid bytes are rejected."""

import ast
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyrhythm.wire
from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.wire.frame import (
    DTYPES,
    MAX_HEADER,
    PREFIX_SIZE,
    Bounds,
    Header,
    Part,
    decode,
    encode,
    layout_of,
    same_layout,
)  # fmt: skip

BOUNDS = Bounds(inline=1 << 20, arenas=4, arena_size=1 << 16)
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
INLINE = st.builds(Part, st.sampled_from(sorted(DTYPES)), st.integers(0, 1000))
SHARED = st.builds(
    lambda dtype, count, arena, place: Part(dtype, count, arena, place * 8),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 100),
    st.integers(0, 3),
    st.integers(0, 1000),
)
HEADERS = st.builds(
    Header,
    kind=st.text(min_size=1, max_size=64),
    sequence=st.integers(0, 1 << 60),
    reply_to=st.integers(0, 1 << 60),
    wants_reply=st.booleans(),
    layout=st.text(max_size=64),
    fields=st.dictionaries(st.text(max_size=20), PLAIN, max_size=5),
    parts=st.lists(INLINE | SHARED, max_size=8),
    into=st.lists(SHARED, max_size=8),
)


@given(HEADERS)
def test_decoding_undoes_encoding(header):
    assert decode(encode(header), "worker 1", BOUNDS) == header


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_only_raise_wire_errors(data, framed):
    if framed:
        data = b"PRW\x01" + len(data).to_bytes(4, "big") + data
    try:
        decode(data, "worker 1", BOUNDS)
    except WireError as error:
        assert "worker 1" in str(error)


@given(HEADERS, st.data())
def test_changed_and_truncated_bytes_only_raise_wire_errors(header, data):
    good = encode(header)
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    with pytest.raises(WireError):
        decode(cut, "worker 1", BOUNDS)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    try:
        decoded = decode(changed, "worker 1", BOUNDS)
    except WireError:
        return
    assert decoded.inline <= BOUNDS.inline
    for part in decoded.parts + decoded.into:
        assert part.arena < 4 and part.offset + part.nbytes <= (1 << 16 if part.arena >= 0 else 1 << 30)


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 99999]
)
def test_claims_about_sizes_allocate_nothing(claim):
    body = b"\x98\xa1x\x01\x00\xc2\xa0\x81\xa1f" + claim
    tracemalloc.start()
    with pytest.raises(WireError):
        decode(b"PRW\x01" + len(body).to_bytes(4, "big") + body, "worker 1", BOUNDS)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (Header("x", 1, parts=[Part("complex", 1)]), "dtype 'complex'"),
        (Header("x", 1, parts=[Part("float32", -1)]), ">= 0"),
        (Header("x", 1, parts=[Part("uint8", 1 << 20), Part("uint8", 1)]), "1048577 bytes"),
        (Header("x", 1, parts=[Part("float64", 1 << 62)]), "more than 1048576"),
        (Header("x", 1, parts=[Part("uint8", 1, -1, 3)]), "inline tensor at offset 3"),
        (Header("x", 1, parts=[Part("uint8", 2, 0, (1 << 16) - 1)]), "outside arena 0"),
        (Header("x", 1, parts=[Part("float32", 1, 0, 2)]), "unaligned"),
        (Header("x", 1, parts=[Part("uint8", 1, 4, 0)]), "arena 4 of 4"),
        (Header("x", 1, into=[Part("uint8", 1)]), "inline place"),
        (Header("x" * 65, 1), "length <= 64"),
        (Header("x", -1), ">= 0"),
    ],
)
def test_errors_of_malformed_frames_name_the_defect_and_the_sender(header, complaint):
    with pytest.raises(WireError, match=complaint) as caught:
        decode(encode(header), "server 2", BOUNDS)
    assert "server 2" in str(caught.value)


def test_the_prefix_is_checked():
    good = encode(Header("x", 1))
    for bad, complaint in (
        (b"XXX" + good[3:], "begins with"),
        (good[:3] + b"\x09" + good[4:], "version 9"),
        (good[:4] + (MAX_HEADER + 1).to_bytes(4, "big") + good[PREFIX_SIZE:], "header of 1048577"),
    ):
        with pytest.raises(WireError, match=complaint):
            decode(bad)


def test_encoding_refuses_unsupported_or_too_large_fields():
    with pytest.raises(UsageError, match="plain values"):
        encode(Header("x", 1, fields={"f": object()}))
    with pytest.raises(UsageError, match="send a tensor"):
        encode(Header("x", 1, fields={"f": "x" * MAX_HEADER}))
    assert math.isnan(decode(encode(Header("x", 1, fields={"f": math.nan}))).fields["f"])


def test_the_wire_needs_no_torch_and_knows_no_pickle():
    code = "import sys, polyrhythm.wire; print({'torch', 'cryptography', 'zmq'} & set(sys.modules))"
    root = Path(polyrhythm.wire.__file__).parents[2]
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert loaded.stdout.strip() == "set()"
    for source in Path(polyrhythm.wire.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names if name} & {"pickle", "marshal", "torch"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("", "a"), ("", "a"), True),
        (("", "a"), ("", "b"), False),
        (("", "a"), ("", ""), True),
        (("stage 0", "a"), ("stage 0", "a"), True),
        (("stage 0", "a"), ("stage 0", "b"), False),
        (("stage 0", "a"), ("stage 1", "b"), True),
        (("stage 0", "a"), ("", "b"), True),
    ],
)
def test_layouts_are_compared_within_one_part_of_the_model(one, other, same):
    """A node without a layout, such as the coordinator, matches all."""
    assert same_layout(layout_of(*one), layout_of(*other)) is same
    assert same_layout(layout_of(*other), layout_of(*one)) is same
