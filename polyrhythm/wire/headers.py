"""The headers of the messages that a node sends, and the kinds of message that the wire reserves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.wire.frame import Header, Part

# The kinds of a node's own messages do not begin with "!".
REFUSED = "!refused"  # a reply: the receiver raised an error
REJECTED = "!bad"  # a reply: the request was invalid and has not been delivered
DISCONNECTED = "!disconnected"  # received locally when a peer of the watched role disconnects


class HeaderFactory:
    """Numbers the messages of a node and marks them with the layout of its model."""

    def __init__(self, me: Peer, incarnation: int) -> None:
        self.me = me
        self.layout = ""
        self._sequence = itertools.count((incarnation << INCARNATION_SHIFT) + 1)

    def message(
        self, kind: str, fields: dict[str, Any] | None, parts: Sequence[Part] = (), wants_reply: bool = False
    ) -> Header:
        """The header of a new one-way message or request."""
        if not 0 < len(kind) <= 64 or kind.startswith("!"):
            raise UsageError(f"{kind!r} is not a kind of message; use 1 to 64 characters, the first not '!'")
        return Header(kind, next(self._sequence), 0, wants_reply, self.layout, fields or {}, list(parts))

    def reply(self, kind: str, to: int, fields: dict[str, Any], parts: Sequence[Part] = ()) -> Header:
        """The header of a reply to the request with sequence number `to`."""
        return Header(kind, next(self._sequence), to, False, self.layout, fields, list(parts))
