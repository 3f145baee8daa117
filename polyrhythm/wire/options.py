"""TransportOptions: how a node communicates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.frame import Bounds


@dataclass(frozen=True)
class TransportOptions:
    """The options of a transport, the same for all its connections."""

    listen: str = "unix:"  # address to accept connections at, see `sockets`
    arenas: Arenas | None = None  # shared memory of this host
    arena: int = -1  # the one in which this node allocates
    host: str = ""  # identifies the arenas: nodes with the same host id see the same ones
    max_inline: int = 1 << 36  # bytes of tensors that a peer may send in one message
    queue: int = 64  # unreceived messages of a connection before it is paused
    wait: float = 300.0  # seconds until any wait times out
    encrypt: bool = True  # between hosts
    incarnation: int = 0  # how many predecessors of this node have died
    watched_role: str = (
        ""  # peers of this role never reconnect; when one disconnects, DISCONNECTED is received
    )
    on_error: Callable[[str], None] = logging.getLogger("polyrhythm.wire").warning

    @property
    def bounds(self) -> Bounds:
        """What the messages of a peer on this host may refer to."""
        if self.arenas is None:
            return Bounds(self.max_inline)
        return Bounds(self.max_inline, self.arenas.count, self.arenas.size)

    @property
    def host_id(self) -> str:
        """The host id to announce. A node without arenas has none, so no peer refers to arenas."""
        return self.host if self.arenas else ""
