"""Messages between nodes: framing, shared memory, connections and the transport. Free of torch."""

from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.frame import DTYPES
from polyrhythm.wire.inbox import Buffer, Incoming
from polyrhythm.wire.transport import Pending, Transport

__all__ = ["DTYPES", "Arenas", "Buffer", "Incoming", "Pending", "Transport"]
