"""Crew: how one process takes part in the collectives of all workers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.collectives import direct, hierarchical, ring
from polyrhythm.collectives.arithmetic import sent
from polyrhythm.collectives.choice import choose
from polyrhythm.collectives.shared_memory import SharedMemory
from polyrhythm.node import Peer, Task

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.processes import ProcessNode


class Place(NamedTuple):
    """Where a node is: its address, its host ("" if it shares memory with nobody) and its arena there."""

    address: str
    host: str = ""
    arena: int = -1


class Crew:
    """The workers of a run: all take part in every collective, or it is an error."""

    def __init__(self, node: ProcessNode, places: dict[Peer, Place], way: str) -> None:
        self._node = node
        self._workers = tuple(sorted(places))
        self._hosts = [places[worker].host for worker in self._workers]
        self._way = way
        self._number = 0
        self._line = _Line()
        self._inside: SharedMemory | None = None
        mine = places.get(node.me)
        if mine is None:  # a server
            return
        choose(way, self._hosts, 0)
        here = [worker for worker in self._workers if mine.host and places[worker].host == mine.host]
        if len(here) > 1:
            assert node.arenas is not None
            self._inside = SharedMemory(
                node.arenas,
                {str(worker): places[worker].arena for worker in here},
                here.index(node.me),
                node.board,
                lambda missing, waited: node.in_vain([here[place] for place in missing], waited),
            )
        # Whoever shares memory with nobody is a host of its own.
        names = [places[worker].host or str(worker) for worker in self._workers]
        self._firsts = [self._workers[names.index(name)] for name in dict.fromkeys(names)]

    def begin_all_reduce(self, tensors: Sequence[Tensor], op: str) -> Task:
        self._number += 1
        way, number = self._choose(tensors), self._number
        if way != "shared":
            return self._line.put(lambda: self._reduce(way, tensors, op, number))
        assert self._inside is not None
        index = self._workers.index(self._node.me)
        nbytes = sum(sent(each.numel(), len(self._workers), index) * each.itemsize for each in tensors)
        self._node.transport.bytes_sent += nbytes
        return self._inside.begin(tensors, op)

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:
        way = self._choose(tensors)
        if way == "shared":
            return self.begin_all_reduce(tensors, op).join()
        self._number += 1
        number = self._number
        self._line.do(lambda: self._reduce(way, tensors, op, number))

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        self._number += 1
        number = self._number
        if len(self._workers) > 1:
            self._line.do(lambda: direct.broadcast(self._node, self._workers, tensors, root, number))

    def close(self) -> None:
        self._line.close()

    def _choose(self, tensors: Sequence[Tensor]) -> str:
        if len(self._workers) < 2:
            return "alone"
        return choose(self._way, self._hosts, sum(tensor.nbytes for tensor in tensors))

    def _reduce(self, way: str, tensors: Sequence[Tensor], op: str, number: int) -> None:
        if way == "direct":
            direct.all_reduce(self._node, self._workers, tensors, op, number)
        elif way == "ring":
            ring.all_reduce(self._node, self._workers, tensors, op, number)
        elif way == "hierarchical":
            count = len(self._workers)
            hierarchical.all_reduce(self._node, self._inside, self._firsts, count, tensors, op, number)


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

    def do(self, work: Callable[[], None]) -> None:
        """At once and in the caller's thread, if nothing else is under way."""
        if self._last is None or (self._last.over.is_set() and self._last.error is None):
            work()
        else:
            self.put(work).join()

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
        failure: BaseException | None = None
        while (begun := self._queue.get()) is not None:
            if failure is None:
                try:
                    begun.work()
                except BaseException as error:
                    failure = error
            begun.error = failure
            begun.over.set()
