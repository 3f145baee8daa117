"""What a peer has sent and been replied: the memory that makes retransmission safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.wire.frame import Header
from polyrhythm.wire.incoming import Incoming

_MAX_SEEN = 1 << 14
_MAX_REPLIES = 1 << 14  # only a peer with so many requests at once can lose one


@dataclass(frozen=True)
class KeptReply:
    """A reply that may be lost with its connection."""

    header: Header
    views: Sequence[memoryview] = ()  # its inline tensors
    memory: memoryview | None = None  # of the request, which holds them


@dataclass
class SenderHistory:
    """The messages of one process, over all its connections. Guarded by the lock of the inbox."""

    instance: bytes
    first_connection: int = 0  # its number
    seen: dict[int, None] = field(default_factory=dict)  # recent sequence numbers, in order
    unanswered: dict[int, Incoming] = field(default_factory=dict)  # requests without a reply
    replies: dict[int, KeptReply] = field(default_factory=dict)  # those that are not confirmed yet

    def record(self, sequence: int) -> None:
        """Remembers that a message has arrived."""
        self.seen[sequence] = None
        if len(self.seen) > _MAX_SEEN:
            del self.seen[next(iter(self.seen))]

    def keep_reply(self, reply: KeptReply) -> None:
        """Keeps a reply until it is confirmed: it may be lost with its connection."""
        self.replies[reply.header.reply_to] = reply
        if len(self.replies) > _MAX_REPLIES:
            del self.replies[next(iter(self.replies))]

    def confirm(self, sequence: int) -> list[memoryview]:
        """The replies to all requests before this one have arrived. Returns the memory that held them."""
        confirmed = [self.replies.pop(each) for each in [*self.replies] if each < sequence]
        return [each.memory for each in confirmed if each.memory is not None]
