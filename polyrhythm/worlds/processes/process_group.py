"""ProcessGroup: the collectives of a process with all other workers, or some of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.collectives import coded_ring as hops
from polyrhythm.collectives import direct, hierarchical, ring
from polyrhythm.collectives.arithmetic import elements_sent, elements_sent_to, flat_views, reduce
from polyrhythm.collectives.choose import choose
from polyrhythm.collectives.shared_memory import BOARD, SharedMemory
from polyrhythm.core.group import Coding, Group, Task, first_number
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.processes.node import ProcessNode


class Place(NamedTuple):
    """Where a node is: its address, its host ("" if it shares memory with nobody) and its arena there."""

    address: str
    host: str = ""
    arena: int = -1


class ProcessGroup(Group):
    """Some workers of a run, or all of them: each takes part in every collective, or it is an error.

    `part`: not all workers. The collectives of a part are numbered so that no other group has the same
    numbers.
    """

    def __init__(self, node: ProcessNode, places: dict[Peer, Place], way: str, part: bool = False) -> None:
        self._node, self._places = node, places
        self.members = self._workers = tuple(sorted(places))
        first = first_number(self._workers) if part else 0
        self._parts: dict[tuple[Peer, ...], ProcessGroup] = {}
        self._hosts = [places[worker].host for worker in self._workers]
        self._way = way
        self._number = first
        self._line = _Line()
        self._inside: SharedMemory | None = None
        mine = places.get(node.me)
        if mine is None:  # a server
            return
        self.rank = self._workers.index(node.me)
        choose(way, self._hosts, 0)
        here = [worker for worker in self._workers if mine.host and places[worker].host == mine.host]
        self._others = [worker for worker in here if worker != node.me]  # of this host
        if len(here) > 1:
            assert node.arenas is not None
            self._inside = SharedMemory(
                node.arenas,
                {str(worker): places[worker].arena for worker in here},
                here.index(node.me),
                _boards(node, here, first) if first else [node.board] * len(here),
                lambda missing, waited: node.in_vain([here[place] for place in missing], waited),
            )
        # Whoever shares memory with nobody is a host of its own.
        names = [places[worker].host or str(worker) for worker in self._workers]
        self._firsts = [self._workers[names.index(name)] for name in dict.fromkeys(names)]

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        vectors, number = flat_views(tensors, op), self._next()
        way = self._choose(vectors)
        if way == "alone":
            return _Done()
        if way != "shared":
            return self._line.put(lambda: self._reduce(way, vectors, op, number))
        assert self._inside is not None
        index, count, far = self.rank, len(self._workers), self._far(self._workers)
        self._node.transport.count(
            sum(elements_sent(each.numel(), count, index) * each.element_size() for each in vectors),
            sum(elements_sent_to(each.numel(), count, index, far) * each.element_size() for each in vectors)
            if far
            else 0,
        )
        return self._inside.begin(vectors, op)

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        vectors = flat_views(tensors, op)
        way = self._choose(vectors)
        if way in ("shared", "alone"):
            return self.begin_all_reduce(*vectors, op=op).join()
        number = self._next()
        self._line.do(lambda: self._reduce(way, vectors, op, number))

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        number = self._next()
        if self._way == "ring" and len(self._workers) > 1:
            if flags:
                self.begin_all_reduce(*flags, op="mean")  # before the other, in the same line
            return self._line.put(lambda: hops.mean(self._node, self._workers, coding, vectors, number))
        codes = coding.send(vectors)
        if len(self._workers) < 2:
            coding.combine([codes], vectors)
            return _Done()

        def work() -> None:
            # In one message, for on a slow network each costs more than a few numbers.
            given = direct.all_gather(self._node, self._workers, [*codes, *flags], number)
            for place, flag in enumerate(flags, len(codes)):
                reduce([each[place] for each in given], "mean", [flag])
            coding.combine([each[: len(each) - len(flags)] for each in given], vectors)

        return self._line.put(work)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        number = self._next()
        if len(self._workers) > 1:
            source = self._workers[root].rank
            self._line.do(lambda: direct.broadcast(self._node, self._workers, tensors, source, number))

    def split(self, members: Sequence[Peer]) -> ProcessGroup:
        part = tuple(sorted(members))
        if part == self._workers:
            return self
        if part not in self._parts:
            places = {worker: self._places[worker] for worker in part}
            self._parts[part] = ProcessGroup(self._node, places, self._way, part=True)
        return self._parts[part]

    def close(self) -> None:
        self._line.close()
        for part in self._parts.values():
            part.close()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _choose(self, tensors: Sequence[Tensor]) -> str:
        if len(self._workers) < 2:
            return "alone"
        return choose(self._way, self._hosts, sum(tensor.nbytes for tensor in tensors))

    def _far(self, workers: Sequence[Peer]) -> list[int]:
        """The places of those of these that are at another site."""
        far = self._node.transport.far
        return [place for place, worker in enumerate(workers) if worker in far] if far else []

    def _reduce(self, way: str, tensors: Sequence[Tensor], op: str, number: int) -> None:
        if way == "direct":
            direct.all_reduce(self._node, self._workers, tensors, op, number)
        elif way == "ring":
            ring.all_reduce(self._node, self._workers, tensors, op, number)
        elif way == "hierarchical":
            if self._inside is not None:
                # Inside its host a first worker gives to all others, and they to it.
                to = self._others if self._node.me in self._firsts else self._others[:1]
                nbytes = sum(tensor.nbytes for tensor in tensors)
                self._node.transport.count(len(to) * nbytes, len(self._far(to)) * nbytes)
            count = len(self._workers)
            hierarchical.all_reduce(self._node, self._inside, self._firsts, count, tensors, op, number)


def _boards(node: ProcessNode, here: Sequence[Peer], number: int) -> list[int]:
    """Where each of these on one host has a board for them alone: each makes one, and tells the others.

    Only the board of all workers is at the same place in every arena.
    """
    arenas = node.arenas
    assert arenas is not None
    mine = arenas.allocate(node.arena, BOARD)
    arenas.view(node.arena)[mine : mine + BOARD] = bytes(BOARD)  # it may have been another's memory before
    kind, boards = f"board {number}", {node.me: mine}
    replies = [node.request(other, kind, board=mine) for other in here if other != node.me]
    for request in direct.gather(node, kind, here):
        boards[request.sender] = request["board"]
        node.reply(request)
    for reply in replies:
        reply.wait()
    return [boards[worker] for worker in here]


class _Done(Task):
    """Nothing to wait for."""

    def join(self) -> None:
        pass


class _Begun(Task):
    """A collective that a thread works on."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.over = threading.Event()
        self.error: BaseException | None = None

    def join(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


class _Line:
    """One thread, started when first needed, that does what it is given in order.

    After an error all that follows fails with it: the others wait for a collective that will not come.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Begun | None = None
        self._failure: BaseException | None = None

    def do(self, work: Callable[[], None]) -> None:
        """At once and in the caller's thread, if nothing else is under way."""
        if self._failure is not None:
            raise self._failure
        if self._last is not None and not self._last.over.is_set():
            return self.put(work).join()
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise

    def put(self, work: Callable[[], None]) -> _Begun:
        self._last = begun = _Begun(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="polyrhythm collectives", daemon=True)
            self._thread.start()
        self._queue.put(begun)
        return begun

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (begun := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    begun.work()
                except BaseException as error:
                    self._failure = error
            begun.error = self._failure
            begun.over.set()
