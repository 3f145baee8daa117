"""What has arrived and waits to be received: in order, bounded per connection, each message once.

A sender whose connection broke sends its request again under the same sequence number. The inbox knows the
sequence numbers of each peer: a repeated one-way message is dropped; a repeated ask that is still unanswered
only says where the answer must go now; one whose answer went down with the connection gets it again, if that
was a header only; otherwise it is handed up, marked `duplicate`, to be answered and not applied again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.wire.buffers import Buffer, Pool
from polyrhythm.wire.channel import Channel
from polyrhythm.wire.frame import Header, Part

REMEMBERED = 1 << 14
_ANSWERS = 64


@dataclass(eq=False)
class Incoming:
    """A message that arrived. Its buffers are its own; those of an ask only until it is answered."""

    sender: Peer
    kind: str
    sequence: int
    asked: bool
    fields: dict[str, Any]
    buffers: list[Buffer]
    duplicate: bool = False
    _into: list[Part] = field(default_factory=list, repr=False)
    _line: Line | None = field(default=None, repr=False)
    _memory: memoryview | None = field(default=None, repr=False)
    _number: int = field(default=0, repr=False)


@dataclass
class Flow:
    """What one instance of a peer has sent so far, over all its connections."""

    instance: bytes
    number: int = 0  # of its first connection
    seen: dict[int, None] = field(default_factory=dict)
    unanswered: dict[int, Incoming] = field(default_factory=dict)
    answers: dict[int, Header] = field(default_factory=dict)  # the last ones that carried no bytes


class Reading:
    """A message that is being read. `places` gives the memory to fill, and ends with the message taken in."""

    def __init__(self, places: Generator[memoryview, None, None], nbytes: int) -> None:
        self._places, self._left = places, nbytes
        self._place = next(places, None)
        self.moved = time.monotonic()  # when something of it last came

    def go_on(self, channel: Channel) -> bool:
        """Reads what has come; False if the rest has not."""
        while self._place is not None:
            if self._place.nbytes:
                got = channel.receive_some(self._place)
                if not got:
                    channel.expect(self._left)
                    return False
                self._left -= got
                self._place = self._place[got:]
                self.moved = time.monotonic()
            if not self._place.nbytes:
                self._place = next(self._places, None)
        channel.expect(1)
        return True

    def finish(self, channel: Channel) -> None:
        """Reads it to its end."""
        while self._place is not None:
            channel.receive_into(self._place)
            self._place = next(self._places, None)

    def close(self) -> None:
        """The rest will not come: the memory is not written to any longer."""
        self._places.close()


@dataclass(eq=False)
class Line:
    """A connection as the inbox sees it."""

    channel: Channel
    flow: Flow
    pool: Pool = field(default_factory=Pool)
    unreceived: int = 0
    resting: bool = False
    reading: Reading | None = None  # a message of which the rest has not come yet


class Inbox:
    """The messages of a node, from all its connections, until it receives them."""

    def __init__(self, queue: int, repeat: Callable[[Channel, Header], None]) -> None:
        self.arrived = 0
        self._repeat = repeat  # sends an answer again
        self._queue = queue
        self._messages: deque[Incoming] = deque()
        self._flows: dict[Peer, Flow] = {}
        self._lock = threading.Lock()

    def join(self, channel: Channel) -> Line:
        """A new connection. A peer that was restarted begins a new flow."""
        with self._lock:
            flow = self._flows.get(channel.peer)
            if flow is None or flow.instance != channel.instance:
                known, flow = flow, Flow(channel.instance, channel.number)
                if known is None or known.number < flow.number:  # handshakes may overtake each other
                    self._flows[channel.peer] = flow
            return Line(channel, flow)

    def first(self, line: Line, sequence: int) -> bool:
        """Whether a one-way message that does not wait to be received has come for the first time."""
        with self._lock:
            if sequence in line.flow.seen:
                return False
            self._see(line.flow, sequence)
            return True

    @staticmethod
    def _see(flow: Flow, sequence: int) -> None:
        flow.seen[sequence] = None
        if len(flow.seen) > REMEMBERED:
            del flow.seen[next(iter(flow.seen))]

    def put(self, line: Line, message: Incoming) -> bool:
        """Takes a message in. False says that the connection must rest until `take` says otherwise."""
        flow, sequence = line.flow, message.sequence
        with self._lock:
            original = flow.unanswered.get(sequence)
            if original is not None:
                assert original._line is not None
                if line.channel.number > original._line.channel.number:
                    # Received messages no longer count, so only where the answer goes changes hands.
                    original._line, line_before = line, original._line
                    if original in self._messages:
                        line_before.unreceived -= 1
                        line.unreceived += 1
                line.pool.give(message._memory)
                return line.unreceived < self._queue
            if sequence in flow.seen:
                if not message.asked:
                    return True
                if sequence in flow.answers:
                    self._repeat(line.channel, flow.answers[sequence])
                    return True
                message.duplicate = True
            self._see(flow, sequence)
            message._line = line
            if message.asked:
                flow.unanswered[sequence] = message
            self.arrived += 1
            message._number = self.arrived
            self._messages.append(message)
            line.unreceived += 1
            line.resting = line.unreceived >= self._queue
            return not line.resting

    def has(self, kinds: Collection[str]) -> bool:
        """Whether there is a message of these kinds."""
        messages = self._messages
        if not kinds or not messages:
            return bool(messages)
        with self._lock:
            return any(message.kind in kinds for message in messages)

    def take(self, kinds: Collection[str], before: int | None = None) -> tuple[Incoming, Line | None] | None:
        """The next message of these kinds, and the connection that need not rest any longer."""
        with self._lock:
            for at, message in enumerate(self._messages):
                if before is not None and message._number > before:
                    return None
                if not kinds or message.kind in kinds:
                    del self._messages[at]
                    line = message._line
                    assert line is not None
                    line.unreceived -= 1
                    rested = line.resting and line.unreceived < self._queue
                    line.resting = line.resting and not rested
                    return message, line if rested else None
        return None

    def remember(self, line: Line, answer: Header) -> None:
        """Keeps an answer, in case its connection broke before it was read and the ask comes again."""
        with self._lock:
            line.flow.answers[answer.reply_to] = answer
            if len(line.flow.answers) > _ANSWERS:
                del line.flow.answers[next(iter(line.flow.answers))]

    def settle(self, message: Incoming) -> Line:
        """Marks an ask as answered; the connection that the answer must take."""
        with self._lock:
            line = message._line
            if line is None or line.flow.unanswered.pop(message.sequence, None) is None:
                raise UsageError(
                    f"{message.kind!r} from {message.sender} was not asked, or is answered already"
                )
            return line
