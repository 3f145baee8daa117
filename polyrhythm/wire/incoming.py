"""Messages that arrive: complete ones, and those still being read."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyrhythm.core.peer import Peer
from polyrhythm.wire.buffers import Buffer
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Part

if TYPE_CHECKING:
    from polyrhythm.wire.connection import Connection


@dataclass(eq=False)
class Incoming:
    """A message that has arrived. The buffers of a request are valid only until it is replied to."""

    sender: Peer
    kind: str
    sequence: int
    wants_reply: bool
    fields: dict[str, Any]
    buffers: list[Buffer]
    _into: list[Part] = field(default_factory=list, repr=False)  # where the reply may be written
    _connection: Connection | None = field(default=None, repr=False)  # that the reply takes
    _memory: memoryview | None = field(default=None, repr=False)  # of the connection's pool
    _number: int = field(default=0, repr=False)  # in the order of arrival


class PartialMessage:
    """A message whose tensors are being read.

    `targets` is a generator: it yields each piece of memory to fill, then handles the message.
    """

    def __init__(self, targets: Generator[memoryview, None, Any], nbytes: int) -> None:
        self._targets, self._missing = targets, nbytes
        self._target = next(targets, None)
        self.last_progress = time.monotonic()

    def read_available(self, channel: Channel) -> bool:
        """Reads what has arrived. True once the message is complete."""
        while self._target is not None:
            if self._target.nbytes:
                received = channel.receive_available(self._target)
                if not received:
                    channel.expect(self._missing)
                    return False
                self._missing -= received
                self._target = self._target[received:]
                self.last_progress = time.monotonic()
            if not self._target.nbytes:
                self._target = next(self._targets, None)
        channel.expect(1)
        return True

    def read_all(self, channel: Channel) -> None:
        """Reads the rest of the message, waiting for it."""
        while self._target is not None:
            channel.receive_into(self._target)
            self._target = next(self._targets, None)

    def abort(self) -> None:
        """Gives the message up. Its targets are not written to afterwards."""
        self._targets.close()
