"""The format of a message: a fixed prefix, a small typed header, then the raw bytes of its tensors.

    magic "PRW" | format version u8 | header length u32 | header (msgpack) | inline tensor bytes ...

Nothing here does I/O and nothing received is trusted: decoding checks every length, range and dtype, so the
reader of the tensors may safely allocate the memory that a decoded header describes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from polyrhythm.core.errors import UsageError, WireError

VERSION = 2
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
    """A tensor in a message. Its bytes follow inline, or are in shared memory arena `arena` at `offset`."""

    dtype: str
    count: Natural
    arena: Annotated[int, Meta(ge=-1)] = -1
    offset: Natural = 0

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype]


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What precedes the tensors.

    `reply_to` is the sequence number of a request, or 0 if this is no reply. `into` is where the reply to a
    request may be written in shared memory. A request confirms the replies to all requests of its sender with
    sequence numbers below `confirmed`.
    """

    kind: Annotated[str, Meta(min_length=1, max_length=64)]
    sequence: Natural
    reply_to: Natural = 0
    wants_reply: bool = False
    layout: Annotated[str, Meta(max_length=128)] = ""
    fields: dict[str, Any] = {}
    parts: list[Part] = []
    into: list[Part] = []
    confirmed: Natural = 0

    @property
    def inline(self) -> int:
        """The number of tensor bytes that follow."""
        return sum(part.nbytes for part in self.parts if part.arena < 0)


@dataclass(frozen=True)
class Bounds:
    """What a header may describe: total inline bytes, and tensors in arenas that both ends can see."""

    inline: int = 1 << 36
    arenas: int = 0
    arena_size: int = 0


UNSHARED = Bounds()


def _no_extensions(code: int, data: memoryview) -> Any:
    raise ValueError(f"msgpack extension {code} is not a plain value")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header, ext_hook=_no_extensions)


def encode(header: Header) -> bytes:
    """Encodes the prefix and the header."""
    try:
        body = _encoder.encode(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the fields of {header.kind!r} must be plain values: {error}") from None
    if len(body) > MAX_HEADER:
        raise UsageError(
            f"the fields of {header.kind!r} take {len(body)} bytes, more than {MAX_HEADER}; send a tensor"
        )
    return _PREFIX.pack(MAGIC, VERSION, len(body)) + body


def layout_of(part: str, layout: str) -> str:
    """Formats the `layout` of a header: the layout hash, after the name of the model part if it has one."""
    return f"{part}/{layout}" if part else layout


def same_layout(one: str, other: str) -> bool:
    """False if both are known layouts of the same part of the model and differ."""
    if one == other:
        return True
    (part, _, layout), (other_part, _, other_layout) = one.rpartition("/"), other.rpartition("/")
    return part != other_part or not layout or not other_layout


def header_length(prefix: bytes | bytearray | memoryview, sender: str) -> int:
    """Checks a prefix and returns the length of the header that follows."""
    if len(prefix) != PREFIX_SIZE:
        raise WireError(f"{sender} sent {len(prefix)} bytes; a message begins with {PREFIX_SIZE}")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError(f"{sender} sent {magic!r}; a message begins with {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"{sender} uses version {version} of the wire format, this node version {VERSION}")
    if length > MAX_HEADER:
        raise WireError(f"{sender} sent a header of {length} bytes, more than {MAX_HEADER}")
    return int(length)


def decode_header(body: bytes | bytearray | memoryview, sender: str, bounds: Bounds) -> Header:
    """Decodes a header and checks everything that it says about tensors."""
    try:
        header = _decoder.decode(body)
    except Exception as error:  # of any kind: no bytes may end the node
        raise WireError(f"{sender} sent a header that cannot be decoded: {error}") from None
    for part in header.parts:
        _check(part, header.kind, sender, bounds)
    for part in header.into:
        _check(part, header.kind, sender, bounds)
        if part.arena < 0:
            raise WireError(f"{sender} sent {header.kind!r} with an inline place for the reply")
    if header.parts and (inline := header.inline) > bounds.inline:
        raise WireError(
            f"{sender} sent {header.kind!r} with {inline} bytes of tensors, more than {bounds.inline}"
        )
    return header


def decode(data: bytes, sender: str = "the sender", bounds: Bounds = UNSHARED) -> Header:
    """Decodes the bytes of a prefix and a header, the inverse of `encode`."""
    body = memoryview(data)[PREFIX_SIZE:]
    length = header_length(data[:PREFIX_SIZE], sender)
    if len(body) != length:
        raise WireError(f"{sender} sent a header of {len(body)} bytes after announcing {length}")
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
            f"{sender} sent {kind!r} with a tensor in arena {part.arena} of {bounds.arenas} that are shared"
        )
    elif part.offset % size or part.offset + part.count * size > bounds.arena_size:
        place = f"{part.offset} + {part.count} x {size} of {bounds.arena_size} bytes"
        raise WireError(
            f"{sender} sent {kind!r} with a tensor outside arena {part.arena} or unaligned: {place}"
        )
