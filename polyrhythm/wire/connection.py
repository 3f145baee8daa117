"""Connection: the receiving state of one channel."""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.wire.buffers import Pool
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.history import SenderHistory
from polyrhythm.wire.incoming import PartialMessage


@dataclass(eq=False)
class Connection:
    """A channel with what its reader and the inbox must know about it."""

    channel: Channel
    history: SenderHistory
    pool: Pool = field(default_factory=Pool)
    unreceived: int = 0  # messages in the inbox
    paused: bool = False  # not read because too many messages are unreceived
    partial: PartialMessage | None = None  # the message that is being read
