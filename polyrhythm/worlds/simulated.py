"""Simulated: every node is a greenlet, and only time is made up.

Workers run the user's own unmodified script and compute real gradients. Whatever blocks switches to the
event loop, which moves virtual time to the next event: the end of a step, the arrival of a message. There
is one thread, one queue and one seed, so a run has one result, bit for bit.

Rules that keep it honest:
- `Fiber.block` (see `fibers`) is the only place where a node gives up control.
- Events at the same time happen in the order they were made.
- Each worker owns its random states, and each fiber its autograd mode. Torch's are swapped at switches;
  those of Python and numpy, which strategies do not touch, whenever a worker is away from its script.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from greenlet import GreenletExit
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from polyrhythm.collectives import hops, ring
from polyrhythm.collectives.arithmetic import checked, reduce, sent
from polyrhythm.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.member import Member
from polyrhythm.node import LIFE, Coding, Field, Lock, Message, Node, Peer, Reply, Task
from polyrhythm.part import Part, first_number
from polyrhythm.session import Seat, ServerDone, seat, session
from polyrhythm.worlds.aside import Aside, without_hooks
from polyrhythm.worlds.coordinator import Coordinator
from polyrhythm.worlds.fibers import Fiber, Loop

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.record import RunFolder
    from polyrhythm.strategy import Strategy
    from polyrhythm.worlds.cluster import Cluster, Costs, Crash


@dataclass
class _Notice:
    """What happened to another node (to none, if all is over), and the workers that are there since."""

    kind: str
    peer: Peer | None
    fields: dict[str, Any]
    workers: Sequence[Peer]


class _SimulatedReply(Reply):
    def __init__(self, node: SimulatedNode, to: Peer, kind: str, into: Sequence[Tensor]) -> None:
        self.node, self.to, self.kind, self.into = node, to, kind, into
        self.message: Message | None = None
        self.fiber: Fiber | None = None
        self.lost = False

    def wait(self) -> Message:
        while self.message is None:
            if self.lost:
                raise PeerLost(f"{self.node.me} waited for {self.to} to answer {self.kind!r}, which is gone")
            self.fiber = self.node.current()
            self.fiber.block(str(self.to), "to answer", repr(self.kind))
        return self.message

    def lose(self) -> None:
        """Whoever was asked is gone, and had not answered."""
        self.lost = True
        if self.fiber is not None:
            self.node.world.loop.at(self.node.now(), self.fiber.resume, None)

    def arrive(self, message: Message) -> None:
        self.message = message
        if self.fiber is not None:
            self.fiber.resume()


class _Asked(Message):
    """A message that knows who waits for its answer."""

    reply: _SimulatedReply | None = None


class _SimulatedTask(Task):
    def __init__(self, node: SimulatedNode, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.node, self.error, self.waiter = node, None, None
        self._function, self._args = function, args
        self.fiber = Fiber(node.world.loop, node, self._run)

    error: BaseException | None
    waiter: Fiber | None

    def _run(self) -> None:
        self.node.fiber = self.fiber
        try:
            self._function(*self._args)
        except PolyrhythmError as error:
            self.error = error
        if self.waiter is not None:
            self.node.world.loop.at(self.node.now(), self.waiter.resume, None)

    def join(self) -> None:
        while not self.fiber.dead:
            self.waiter = self.node.current()
            self.waiter.block("what it spawned")
        if self.error is not None:
            raise self.error


class _Collective(Task):
    """One worker's part in a collective."""

    def __init__(
        self, node: SimulatedNode, circle: _Circle, kind: str, tensors: Sequence[Tensor], detail: str
    ) -> None:
        self.node, self.kind, self.tensors, self.detail = node, kind, tensors, detail
        self.circle, self.number = circle, circle.next()
        self.coding: Coding | None = None  # of a gather,
        self.vectors: Sequence[Tensor] = ()  # where what all sent is combined,
        self.flags: Sequence[Tensor] = ()  # and what goes along
        self._done = self._lost = False
        self._waiter: Fiber | None = None

    def lose(self) -> None:
        """One of those that would have to come is dead."""
        self._lost = True
        if self._waiter is not None:
            self.node.world.loop.at(self.node.now(), self._waiter.resume, None)

    def finish(self, _: object = None) -> None:
        self._done = True
        if self._waiter is not None:
            self._waiter.resume()

    def join(self) -> None:
        while not self._done:
            if self._lost:
                gone = ", ".join(self.node.world.coordinator.lost)
                raise PeerLost(f"{self.node.me} waited in {self.kind} for {gone}, which is gone")
            self._waiter = self.node.current()
            self._waiter.block(self.kind, f"number {self.number} with {self.circle}")


class _SimulatedLock(Lock):
    """One node's handle on a lock: those who have it or want it, in order. The first has it."""

    def __init__(self, node: SimulatedNode, name: str) -> None:
        self._node, self._name = node, name
        self._line: list[SimulatedNode] = node.world.locks.setdefault(name, [])

    def take(self) -> None:
        if self._node not in self._line:
            self._line.append(self._node)
        while self._line[0] is not self._node:
            self._node.current().block("the lock", repr(self._name))

    def release(self) -> None:
        if self._line and self._line[0] is self._node:
            leave(self._line, self._node)


def leave(line: list[SimulatedNode], node: SimulatedNode) -> None:
    """Takes a node out of the line for a lock; if it was the first, the next has the lock."""
    first = line[0] is node
    line.remove(node)
    if first and line:
        for fiber in line[0].fibers:
            if fiber.waiting and fiber.waiting[0] == "the lock":
                fiber.loop.at(fiber.loop.now, fiber.resume, None)


class _Several(Task):
    """Several tasks as one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def join(self) -> None:
        for task in self._tasks:
            task.join()


@dataclass
class _Circle:
    """Workers who have collectives with each other, and the number of the last one that this one is in."""

    workers: Sequence[Peer]
    count: int
    name: tuple[int, ...] = ()  # their ranks, unless they are all
    first: int = 0  # what the numbers of its messages begin from
    number: int = 0

    def next(self) -> int:
        self.number += 1
        return self.number

    def __str__(self) -> str:
        return f"workers {', '.join(map(str, self.name))}" if self.name else "all workers"


class SimulatedNode(Node):
    """A node on virtual time."""

    def __init__(self, world: Simulated, me: Peer, life: int) -> None:
        self.world, self.me, self.life, self.seed = world, me, life, world.seed
        self.fibers: list[Fiber] = []
        self.crashed = False
        self.excluding = False
        self.fiber: Fiber | None = None
        self.random_state: Tensor | None = None
        self.bytes_sent = 0
        self._key = (me.role, me.rank)
        self._inbox: deque[Message | _Notice] = deque()
        self._receivers: list[tuple[Fiber, tuple[str, ...]]] = []
        self._asked: dict[_SimulatedReply, None] = {}  # of this node, and not answered yet
        self._changes = 0  # of who is there
        self._sequence = life << LIFE
        self._workers: Sequence[Peer] = ()
        self._left: dict[Peer, int] = {}  # the last life of a peer that has left
        self._dead: dict[Peer, int] = {}  # the same, of those that died
        self._over = False
        self._everyone = _Circle((), world.workers)
        self._parts: dict[tuple[Peer, ...], Node] = {}

    def current(self) -> Fiber:
        if self.crashed:
            raise GreenletExit
        if self.fiber is None:
            raise UsageError(f"{self.me}: only code that its world runs may wait")
        return self.fiber

    @property
    def workers(self) -> Sequence[Peer]:
        return self._workers

    @property
    def lost(self) -> Collection[Peer]:
        return self._dead

    @property
    def servers(self) -> Sequence[Peer]:
        return self.world.present["server"]

    @property
    def over(self) -> bool:
        return self._over

    def alive(self, message: Message) -> bool:
        return message.life > self._left.get(message.sender, -1)

    def meet(self) -> None:
        """Learns who is in the run."""
        self._workers = self._everyone.workers = self.world.present["worker"]

    def now(self) -> float:
        return self.world.loop.now

    # --- messages -----------------------------------------------------------------------------------

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self._sequence += 1
        copies = tuple(tensor.clone() for tensor in tensors)
        self._post(to, Message(self.me, kind, self._sequence, fields, copies))

    def ask(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        self._sequence += 1
        message = _Asked(self.me, kind, self._sequence, fields, tensors, asked=True)
        reply = message.reply = _SimulatedReply(self, to, kind, into)
        if to in self._dead and to not in self._workers:
            reply.lose()
        else:
            self._post(to, message)
        return reply

    def _post(self, to: Peer, message: Message) -> None:
        nbytes = 0
        for tensor in message.tensors:
            nbytes += tensor.nbytes
        self.bytes_sent += nbytes
        there = self.world.nodes[to]
        self.world.carry(self._key, there._key, nbytes, there._arrive, message)

    def _arrive(self, message: Message) -> None:
        reply = message.reply if isinstance(message, _Asked) else None
        if self.crashed:
            if reply is not None:
                reply.lose()
            return
        if reply is not None:
            self._asked[reply] = None
        self._inbox.append(message)
        for index, (fiber, kinds) in enumerate(self._receivers):
            if not kinds or message.kind in kinds:
                del self._receivers[index]
                fiber.resume()
                return

    def receive(self, *kinds: str) -> Message | None:
        fiber, inbox = self.current(), self._inbox
        while True:
            for index, message in enumerate(inbox):
                if isinstance(message, _Notice):
                    del inbox[index]
                    self._heed(message)
                    fiber.told = self._changes
                    return None
                if not kinds or message.kind in kinds:
                    del inbox[index]
                    late = bool(self._dead) and message.life <= self._dead.get(message.sender, -1)
                    self.log(
                        "late" if late else "deliver",
                        sender=str(message.sender), sequence=message.sequence, kind=message.kind,
                    )  # fmt: skip
                    if late:
                        break
                    if self.me.role == "server" and message.tensors:
                        self._take_time(self.world.costs.apply_time(self.rank))
                    return message
            else:
                if fiber.told != self._changes:  # another has heeded it
                    fiber.told = self._changes
                    return None
                self._receivers.append((fiber, kinds))
                fiber.block("a message", *kinds)

    def listen(self, hear: Callable[[Message | None], None], *kinds: str) -> None:
        def ear() -> None:
            try:
                with torch.no_grad():
                    while not self._over:
                        hear(self.receive(*kinds))
            except Exception as error:
                if not self.crashed:
                    self.world.failed(self.me, error)

        self.spawn(ear)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        before, self.excluding = self.excluding, True
        try:
            yield
        finally:
            self.excluding = before

    def answer(self, message: Message, *tensors: Tensor, **fields: Field) -> None:
        assert isinstance(message, _Asked) and message.reply is not None, "this was answered already"
        reply, message.reply = message.reply, None
        self._asked.pop(reply, None)
        if reply.node.crashed:
            return
        nbytes = 0
        # Nobody may look at `into` before the answer arrives, so it can be filled now, without a snapshot.
        for place, tensor in zip(reply.into, tensors, strict=False):
            place.copy_(tensor)
        for tensor in tensors:
            nbytes += tensor.nbytes
        self.bytes_sent += nbytes
        self._sequence += 1
        given = () if reply.into else tuple(tensor.clone() for tensor in tensors)
        answer = Message(self.me, message.kind, self._sequence, fields, given)
        self.world.carry(self._key, reply.node._key, nbytes, reply.arrive, answer)

    def notice(self, notice: _Notice) -> None:
        """Something happened to another node; `receive` tells, after what arrived before."""
        self._inbox.append(notice)
        waiting, self._receivers = self._receivers, []
        for fiber, _ in waiting:
            self.world.loop.at(self.now(), fiber.resume, None)

    def _heed(self, notice: _Notice) -> None:
        """From here on this node knows of it."""
        self._changes += 1
        peer, fields = notice.peer, notice.fields
        if peer is None:
            self._over = True
            return
        self._workers = notice.workers
        if notice.kind == "left":
            self._left[peer] = fields["life"]
            if fields["reason"] != "finished":
                self._dead[peer] = fields["life"]
            self.log("left", peer=str(peer), life=fields["life"], reason=fields["reason"])
        else:
            self.log("joined", peer=str(peer))

    def crash(self) -> None:
        """Stops in the middle of whatever it is doing."""
        self.crashed = True
        for fiber in self.fibers:
            fiber.kill()
        for reply in self._asked:
            reply.lose()
        for line in self.world.locks.values():
            if self in line:
                leave(line, self)

    # --- collectives --------------------------------------------------------------------------------

    def among(self, workers: Sequence[Peer]) -> Node:
        part = tuple(sorted(workers))
        if list(part) == list(self._workers):
            return self
        if part not in self._parts:
            self._parts[part] = _SimulatedPart(self, part)
        return self._parts[part]

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        return self.begin_all_reduce_in(self._everyone, tensors, op)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        return self.begin_coded_mean_in(self._everyone, coding, vectors, flags)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        self.broadcast_in(self._everyone, tensors, root)

    def begin_all_reduce_in(self, circle: _Circle, tensors: Sequence[Tensor], op: str) -> Task:
        if not self.world.ring:
            return self._collect(circle, "all_reduce", checked(tensors, op), op)
        return self.spawn(ring.all_reduce, self, circle.workers, tensors, op, circle.first + circle.next())

    def begin_coded_mean_in(
        self, circle: _Circle, coding: Coding, vectors: Sequence[Tensor], flags: Sequence[Tensor]
    ) -> Task:
        if self.world.ring and len(circle.workers) > 1:
            rest = [self.begin_all_reduce_in(circle, flags, "mean")] if flags else []
            number = circle.first + circle.next()
            codes = self.spawn(hops.mean, self, circle.workers, coding, vectors, number)
            return _Several([*rest, codes])
        mine = _Collective(self, circle, "gather", coding.send(vectors), str(coding.codec))
        mine.coding, mine.vectors, mine.flags = coding, vectors, flags
        return self._enter(mine)

    def broadcast_in(self, circle: _Circle, tensors: Sequence[Tensor], root: int) -> None:
        self._collect(circle, "broadcast", tensors, str(circle.workers[root].rank)).join()

    def _collect(self, circle: _Circle, kind: str, tensors: Sequence[Tensor], detail: str) -> _Collective:
        return self._enter(_Collective(self, circle, kind, tensors, detail))

    def _enter(self, mine: _Collective) -> _Collective:
        """Enters a collective; the last to come does the arithmetic for all."""
        which = mine.circle.name, mine.number
        here = self.world.collectives.setdefault(which, {})
        here[self.rank] = mine
        if self.world.coordinator.lost:
            mine.lose()
        if len(here) == mine.circle.count:
            del self.world.collectives[which]
            self._complete(here, mine.circle.name)
        return mine

    def _complete(self, here: dict[int, _Collective], circle: tuple[int, ...]) -> None:
        ranks = sorted(here)
        first = here[ranks[0]]
        for rank in ranks:
            if (here[rank].kind, here[rank].detail) != (first.kind, first.detail):
                raise PolyrhythmError(
                    f"worker {rank} is in {here[rank].kind} ({here[rank].detail}) where worker {ranks[0]} is "
                    f"in {first.kind} ({first.detail}): all workers must take the same collectives in the "
                    "same order"
                )
        world, nbytes = self.world, sum(tensor.nbytes for tensor in first.tensors)
        if first.kind == "all_reduce":
            for vectors in zip(*(here[rank].tensors for rank in ranks), strict=True):
                if len(ranks) > 1:
                    reduce(vectors, first.detail, vectors)
                self._count(vectors, ranks)
            cost = world.costs.all_reduce(ranks, nbytes)
        elif first.kind == "gather":
            cost = self._gathered(here, ranks)
        else:
            self._spread(here, ranks, int(first.detail))
            cost = world.costs.broadcast(ranks, int(first.detail), nbytes)
        # One after the other, for they share the links. Those of others do not disturb them: inside two sites
        # they have links of their own, and what passes between sites is slow beside what passes inside.
        free = max(world.loop.now, world.collectives_free.get(circle, 0.0)) + (cost if len(ranks) > 1 else 0)
        world.collectives_free[circle] = free
        for rank in ranks:
            world.loop.at(free, here[rank].finish, None)

    def _gathered(self, here: dict[int, _Collective], ranks: Sequence[int]) -> float:
        """All get the codes of all, and make the same of them: it is done once. Returns what it costs."""
        first = here[ranks[0]]
        assert first.coding is not None
        first.coding.combine([here[rank].tensors for rank in ranks], first.vectors)
        for flags in zip(*(here[rank].flags for rank in ranks), strict=True):
            reduce(flags, "mean", flags)
        sizes = [sum(each.nbytes for each in (*here[rank].tensors, *here[rank].flags)) for rank in ranks]
        for rank, size in zip(ranks, sizes, strict=True):
            if rank != ranks[0]:
                first.coding.adopt(first.vectors, here[rank].vectors)
            self.world.nodes[Peer("worker", rank)].bytes_sent += (len(ranks) - 1) * size
        return self.world.costs.all_gather(ranks, sizes)

    def _spread(self, here: dict[int, _Collective], ranks: Sequence[int], root: int) -> None:
        for rank in ranks:
            if rank != root:
                for place, value in zip(here[rank].tensors, here[root].tensors, strict=True):
                    place.copy_(value)
                    self.world.nodes[Peer("worker", root)].bytes_sent += value.nbytes

    def _count(self, vectors: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """What each worker would have sent."""
        count, size = vectors[0].numel(), vectors[0].element_size()
        for index, rank in enumerate(ranks):
            self.world.nodes[Peer("worker", rank)].bytes_sent += sent(count, len(ranks), index) * size

    # --- the rest -----------------------------------------------------------------------------------

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        task = _SimulatedTask(self, function, args)
        self.world.loop.at(self.now(), task.fiber.start, None)
        return task

    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        if not self.world.costs.free:
            raise UsageError(
                "the strategy works on memory that all workers share, and in the cluster file they are on "
                "hosts with links between them: leave bandwidth, latency and sites out, or use a strategy "
                "that sends, such as async"
            )
        return self.world.memory.setdefault(name, torch.zeros(count, dtype=dtype))

    def lock(self, name: str) -> Lock:
        return _SimulatedLock(self, name)

    def log(self, event: str, /, **fields: Any) -> None:
        line = {"t": self.world.loop.now, "event": event, **fields}
        self.world.coordinator.record(self.me, self.life, line)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        totals = self.world.coordinator.totals[self.me, self.life]
        totals.steps, totals.samples, totals.bytes_sent = steps, samples, self.bytes_sent
        totals.compute_s, totals.wait_s = compute_s, wait_s

    def _take_time(self, seconds: float) -> None:
        if seconds > 0:
            self.current().sleep(seconds)


class _SimulatedPart(Part):
    """A node on virtual time among some of the workers."""

    def __init__(self, whole: SimulatedNode, workers: Sequence[Peer]) -> None:
        super().__init__(whole, workers)
        self._node = whole
        ranks = tuple(peer.rank for peer in workers)
        self._circle = _Circle(workers, len(workers), ranks, first_number(workers))

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        return self._node.begin_all_reduce_in(self._circle, tensors, op)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        return self._node.begin_coded_mean_in(self._circle, coding, vectors, flags)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        self._node.broadcast_in(self._circle, tensors, root)


class _SimulatedSeat(Seat):
    processes = False

    def __init__(self, node: SimulatedNode) -> None:
        self.node: SimulatedNode = node
        self.me = node.me
        self._aside: Aside | None = None  # the backward pass that it is in, if it may wait there
        self._numbers = np.random.MT19937()
        self._numbers.state = node.world.numbers.state  # type: ignore[assignment]

    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        if self.node.crashed:
            return {}  # a loader that closes gives its lease back, but that was taken from it already
        answers: list[dict[str, Any]] = []
        fiber = self.node.current()
        blocked = False

        def respond(answer: dict[str, Any]) -> None:
            answers.append(answer)
            if blocked:
                self.node.world.loop.at(self.node.now(), fiber.resume, None)

        self.node.world.coordinator.handle(self.me, kind, fields, respond, self.node.life)
        blocked = True
        if not answers:
            with self.away():
                while not answers:
                    fiber.block("all nodes", "to get as far as", repr(kind))
        return answers[0]

    def join(self, strategy: str | None, batch_norm: str | None) -> dict[str, Any]:
        welcome = self.request("join", strategy=strategy, batch_norm=batch_norm)
        self.node.group = welcome["group"]
        self.node.meet()
        return welcome

    def bring(self, digest: str, blob: bytes) -> None:
        self.node.world.coordinator.result(self.me, digest, blob)

    def compute_time(self) -> float:
        return self.node.world.costs.step_time(self.me.rank, self.node.world.loop.now)

    def spend(self, seconds: float) -> None:
        self.node._take_time(seconds)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        state = random.getstate()
        try:
            yield
        finally:
            random.setstate(state)
            self.come()

    def passes(self, backward: Callable[[], None]) -> None:
        if self._aside is not None:  # one pass inside another: checkpointing, say
            backward()
            return
        self._aside = Aside(backward)
        try:
            self._aside.run()
        finally:
            self._aside = None

    def within(self, wait: Callable[[], None]) -> None:
        if self._aside is not None and self._aside.here:
            self._aside.wait(wait)
        elif torch._C._current_graph_task_id() != -1:
            raise UsageError(
                "batch_norm=sync can be simulated with loss.backward(), and not with torch.autograd.grad(); "
                "`polyrhythm run` knows both"
            )
        else:
            with without_hooks():
                wait()

    def come(self) -> None:
        """Puts this worker's source of numpy's random numbers in place; copying its state would take long."""
        set_bit_generator(self._numbers)

    def flush(self) -> None:
        pass


# A message on its way to its host: that, its bytes, how long it takes from the first to the last of them, and
# what is called with it then.
_Landing = tuple[tuple[str, int], int, float, Callable[..., Any], Message]


class Simulated:
    """A world of greenlets. `run` trains to the end and returns the coordinator with all that is known."""

    def __init__(
        self,
        program: Callable[[], None],
        *,
        workers: int,
        servers: int = 0,
        colocated: bool = False,
        strategy: Strategy | None = None,
        cluster: Cluster,
        seed: int = 0,
        collective: str = "auto",
        folder: RunFolder | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
        batch_norm: str | None = None,
    ) -> None:
        self.program, self.workers, self.seed, self.cluster = program, workers, seed, cluster
        self._colocated = colocated
        self.ring = collective == "ring"
        self._comes_back = False
        self.loop = Loop()
        self.nodes: dict[Peer, SimulatedNode] = {}
        self.present: dict[str, list[Peer]] = {"worker": [], "server": []}
        self.collectives: dict[tuple[tuple[int, ...], int], dict[int, _Collective]] = {}  # by circle, number
        self.collectives_free: dict[tuple[int, ...], float] = {}  # by circle: when the last one is over
        self.memory: dict[str, Tensor] = {}  # that all workers share, by name
        self.locks: dict[str, list[SimulatedNode]] = {}  # who has each, and who waits for it
        self.costs: Costs = cluster.place(workers, servers, seed, colocated)
        self._fibers: list[Fiber] = []
        self._say = say
        self._owner: SimulatedNode | None = None
        self._home_state = torch.get_rng_state()
        self.numbers = get_bit_generator()
        self.coordinator: Coordinator = Coordinator(
            workers=workers,
            servers=servers,
            strategy=strategy,
            seed=seed,
            clock=lambda: self.loop.now,
            start_servers=self._start_servers,
            tell=self._tell,
            replace=lambda peer: self._comes_back,
            folder=folder,
            batch_norm=batch_norm,
            collective=collective,
            say=say,
            sites=cluster.places(workers),
        )
        for rank in range(workers):
            self._start(Peer("worker", rank))
        for crash in cluster.failures:
            for rank in crash.workers:
                if rank < workers:
                    self.loop.at(crash.at, self._crash, (Peer("worker", rank), crash))

    def run(self) -> Coordinator:
        grad, state = torch.is_grad_enabled(), random.getstate()
        try:
            here = self.coordinator
            # Asked also whether it is finished, for there may be failures still to come.
            self.loop.run(lambda: here.failure is not None or (bool(here.digest) and here.finished))
            if self.coordinator.failure is None and not self.coordinator.finished:
                waiting = "; ".join(str(fiber) for fiber in self._fibers if not fiber.dead)
                self.coordinator.fail(f"deadlock at {self.loop.now:.6g} s: {waiting or 'nobody is left'}")
            if self.costs.sites is not None:
                self.coordinator.passed = round(self.costs.sites.passed)
        finally:
            for fiber in self._fibers:
                fiber.kill()
            torch.set_rng_state(self._home_state)
            set_bit_generator(self.numbers)
            random.setstate(state)
            torch.set_grad_enabled(grad)
        return self.coordinator

    def carry(
        self,
        source: tuple[str, int],
        target: tuple[str, int],
        nbytes: int,
        arrive: Callable[..., Any],
        what: Message,
    ) -> None:
        """Brings a message over the network: `arrive(what)` is called when its last byte is there."""
        loop, costs = self.loop, self.costs
        if costs.free or costs.together(source, target):
            loop.at(loop.now, arrive, what)
            return
        head, span = costs.depart(source, target, nbytes, loop.now)
        landing = (target, nbytes, span, arrive, what)
        crossing = costs.crossing(source, target)
        if crossing is None:
            loop.at(head, self._land, landing)
        else:
            assert costs.sites is not None
            head += sum(costs.sites.latency[site] for site in crossing)
            loop.at(head, self._cross, (crossing, ("up", "down"), landing))

    def _land(self, message: _Landing) -> None:
        target, nbytes, span, arrive, what = message
        self.loop.at(self.costs.land(target, nbytes, self.loop.now, span), arrive, what)

    def _cross(self, message: tuple[tuple[int, ...], tuple[str, ...], _Landing]) -> None:
        """A message is at the first of these sites' links; when it is through all of them, it lands."""
        (site, *sites), (way, *ways), (target, nbytes, span, *rest) = message
        assert self.costs.sites is not None
        head, span = self.costs.sites.through(site, way, nbytes, self.loop.now, span)
        landing = (target, nbytes, span, *rest)
        self.loop.at(head, self._cross if sites else self._land, (sites, ways, landing) if sites else landing)

    def lend_random_state(self, node: SimulatedNode) -> None:
        """Puts a worker's own random state in place; servers draw nothing."""
        if node is self._owner or node.me.role == "server":
            return
        if self._owner is not None:
            self._owner.random_state = torch.get_rng_state()
        torch.set_rng_state(self._home_state if node.random_state is None else node.random_state)
        self._owner = node

    def _start_servers(self, count: int) -> None:
        self.costs = self.cluster.place(self.workers, count, self.seed, self._colocated)
        for rank in range(count):
            self._start(Peer("server", rank))

    def _crash(self, which: tuple[Peer, Crash]) -> None:
        """A worker stops dead, unless it is gone by now; like a process that is killed."""
        peer, crash = which
        if peer not in self.coordinator.members:
            return
        self._comes_back = crash.back is not None
        self.coordinator.died(peer, f"crashed at {crash.at:.6g} s")
        if self.coordinator.failure is None:
            self.nodes[peer].crash()
            for here in self.collectives.values():
                for part in here.values():
                    part.lose()
            if crash.back is not None and peer in self.coordinator.expected:  # it was not done
                self.loop.at(crash.back, self._come_back, peer)

    def _come_back(self, peer: Peer) -> None:
        self._start(peer, self.coordinator.lives[peer])

    def _start(self, me: Peer, life: int = 0) -> None:
        node = self.nodes[me] = SimulatedNode(self, me, life)
        if not life:  # later ones are there when they have joined
            self.present[me.role].append(me)
        fiber = Fiber(self.loop, node, lambda: self._live(node, fiber))
        self._fibers.append(fiber)
        self.loop.at(self.loop.now, fiber.start, None)

    def _live(self, node: SimulatedNode, fiber: Fiber) -> None:
        """A node's life: the user's script from its first to its last line."""
        node.fiber = fiber
        here = _SimulatedSeat(node)
        here.come()
        seat.set(here)
        try:
            self.program()
            mine = session.get()
            if not isinstance(mine, Member):
                raise UsageError("the script never called polyrhythm.init() and session.prepare(...)")
            mine.close()
        except (ServerDone, GreenletExit):
            pass
        except Exception as error:
            if not node.crashed:  # while it was stopped: a process that is killed says nothing either
                self.failed(node.me, error)

    def failed(self, peer: Peer, error: Exception) -> None:
        """A node cannot go on, and so the run cannot."""
        if isinstance(error, PolyrhythmError):
            self.coordinator.fail(str(error), error.exit_code)
            return
        for line in "".join(traceback.format_exception(error)).rstrip().splitlines():
            self._say(f"[{peer}] {line}")
        self.coordinator.fail(f"{peer} failed: {type(error).__name__}: {error}")

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Tells every member, but not whom it is about, what happened."""
        peer = Peer(fields["role"], fields["rank"]) if fields else None
        if peer is not None:
            others = [each for each in self.present[peer.role] if each != peer]
            self.present[peer.role] = sorted([*others, peer]) if kind == "joined" else others
        notice = _Notice(kind, peer, fields, self.present["worker"])
        for other in self.coordinator.members:
            if other != peer:
                self.nodes[other].notice(notice)
