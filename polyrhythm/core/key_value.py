"""KeyValue: the request of a node to the coordinator that reads or changes a value that all workers see."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from polyrhythm.core.requests import REQUESTS, Request


class KeyValueReply(msgspec.Struct, frozen=True):
    value: bytes | None  # None: there is no such key
    number: int = 0


class KeyValue(Request[KeyValueReply], frozen=True, tag="key value"):
    """Reads or changes a value that all workers see, see `coordination.key_values`."""

    reply: ClassVar[Any] = KeyValueReply

    operation: Literal["get", "set", "append", "add", "compare", "delete", "count"]
    key: str = ""
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


REQUESTS[str(KeyValue.__struct_config__.tag)] = KeyValue
