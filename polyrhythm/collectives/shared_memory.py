"""All-reduce in shared memory: every worker reduces one slice for all, directly from the others' buffers.

Theory of operation. Each member has a board in its own arena, which the others read: how many collectives it
has begun, how many it has done, and in one slot for each of the latest ones the tensors that it lent. To
begin collective k, a member writes its slot and then sets `begun` to k. When all have begun it, each member
reduces its slice in rank order, writes the result to all buffers, and sets `done` to k. When all have done
it, every buffer is complete. Collectives are executed in the order in which they are begun, whenever a member
calls `begin` or waits. `begin` does not block, unless all slots of the board are in use.

In an exchange a member lends tensors to each other one. Its slot has a list of them, or says where the list
is if it is long. When all have begun the exchange, each calls a function with the tensors that it was lent.

Nothing is copied, and the only system calls yield the processor. Processors may reorder memory accesses, so
there is a `_fence` between writing data and announcing it, and between seeing the announcement and reading
the data. Releasing a lock and acquiring it again is a fence.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.collectives.arithmetic import OPERATIONS, reduce
from polyrhythm.core.errors import PeerLost, PolyrhythmError
from polyrhythm.core.group import Task, Use
from polyrhythm.model.vectors import split

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.wire.arena import Arenas

SPIN = 0.0005  # seconds of polling before sleeping between polls
MAX_SLEEP = 0.002  # seconds

_BEGUN, _DONE, _SLOT = 0, 8, 16  # words of a board; those that change often have cache lines of their own
_SLOTS, _WORDS, _TENSORS = 256, 64, 20  # slots of a board, words of a slot, tensors that fit in a slot
_ELSEWHERE = -1  # in place of a list: it did not fit in the slot
BOARD = 8 * (_SLOT + _SLOTS * _WORDS)

_TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
CODE = {dtype: code for code, dtype in enumerate(_TYPES)}

_thread = threading.local()

SAME = "all workers must call the same collectives in the same order"

Staged = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # a tensor, its copy in shared memory, and the allocation of the copy

EXCHANGES = (
    "all-gather", "all-to-all", "barrier", "broadcast", "gather", "scatter",
    *(f"{name} of {op}" for name in ("reduce", "reduce-scatter") for op in OPERATIONS),
)  # fmt: skip
# The reductions, the same into the first member's buffers only, a copy from those, and exchanges.
TASKS = (*OPERATIONS, *(f"{op} to first" for op in OPERATIONS), "copy of first", *EXCHANGES)


class SharedMemory:
    """One member's view of the boards.

    `members` maps the names of all members, in rank order, to their arenas; `boards` are the offsets of the
    boards in them, and `mine` is the index of this member. While this member waits for others,
    `check_peers(missing, seconds)` is called from time to time; it raises if one of them is gone.
    """

    def __init__(
        self,
        arenas: Arenas,
        members: Mapping[str, int],
        mine: int,
        boards: Sequence[int],
        check_peers: Callable[[Sequence[int], float], None],
    ) -> None:
        self._arenas, self._mine, self._check_peers = arenas, mine, check_peers
        self._names, self._members = tuple(members), tuple(members.values())
        self.count = len(members)
        self._boards = [
            arenas.view(index)[board : board + BOARD].cast("q")
            for index, board in zip(self._members, boards, strict=True)
        ]
        self._memory = [torch.frombuffer(arenas.view(index), dtype=torch.uint8) for index in self._members]
        self._base = self._memory[mine].data_ptr()
        self._begun = self._done = 0
        self._lock = threading.Lock()  # used by `_fence` only
        self._lock.acquire()
        self._plans: dict[tuple[bytes, ...], list[tuple[list[Tensor], list[Tensor]]]] = {}
        self._words: dict[tuple[tuple[int, int, torch.dtype], ...], list[int]] = {}
        self._free: dict[int, list[Tensor]] = {}  # staging memory that is not in use, by size
        self._uses: dict[int, Callable[[int], None]] = {}  # what to do in an exchange, by its number

    def begin(self, tensors: Sequence[Tensor], task: str) -> PendingReduction:
        """Lends flat tensors, in the same order as the other members, to the next collective."""
        lent, staged = self.stage(tensors)
        before = self._begun
        for first in range(0, len(lent) or 1, _TENSORS):
            self._post(lent[first : first + _TENSORS], TASKS.index(task))
        self.advance()
        return PendingReduction(self, before, self._begun, staged)

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        """Lends `outgoing[i]` to member i, and calls `use` with what this one is lent. Blocks until all have.

        A tensor that is lent to several members is one object.
        """
        rows, staged = self.stage_rows(outgoing, self._mine)
        words, before = self._listed(rows), self._begun
        if len(words) > _WORDS - 2:
            lists, more = self.stage([torch.tensor(words, dtype=torch.int64)])
            staged += more
            words = [_ELSEWHERE, lists[0].data_ptr() - self._base, len(words)]
        self._write_slot(TASKS.index(what), words)
        self._uses[self._begun] = lambda place: use(self._lent_to_me(place, outgoing[self._mine]))
        self.finish(self._begun, before)
        self.release(staged)

    def advance(self) -> None:
        """Does this member's part of all collectives that all members have begun."""
        while self._done < self._begun and not self._missing(_BEGUN, self._done + 1):
            self._execute(self._done + 1)

    def finish(self, number: int, before: int = 0) -> None:
        """Waits until all members have done the collective of this number.

        `before` is the number of the last collective that did not use the same tensors.
        """
        try:
            while self._done < number:
                self._wait_until(_BEGUN, self._done + 1)
                self._execute(self._done + 1)
            self._wait_until(_DONE, number)
        except PeerLost as error:
            error.untouched = error.untouched and self._done <= before
            raise
        self._fence()

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Staged]]:
        """Returns the tensors in shared memory, and the copies made of those elsewhere, such as on a GPU."""
        places: list[Tensor] = []
        staged: list[Staged] = []
        for tensor in tensors:
            offset = tensor.data_ptr() - self._base
            if (0 <= offset < self._arenas.size and tensor.is_contiguous()) or not tensor.numel():
                places.append(tensor)
                continue
            size = 1 << (tensor.nbytes - 1).bit_length()  # powers of two, so that memory is reused
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

    def stage_rows(
        self, rows: Sequence[Sequence[Tensor]], own: int
    ) -> tuple[list[Sequence[Tensor]], list[Staged]]:
        """Stages the tensors of all rows but that of index `own`, each object once."""
        distinct = {id(tensor): tensor for at, row in enumerate(rows) if at != own for tensor in row}
        lent, staged = self.stage(list(distinct.values()))
        places = dict(zip(distinct, lent, strict=True))
        return [
            row if at == own else [places[id(each)] for each in row] for at, row in enumerate(rows)
        ], staged

    def unstage(self, staged: Sequence[Staged]) -> None:
        """Copies results back to the original tensors, and frees their copies."""
        for tensor, host, _ in staged:
            tensor.copy_(host.view(tensor.shape))
        self.release(staged)

    def release(self, staged: Sequence[Staged]) -> None:
        """Frees copies that no other member uses any longer."""
        for _, _, memory in staged:
            self._free[memory.numel()].append(memory)

    def _post(self, lent: Sequence[Tensor], task: int) -> None:
        key = tuple((tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in lent)
        words = self._words.get(key)
        if words is None:
            words = [len(lent)]
            for tensor in lent:
                words += self._described(tensor)
            _cache(self._words, key, words)
        self._write_slot(task, words)

    def _write_slot(self, task: int, words: Sequence[int]) -> None:
        """Begins the next collective."""
        number = self._begun + 1
        if number > _SLOTS:
            self.finish(number - _SLOTS)  # until then others may be reading the slot
        board, place = self._boards[self._mine], _SLOT + number % _SLOTS * _WORDS
        board[place] = task
        for at, word in enumerate(words, place + 1):
            board[at] = word
        self._publish(_BEGUN, number)
        self._begun = number

    def _described(self, tensor: Tensor) -> tuple[int, int, int]:
        """Where a lent tensor is, its length and the code of its dtype."""
        if tensor.dtype not in CODE:
            raise PolyrhythmError(f"a collective cannot reduce {tensor.dtype}")
        count = tensor.numel()
        return tensor.data_ptr() - self._base if count else 0, count, CODE[tensor.dtype]

    def _fence(self) -> None:
        """A full memory barrier: no access moves across it."""
        self._lock.release()
        self._lock.acquire()

    def _publish(self, word: int, number: int) -> None:
        self._fence()
        self._boards[self._mine][word] = number

    def _missing(self, word: int, number: int) -> list[int]:
        """The members whose counter is below `number`."""
        return [place for place, board in enumerate(self._boards) if board[word] < number]

    def _wait_until(self, word: int, number: int) -> None:
        began, checked = time.perf_counter(), 0.0
        spin = 0.0 if getattr(_thread, "patient", False) else SPIN
        for board in self._boards:
            while board[word] < number:
                waited = time.perf_counter() - began
                if waited < spin:
                    os.sched_yield()
                    continue
                time.sleep(min(waited / 8, MAX_SLEEP))
                if waited > checked:
                    self._check_peers(self._missing(word, number), waited)
                    checked = waited + 0.01

    def _execute(self, number: int) -> None:
        self._fence()
        place = _SLOT + number % _SLOTS * _WORDS
        if number in self._uses:
            self._check_tasks(place)
            self._uses.pop(number)(place)
            self._done = number
            return self._publish(_DONE, number)
        slots = tuple(board[place : place + 2 + 3 * board[place + 1]].tobytes() for board in self._boards)
        plan = self._plans.get(slots)
        if plan is None:
            plan = self._plan(place)
            _cache(self._plans, slots, plan)
        task = TASKS[self._boards[self._mine][place]]
        for inputs, outputs in plan:
            if task != "copy of first":
                reduce(inputs, task.removesuffix(" to first"), outputs)
            elif self._mine:
                outputs[0].copy_(inputs[0])
        self._done = number
        self._publish(_DONE, number)

    def _listed(self, rows: Sequence[Sequence[Tensor]]) -> list[int]:
        """Where the row of each member begins in this list, and the tensors of each other member's row."""
        starts: list[int] = []
        words: list[int] = []
        for index, row in enumerate(rows):
            starts.append(len(rows) + len(words))
            lent = () if index == self._mine else row
            words.append(len(lent))
            for tensor in lent:
                words += self._described(tensor)
        return [*starts, *words]

    def _lent_to_me(self, place: int, own: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The tensors that each member lends to this one in the exchange of these slots."""
        found: list[Sequence[Tensor]] = []
        for index, (board, memory) in enumerate(zip(self._boards, self._memory, strict=True)):
            if index == self._mine:
                found.append(own)
                continue
            words = board[place + 1 : place + _WORDS]
            if words[0] == _ELSEWHERE:
                _, start, count = words[:3]
                words = self._arenas.view(self._members[index])[start : start + 8 * count].cast("q")
            row = words[self._mine]
            ends = range(row + 1, row + 1 + 3 * words[row], 3)
            found.append([view(memory, *words[at : at + 3]) for at in ends])
        return found

    def _check_tasks(self, place: int) -> None:
        """Raises if another member is in another kind of collective."""
        mine = self._boards[self._mine][place]
        for other, board in enumerate(self._boards):
            if board[place] != mine:
                raise PolyrhythmError(
                    f"{self._names[other]} is in {TASKS[board[place]]} but {self._names[self._mine]} is in "
                    f"{TASKS[mine]}: {SAME}"
                )

    def _plan(self, place: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The inputs and outputs of this member in the collective of these slots."""
        self._check_tasks(place)
        counts, boards = len(self._boards), self._boards
        task = boards[self._mine][place]
        tensors: list[list[Tensor]] = []
        for board, memory in zip(boards, self._memory, strict=True):
            ends = range(place + 2, place + 2 + 3 * board[place + 1], 3)
            tensors.append([view(memory, *board[at : at + 3]) for at in ends])
        mine = [(view.numel(), view.dtype) for view in tensors[self._mine]]
        for other, views in enumerate(tensors):
            theirs = [(view.numel(), view.dtype) for view in views]
            if theirs != mine:
                raise PolyrhythmError(
                    f"{self._names[other]} is in {TASKS[task]} of {theirs} but "
                    f"{self._names[self._mine]} is in {TASKS[task]} of {mine}: {SAME}"
                )
        plan = []
        for same in zip(*tensors, strict=True):
            if TASKS[task] == "copy of first":
                plan.append(([same[0]], [same[self._mine]]))
                continue
            low, high = split(same[0].numel(), counts)[self._mine]
            if low < high:
                slices = [tensor[low:high] for tensor in same]
                plan.append((slices, slices[:1] if TASKS[task].endswith(" to first") else slices))
        return plan


def be_patient() -> None:
    """Lets waits of this thread sleep from the start, because polling would hold up the script's thread."""
    _thread.patient = True


def view(memory: Tensor, offset: int, count: int, code: int) -> Tensor:
    """A tensor in the memory of a member, as a list or a slot describes it."""
    dtype = _TYPES[code]
    return memory[offset : offset + count * dtype.itemsize].view(dtype)


def _cache(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Adds an entry. Most collectives repeat; if they do not, the cache is cleared when it is full."""
    if len(known) >= 4096:
        known.clear()
    known[key] = value


class PendingReduction(Task):
    """A collective that has begun."""

    def __init__(self, all_: SharedMemory, before: int, number: int, staged: Sequence[Staged]) -> None:
        self._all, self._before, self._number, self._staged = all_, before, number, staged

    def join(self) -> None:
        self._all.finish(self._number, self._before)
        self._all.unstage(self._staged)
        self._staged = ()
