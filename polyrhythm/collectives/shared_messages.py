"""Messages between the workers of a host in shared memory: a ring of slots for each pair.

Theory of operation. Each member has a board in its own arena, which the others read. It has a ring of slots
for the messages to each other member, and for each other member the numbers of the messages that this one has
taken. A sender copies a tensor into its arena, describes it in the next slot, and then writes the number of
the message into the slot, which announces it. The receiver finds it there, copies the tensor, and notes its
number as taken; then the sender may use slot and memory again. If all slots of a ring are in use, messages
wait at the sender.

As in `shared_memory`, there is a fence between writing data and announcing it, and between seeing the
announcement and reading the data.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from polyrhythm.collectives.shared_memory import CODE, view

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.wire.arena import Arenas

_SLOTS, _WORDS = 64, 8  # of a ring, of a slot
_RING = _SLOTS * (_WORDS + 1)  # words of a ring, and of the numbers that were taken


def board_bytes(members: int) -> int:
    """The size of a board."""
    return 8 * members * _RING


class Arrival(NamedTuple):
    """A message that has arrived. Its values are lent until `take` is called."""

    sender: int
    channel: int
    tag: int
    values: Tensor
    take: Callable[[], None]


class Sent:
    """A message that was sent."""

    def __init__(self, to: int, channel: int, tag: int, values: Tensor, memory: Tensor) -> None:
        self.to, self.channel, self.tag, self.values, self.memory = to, channel, tag, values, memory
        self.number = 0  # 0: it waits for a slot
        self.taken = False


class SharedMessages:
    """One member's view of the boards. `members` maps names to arenas, as in `SharedMemory`.

    Any thread may call the methods, one at a time.
    """

    def __init__(self, arenas: Arenas, members: Mapping[str, int], mine: int, boards: Sequence[int]) -> None:
        self._arenas, self._mine, self._arena = arenas, mine, tuple(members.values())[mine]
        size = board_bytes(len(members))
        self._boards = [
            arenas.view(arena)[board : board + size].cast("q")
            for arena, board in zip(members.values(), boards, strict=True)
        ]
        self._memory = [torch.frombuffer(arenas.view(arena), dtype=torch.uint8) for arena in members.values()]
        self._base = self._memory[mine].data_ptr()
        self._sent = [0] * len(members)  # the number of the last message to each member
        self._seen = [0] * len(members)  # the number of the last message from each member
        self._waiting: list[deque[Sent]] = [deque() for _ in members]  # for a slot
        self._in_flight: list[list[Sent]] = [[] for _ in members]
        self._free: dict[int, list[Tensor]] = {}  # memory that is not in use, by size
        self._lock = threading.Lock()  # used by `_fence` only
        self._lock.acquire()

    def send(self, to: int, channel: int, tag: int, values: Tensor) -> Sent:
        """Sends a copy of a flat tensor."""
        self.advance()
        memory = self._allocate(values.nbytes)
        sent = Sent(to, channel, tag, memory[: values.nbytes].view(values.dtype).copy_(values), memory)
        self._waiting[to].append(sent)
        self._announce(to)
        return sent

    def advance(self) -> None:
        """Frees what was taken, and announces messages that have waited for a slot."""
        for to, sent in enumerate(self._in_flight):
            if sent:
                taken = self._boards[to]
                for each in sent:
                    each.taken = taken[self._taken(self._mine, each.number)] >= each.number
                    if each.taken:
                        self._free[each.memory.numel()].append(each.memory)
                self._in_flight[to] = [each for each in sent if not each.taken]
                self._announce(to)

    def arrivals(self) -> list[Arrival]:
        """The messages that have arrived since the last call, in order."""
        found = []
        for sender, board in enumerate(self._boards):
            while sender != self._mine:
                number = self._seen[sender] + 1
                slot = self._slot(self._mine, number)
                if board[slot] != number:
                    break
                self._seen[sender] = number
                self._fence()
                channel, tag, *place = board[slot + 1 : slot + 6]
                found.append(
                    Arrival(
                        sender, channel, tag, view(self._memory[sender], *place), self._taking(sender, number)
                    )
                )
        return found

    @property
    def waiting(self) -> list[int]:
        """The members whose rings are full while more messages to them wait."""
        return [to for to, messages in enumerate(self._waiting) if messages]

    @property
    def idle(self) -> bool:
        """True if all that was sent has been taken."""
        return not any(self._in_flight) and not self.waiting

    def _taking(self, sender: int, number: int) -> Callable[[], None]:
        def take() -> None:
            self._fence()
            self._boards[self._mine][self._taken(sender, number)] = number

        return take

    def _announce(self, to: int) -> None:
        """Fills the free slots of a ring."""
        waiting, mine = self._waiting[to], self._boards[self._mine]
        while waiting:
            number = self._sent[to] + 1
            if number > _SLOTS and self._boards[to][self._taken(self._mine, number)] < number - _SLOTS:
                return  # the message in this slot has not been taken
            sent, slot = waiting.popleft(), self._slot(to, number)
            sent.number = self._sent[to] = number
            place = sent.values.data_ptr() - self._base if sent.values.numel() else 0
            described = (sent.channel, sent.tag, place, sent.values.numel(), CODE[sent.values.dtype])
            for at, word in enumerate(described, slot + 1):
                mine[at] = word
            self._in_flight[to].append(sent)
            self._fence()
            mine[slot] = number

    def _slot(self, to: int, number: int) -> int:
        """Where the slot of a message is in the board of its sender."""
        return to * _RING + number % _SLOTS * _WORDS

    def _taken(self, sender: int, number: int) -> int:
        """Where the receiver of a message notes that it has taken it, in its own board."""
        return sender * _RING + _SLOTS * _WORDS + number % _SLOTS

    def _allocate(self, nbytes: int) -> Tensor:
        size = 1 << max(6, (nbytes - 1).bit_length())  # powers of two, so that memory is reused
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        start = self._arenas.allocate(self._arena, size)
        return self._memory[self._mine][start : start + size]

    def _fence(self) -> None:
        """A full memory barrier, as in `shared_memory`."""
        self._lock.release()
        self._lock.acquire()
