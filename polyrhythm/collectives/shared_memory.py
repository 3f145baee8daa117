"""All-reduce in shared memory: every worker reduces one slice for all, straight from the others' buffers.

Theory of operation. Each member has a board in its own arena that the others read: how many collectives it
has begun, how many it has done, and for the latest ones what it lent to them (a slot each). To begin the
k-th, a member writes its slot and then sets `begun` to k. Once all have begun it, each member reduces its own
slice in rank order, writes the result to everybody's buffer, and sets `done` to k. When all have done it,
every buffer is complete. Collectives are done in the order in which they are begun, by whoever comes by:
`begin` does not wait, unless a whole board is under way, and does its part of earlier ones if it can by now.

Nothing is copied on the way and no system call is made but to let others run. What makes plain words safe on
processors that reorder memory: `_fence`, between data and the word that tells of them on the one side, and
between the word and the data on the other. Releasing a lock and taking it again is one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.collectives.arithmetic import OPERATIONS, reduce
from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.group import Task
from polyrhythm.model.vectors import split

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.wire.arena import Arenas

SPIN = 0.0005  # seconds of asking again and again before it sleeps in between
LONGEST = 0.002  # seconds of sleep

_BEGUN, _DONE, _SLOT = 0, 8, 16  # words of a board; those that change often lie in cache lines of their own
_SLOTS, _WORDS, _TENSORS = 256, 64, 20  # slots of a board, words of a slot, tensors that one can tell of
BOARD = 8 * (_SLOT + _SLOTS * _WORDS)

_TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_CODE = {dtype: code for code, dtype in enumerate(_TYPES)}

Staged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # a tensor, its copy, and the memory of that

# What can be done: the reductions, the same into the first member's buffers only, and a copy of those.
WAYS = (*OPERATIONS, *(f"{op} to first" for op in OPERATIONS), "copy of first")


class SharedMemory:
    """One member's view of the boards. `members` are their arenas by their names, in rank order, `boards` are
    where in those their boards lie, and `mine` is the place of this one among them.

    `look(missing, waited)` is called now and then while this member waits for those places: it raises when
    that is in vain.
    """

    def __init__(
        self,
        arenas: Arenas,
        members: Mapping[str, int],
        mine: int,
        boards: Sequence[int],
        look: Callable[[Sequence[int], float], None],
    ) -> None:
        self._arenas, self._mine, self._look = arenas, mine, look
        self._names, self._members = tuple(members), tuple(members.values())
        self.count = len(members)
        self._boards = [
            arenas.view(index)[board : board + BOARD].cast("q")
            for index, board in zip(self._members, boards, strict=True)
        ]
        self._memory = [torch.frombuffer(arenas.view(index), dtype=torch.uint8) for index in self._members]
        self._base = self._memory[mine].data_ptr()
        self._begun = self._done = 0
        self._lock = threading.Lock()  # nobody else has it: it is there for `_fence`
        self._lock.acquire()
        self._plans: dict[tuple[bytes, ...], list[tuple[list[Tensor], list[Tensor]]]] = {}
        self._words: dict[tuple[tuple[int, int, torch.dtype], ...], list[int]] = {}
        self._free: dict[int, list[Tensor]] = {}  # staging memory that is not in use, by size

    def begin(self, tensors: Sequence[Tensor], way: str) -> PendingReduction:
        """Lends these tensors, flat and in the same order as those of the others, to the next collective."""
        lent, staged = self.stage(tensors)
        for first in range(0, len(lent) or 1, _TENSORS):
            self._tell(lent[first : first + _TENSORS], WAYS.index(way))
        self.advance()
        return PendingReduction(self, self._begun, staged)

    def advance(self) -> None:
        """Does this member's part of all that everybody has begun by now."""
        while self._done < self._begun and not self._missing(_BEGUN, self._done + 1):
            self._do(self._done + 1)

    def finish(self, number: int) -> None:
        """Waits until the collective of this number is done by all."""
        while self._done < number:
            self._until(_BEGUN, self._done + 1)
            self._do(self._done + 1)
        self._until(_DONE, number)
        self._fence()

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Staged]]:
        """These tensors in shared memory, and copied there those that lie elsewhere, as a GPU's do."""
        places: list[Tensor] = []
        staged: list[Staged] = []
        for tensor in tensors:
            offset = tensor.data_ptr() - self._base
            if (0 <= offset < self._arenas.size and tensor.is_contiguous()) or not tensor.numel():
                places.append(tensor)
                continue
            size = 1 << (tensor.nbytes - 1).bit_length()  # few sizes, so that memory is used again
            free = self._free.setdefault(size, [])
            if free:
                memory = free.pop()
            else:
                start = self._arenas.allocate(self._members[self._mine], size)
                memory = self._memory[self._mine][start : start + size]
            host = memory[: tensor.nbytes].view(tensor.dtype)
            host.copy_(tensor.reshape(-1))
            places.append(host)
            staged.append((tensor, host, memory))
        return places, staged

    def unstage(self, staged: Sequence[Staged]) -> None:
        """Brings the result back to where it belongs."""
        for tensor, host, memory in staged:
            tensor.copy_(host.view(tensor.shape))
            self._free[memory.numel()].append(memory)

    def _tell(self, lent: Sequence[Tensor], way: int) -> None:
        number = self._begun + 1
        if number > _SLOTS:
            self.finish(number - _SLOTS)  # until then others may be reading the slot
        key = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in lent)
        words = self._words.get(key)
        if words is None:
            words = [len(lent)]
            for address, count, dtype in key:
                if dtype not in _CODE:
                    raise PolyrhythmError(f"a collective cannot take {dtype}")
                words += [address - self._base if count else 0, count, _CODE[dtype]]
            _remember(self._words, key, words)
        board, place = self._boards[self._mine], _SLOT + number % _SLOTS * _WORDS
        board[place] = way
        for at, word in enumerate(words, place + 1):
            board[at] = word
        self._publish(_BEGUN, number)
        self._begun = number

    def _fence(self) -> None:
        """What comes before it in the program comes before it in memory, and what comes after it after."""
        self._lock.release()
        self._lock.acquire()

    def _publish(self, word: int, number: int) -> None:
        self._fence()
        self._boards[self._mine][word] = number

    def _missing(self, word: int, number: int) -> list[int]:
        """Who has not come so far."""
        return [place for place, board in enumerate(self._boards) if board[word] < number]

    def _until(self, word: int, number: int) -> None:
        began, looked = time.perf_counter(), 0.0
        for board in self._boards:
            while board[word] < number:
                waited = time.perf_counter() - began
                if waited < SPIN:
                    os.sched_yield()
                    continue
                time.sleep(min(waited / 8, LONGEST))
                if waited > looked:
                    self._look(self._missing(word, number), waited)
                    looked = waited + 0.01

    def _do(self, number: int) -> None:
        self._fence()
        place = _SLOT + number % _SLOTS * _WORDS
        slots = tuple(board[place : place + 2 + 3 * board[place + 1]].tobytes() for board in self._boards)
        plan = self._plans.get(slots)
        if plan is None:
            plan = self._plan(place)
            _remember(self._plans, slots, plan)
        way = WAYS[self._boards[self._mine][place]]
        for inputs, outputs in plan:
            if way != "copy of first":
                reduce(inputs, way.removesuffix(" to first"), outputs)
            elif self._mine:
                outputs[0].copy_(inputs[0])
        self._done = number
        self._publish(_DONE, number)

    def _plan(self, place: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The views that this member reads and writes in the collective of these slots."""
        counts, boards = len(self._boards), self._boards
        way = boards[self._mine][place]
        tensors: list[list[Tensor]] = []
        for board, memory in zip(boards, self._memory, strict=True):
            views = []
            for at in range(place + 2, place + 2 + 3 * board[place + 1], 3):
                dtype = _TYPES[board[at + 2]]
                nbytes = board[at + 1] * dtype.itemsize
                views.append(memory[board[at] : board[at] + nbytes].view(dtype))
            tensors.append(views)
        mine = [(view.numel(), view.dtype) for view in tensors[self._mine]]
        for other, (board, views) in enumerate(zip(boards, tensors, strict=True)):
            theirs = [(view.numel(), view.dtype) for view in views]
            if board[place] != way or theirs != mine:
                raise PolyrhythmError(
                    f"{self._names[other]} is in {WAYS[board[place]]} of {theirs} where "
                    f"{self._names[self._mine]} is in {WAYS[way]} of {mine}: all workers must take the same "
                    "collectives in the same order"
                )
        plan = []
        for same in zip(*tensors, strict=True):
            if WAYS[way] == "copy of first":
                plan.append(([same[0]], [same[self._mine]]))
                continue
            low, high = split(same[0].numel(), counts)[self._mine]
            if low < high:
                slices = [tensor[low:high] for tensor in same]
                plan.append((slices, slices[:1] if WAYS[way].endswith(" to first") else slices))
        return plan


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Most collectives come again and again; of those that do not, none is kept for long."""
    if len(known) >= 4096:
        known.clear()
    known[key] = value


class PendingReduction(Task):
    """A collective that was begun."""

    def __init__(self, all_: SharedMemory, number: int, staged: Sequence[Staged]) -> None:
        self._all, self._number, self._staged = all_, number, staged

    def join(self) -> None:
        self._all.finish(self._number)
        self._all.unstage(self._staged)
        self._staged = ()
