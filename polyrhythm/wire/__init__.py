"""Messages between nodes: framing, shared memory, connections and the transport. Free of torch."""

from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.frame import DTYPES
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.requests import Pending
from polyrhythm.wire.transport import Transport

__all__ = ["DTYPES", "Arenas", "Buffer", "Incoming", "Pending", "Transport", "TransportOptions"]
