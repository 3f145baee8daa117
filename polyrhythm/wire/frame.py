"""A message as bytes: a fixed prefix, a small typed header, then the raw bytes of its tensors.

    magic "PRW" | format version u8 | header length u32 | header (msgpack) | inline tensor bytes ...

Nothing here does I/O, and nothing is believed: `decode` checks every length, range and dtype, so that who
reads the tensors may allocate what the header asks for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polyrhythm.core.errors import UsageError, WireError

VERSION = 1
MAGIC = b"PRW"
MAX_HEADER = 1 << 20
DTYPES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

_PREFIX = struct.Struct("!3sBI")
PREFIX_SIZE = _PREFIX.size

Natural = Annotated[int, Meta(ge=0)]


class Part(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A tensor in a message. Its bytes follow inline, or lie in shared memory arena `arena` at `offset`."""

    dtype: str
    count: Natural
    arena: Annotated[int, Meta(ge=-1)] = -1
    offset: Natural = 0

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype]


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What precedes the tensors. `reply_to` 0 is no reply; `into` is where an answer may go directly."""

    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    sequence: Natural
    reply_to: Natural = 0
    asked: bool = False
    layout: Annotated[str, Meta(max_length=128)] = ""
    fields: dict[str, Any] = {}
    parts: list[Part] = []
    into: list[Part] = []

    @property
    def inline(self) -> int:
        return sum(part.nbytes for part in self.parts if part.arena < 0)


@dataclass(frozen=True)
class Bounds:
    """What a header may ask for: inline bytes in all, and the shared memory that both ends can see."""

    inline: int = 1 << 36
    arenas: int = 0
    arena_size: int = 0


UNSHARED = Bounds()


def _no_extensions(code: int, data: memoryview) -> Any:
    raise ValueError(f"msgpack extension {code} is not a plain value")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header, ext_hook=_no_extensions)


def encode(header: Header) -> bytes:
    """The prefix and the header as bytes."""
    try:
        body = _encoder.encode(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{header.kind!r}: its fields must be plain values: {error}") from None
    if len(body) > MAX_HEADER:
        raise UsageError(
            f"{header.kind!r}: its fields take {len(body)} bytes, more than {MAX_HEADER}: send a tensor"
        )
    return _PREFIX.pack(MAGIC, VERSION, len(body)) + body


def layout_of(part: str, layout: str) -> str:
    """The layout of a header: the hash of a part of the model; all of it, if the part has no name."""
    return f"{part}/{layout}" if part else layout


def same_layout(one: str, other: str) -> bool:
    """False if these are different layouts of the same part of the model. A node may have none yet."""
    if one == other:
        return True
    (part, _, layout), (other_part, _, other_layout) = one.rpartition("/"), other.rpartition("/")
    return part != other_part or not layout or not other_layout


def header_length(prefix: bytes | bytearray | memoryview, sender: str) -> int:
    """The length of the header that follows this prefix."""
    if len(prefix) != PREFIX_SIZE:
        raise WireError(f"{sender} sent {len(prefix)} bytes where a message begins with {PREFIX_SIZE}")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError(f"{sender} sent {magic!r} where a message begins with {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"{sender} speaks version {version} of the wire format, this node version {VERSION}")
    if length > MAX_HEADER:
        raise WireError(f"{sender} sent a header of {length} bytes, more than {MAX_HEADER}")
    return int(length)


def decode_header(body: bytes | bytearray | memoryview, sender: str, bounds: Bounds) -> Header:
    """The header in these bytes, with all that it says about tensors checked."""
    try:
        header = _decoder.decode(body)
    except Exception as error:  # whatever a decoder can raise, no bytes may end the node
        raise WireError(f"{sender} sent a header that cannot be read: {error}") from None
    for part in header.parts:
        _check(part, header.kind, sender, bounds)
    for part in header.into:
        _check(part, header.kind, sender, bounds)
        if part.arena < 0:
            raise WireError(f"{sender} sent {header.kind!r} with an inline place for the answer")
    if header.parts and (inline := header.inline) > bounds.inline:
        raise WireError(
            f"{sender} sent {header.kind!r} with {inline} bytes of tensors, more than {bounds.inline}"
        )
    return header


def decode(data: bytes, sender: str = "someone", bounds: Bounds = UNSHARED) -> Header:
    """The header that `encode` made these bytes from."""
    body = memoryview(data)[PREFIX_SIZE:]
    length = header_length(data[:PREFIX_SIZE], sender)
    if len(body) != length:
        raise WireError(f"{sender} sent a header of {len(body)} bytes and announced {length}")
    return decode_header(body, sender, bounds)


def _check(part: Part, kind: str, sender: str, bounds: Bounds) -> None:
    size = DTYPES.get(part.dtype)
    if size is None:
        raise WireError(f"{sender} sent {kind!r} with a tensor of unknown dtype {part.dtype[:32]!r}")
    if part.arena < 0:
        if part.offset:
            raise WireError(f"{sender} sent {kind!r} with an inline tensor at offset {part.offset}")
    elif part.arena >= bounds.arenas:
        raise WireError(
            f"{sender} sent {kind!r} with a tensor in arena {part.arena} of {bounds.arenas} shared ones"
        )
    elif part.offset % size or part.offset + part.count * size > bounds.arena_size:
        place = f"{part.offset} + {part.count} x {size} of {bounds.arena_size} bytes"
        raise WireError(
            f"{sender} sent {kind!r} with a tensor outside arena {part.arena} or unaligned: {place}"
        )
