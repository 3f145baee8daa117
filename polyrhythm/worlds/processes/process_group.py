"""ProcessGroup: collectives between processes, over all workers or some of them."""

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
from polyrhythm.collectives.shared_messages import SharedMessages, board_bytes
from polyrhythm.core.group import Coding, Group, Task, Use, first_number
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.processes.node import ProcessNode


class NodeLocation(NamedTuple):
    """Where a node is: its address, host id ("" if it shares no memory) and arena."""

    address: str
    host: str = ""
    arena: int = -1


class ProcessGroup(Group):
    """All workers of a run, or some. Each member must take part in every collective.

    A group of some workers (`subgroup`) numbers its collectives so that no other group uses the same numbers.
    """

    def __init__(
        self,
        node: ProcessNode,
        locations: dict[Peer, NodeLocation],
        algorithm: str,
        subgroup: bool = False,
        name: str = "",
    ) -> None:
        self._node, self._locations = node, locations
        self.members = self._workers = tuple(sorted(locations))
        first = first_number(self._workers, name) if subgroup else 0
        self._subgroups: dict[tuple[tuple[Peer, ...], str], ProcessGroup] = {}
        self._hosts = [locations[worker].host for worker in self._workers]
        self._algorithm = algorithm
        self._number = first
        self._executor = _SerialExecutor()
        self._shared_memory: SharedMemory | None = None
        mine = locations.get(node.me)
        if mine is None:  # a server
            return
        self.rank = self._workers.index(node.me)
        choose(algorithm, self._hosts, 0)  # raises if the algorithm does not fit the hosts
        here = [worker for worker in self._workers if mine.host and locations[worker].host == mine.host]
        self._others = [worker for worker in here if worker != node.me]  # on this host
        if len(here) > 1:
            assert node.arenas is not None
            self._shared_memory = SharedMemory(
                node.arenas,
                {str(worker): locations[worker].arena for worker in here},
                here.index(node.me),
                _boards(node, here, str(first), BOARD) if first else [node.board] * len(here),
                lambda missing, waited: node.check_wait(
                    [here[index] for index in missing], waited, self._workers
                ),
            )
        # A worker that shares no memory counts as a host of its own.
        names = [locations[worker].host or str(worker) for worker in self._workers]
        self._leaders = [self._workers[names.index(name)] for name in dict.fromkeys(names)]

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        vectors, number = flat_views(tensors, op), self._next()
        algorithm = self._choose(vectors)
        if algorithm == "alone":
            return _Done()
        if algorithm != "shared":
            return self._executor.submit(lambda: self._reduce(algorithm, vectors, op, number))
        assert self._shared_memory is not None
        index, count, remote = self.rank, len(self._workers), self._at_other_sites(self._workers)
        self._node.transport.traffic.count(
            sum(elements_sent(each.numel(), count, index) * each.element_size() for each in vectors),
            sum(
                elements_sent_to(each.numel(), count, index, remote) * each.element_size() for each in vectors
            )
            if remote
            else 0,
        )
        return self._shared_memory.begin(vectors, op)

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        vectors = flat_views(tensors, op)
        algorithm = self._choose(vectors)
        if algorithm in ("shared", "alone"):
            return self.begin_all_reduce(*vectors, op=op).join()
        number = self._next()
        self._executor.run(lambda: self._reduce(algorithm, vectors, op, number))

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        number = self._next()
        if self._algorithm == "ring" and len(self._workers) > 1:
            if flags:
                self.begin_all_reduce(*flags, op="mean")  # before the other, in the same executor
            return self._executor.submit(
                lambda: hops.mean(self._node, self._workers, coding, vectors, number)
            )
        codes = coding.send(vectors)
        if len(self._workers) < 2:
            coding.combine([codes], vectors)
            return _Done()

        def work() -> None:
            # In one message: on a slow network a message costs more than a few numbers.
            gathered = direct.all_gather(self._node, self._workers, [*codes, *flags], number)
            for index, flag in enumerate(flags, len(codes)):
                reduce([each[index] for each in gathered], "mean", [flag])
            coding.combine([each[: len(each) - len(flags)] for each in gathered], vectors)

        return self._executor.submit(work)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        number = self._next()
        if len(self._workers) > 1:
            source = self._workers[root].rank
            self._executor.run(lambda: direct.broadcast(self._node, self._workers, tensors, source, number))

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        number = self._next()
        algorithm = self._choose([])
        if algorithm == "alone":
            use([outgoing[0]])
        elif algorithm == "shared":
            assert self._shared_memory is not None
            nbytes = [sum(tensor.nbytes for tensor in each) for each in outgoing]
            nbytes[self.rank] = 0
            remote = self._at_other_sites(self._workers)
            self._node.transport.traffic.count(sum(nbytes), sum(nbytes[index] for index in remote))
            self._shared_memory.exchange(what, outgoing, use)
        else:
            self._executor.run(lambda: self._send(what, outgoing, use, number))

    def _send(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use, number: int) -> None:
        """An exchange by messages. To workers of this host tensors in shared memory are sent by reference."""
        memory = self._shared_memory
        rows, staged = memory.stage_rows(outgoing, self.rank) if memory else (outgoing, [])
        direct.exchange(self._node, self._workers, what, rows, use, number)
        if memory:
            memory.release(staged)

    def split(self, members: Sequence[Peer], name: str = "") -> ProcessGroup:
        workers = tuple(sorted(members))
        if workers == self._workers and not name:
            return self
        if (workers, name) not in self._subgroups:
            locations = {worker: self._locations[worker] for worker in workers}
            self._subgroups[workers, name] = ProcessGroup(
                self._node, locations, self._algorithm, subgroup=True, name=name
            )
        return self._subgroups[workers, name]

    def shared_messages(self) -> tuple[list[Peer], SharedMessages | None]:
        """The members on this host, and messages to them in shared memory. Each of them calls this, once."""
        here = sorted([self._node.me, *self._others])
        arenas = self._node.arenas
        if len(here) < 2 or arenas is None:
            return [], None
        boards = _boards(self._node, here, "messages", board_bytes(len(here)))
        members = {str(worker): self._locations[worker].arena for worker in here}
        return here, SharedMessages(arenas, members, here.index(self._node.me), boards)

    def close(self) -> None:
        self._executor.close()
        for subgroup in self._subgroups.values():
            subgroup.close()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _choose(self, tensors: Sequence[Tensor]) -> str:
        if len(self._workers) < 2:
            return "alone"
        return choose(self._algorithm, self._hosts, sum(tensor.nbytes for tensor in tensors))

    def _at_other_sites(self, workers: Sequence[Peer]) -> list[int]:
        """The indices of the workers that are at another site."""
        remote = self._node.transport.traffic.other_site_peers
        return [index for index, worker in enumerate(workers) if worker in remote] if remote else []

    def _reduce(self, algorithm: str, tensors: Sequence[Tensor], op: str, number: int) -> None:
        if algorithm == "direct":
            direct.all_reduce(self._node, self._workers, tensors, op, number)
        elif algorithm == "ring":
            ring.all_reduce(self._node, self._workers, tensors, op, number)
        elif algorithm == "hierarchical":
            if self._shared_memory is not None:
                # Within its host the leader sends to all others, and they send to the leader.
                to = self._others if self._node.me in self._leaders else self._others[:1]
                nbytes = sum(tensor.nbytes for tensor in tensors)
                self._node.transport.traffic.count(len(to) * nbytes, len(self._at_other_sites(to)) * nbytes)
            hierarchical.all_reduce(
                self._node, self._shared_memory, self._leaders, self._workers, tensors, op, number
            )


def _boards(node: ProcessNode, here: Sequence[Peer], name: str, nbytes: int) -> list[int]:
    """Allocates a board in each member's arena. Returns their offsets, which members exchange.

    Only the board of the group of all workers has the same offset in every arena.
    """
    arenas = node.arenas
    assert arenas is not None
    mine = arenas.allocate(node.arena, nbytes)
    arenas.view(node.arena)[mine : mine + nbytes] = bytes(nbytes)  # the memory may have been used before
    kind, boards = f"board {name}", {node.me: mine}
    replies = [node.request(other, kind, board=mine) for other in here if other != node.me]
    for request in direct.gather(node, kind, here):
        boards[request.sender] = request["board"]
        node.reply(request)
    for reply in replies:
        reply.wait()
    return [boards[worker] for worker in here]


class _Done(Task):
    """A task that is done."""

    def join(self) -> None:
        pass


class _QueuedTask(Task):
    """A collective in the queue of an executor."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: BaseException | None = None

    def join(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class _SerialExecutor:
    """Runs collectives in order, in one thread that is started when first needed.

    After an error all later ones fail with it, because the other workers wait for the one that failed.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_QueuedTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _QueuedTask | None = None
        self._failure: BaseException | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Runs `work` and waits: in the caller's thread if nothing else is in progress."""
        if self._failure is not None:
            raise self._failure
        if self._last is not None and not self._last.done.is_set():
            return self.submit(work).join()
        try:
            work()
        except BaseException as error:
            self._failure = error
            raise

    def submit(self, work: Callable[[], None]) -> _QueuedTask:
        self._last = task = _QueuedTask(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="polyrhythm collectives", daemon=True)
            self._thread.start()
        self._queue.put(task)
        return task

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    task.work()
                except BaseException as error:
                    self._failure = error
            task.error = self._failure
            task.done.set()
