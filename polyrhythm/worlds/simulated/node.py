"""SimulatedNode: a worker or server on virtual time."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from greenlet import GreenletExit

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Delivered, DeliveredLate, Event, PeerJoined, PeerLeft, Totals
from polyrhythm.core.group import Task
from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.node import Lock, Members, Memory, Node
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.core.stopping import Stopping
from polyrhythm.worlds.simulated.fibers import Fiber
from polyrhythm.worlds.simulated.group import SimulatedGroup
from polyrhythm.worlds.simulated.modules import ModuleTable
from polyrhythm.worlds.simulated.random_states import RandomState
from polyrhythm.worlds.simulated.waits import (
    SimulatedLock,
    SimulatedReply,
    SimulatedRequest,
    SimulatedTask,
    leave,
)

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.simulated.world import Simulated


class MembershipChange(NamedTuple):
    """A notice about another node, and the workers that are in the run from then on."""

    notice: Notice
    workers: Sequence[Peer]


class SimulatedNode(Node):
    """A worker or server on virtual time."""

    def __init__(self, world: Simulated, me: Peer, incarnation: int) -> None:
        self.world, self.me, self.incarnation, self.seed = world, me, incarnation, world.plan.seed
        self.fibers: list[Fiber] = []
        self.crashed = False
        self.locked = False  # inside `lock()`
        self.fiber: Fiber | None = None  # the one that runs now
        self.random, self._modules = RandomState(world.generators), ModuleTable()
        self.bytes_sent = self.bytes_between = 0  # in all, and to other sites
        self._name = str(me)
        self._inbox: deque[Message | MembershipChange] = deque()
        self._receivers: list[tuple[Fiber, tuple[str, ...]]] = []
        self._unanswered: dict[SimulatedReply, None] = {}  # replies that other nodes wait for
        self._changes = 0  # how often membership has changed, as far as this node was told
        self._sequence = incarnation << INCARNATION_SHIFT
        self.members = Members()
        self.memory = _SimulatedMemory(self)
        self.stopping = Stopping()
        self.on_notice = {}
        self._group: SimulatedGroup | None = None

    def current(self) -> Fiber:
        if self.crashed:
            raise GreenletExit
        if self.fiber is None or threading.get_ident() != self.world.foreign_threads.thread:
            raise self.world.foreign_threads.refuse(self.me)
        return self.fiber

    def learn_members(self) -> None:
        """Called when all nodes have joined."""
        self.members.workers = self.world.present["worker"]
        self.members.servers = self.world.present["server"]
        self._group = SimulatedGroup(self, self.members.workers)
        self._group.count = self.world.plan.workers

    @property
    def everyone(self) -> SimulatedGroup:
        assert self._group is not None
        return self._group

    def now(self) -> float:
        return self.world.loop.now

    # --- messages -----------------------------------------------------------------------------------

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self._sequence += 1
        copies = tuple(tensor.clone() for tensor in tensors)
        there = self.world.nodes[to]
        self._carry(there, there._arrive, Message(self.me, kind, self._sequence, fields, copies), copies)

    def request(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        self._sequence += 1
        message = SimulatedRequest(self.me, kind, self._sequence, fields, tensors)
        reply = message.reply = SimulatedReply(self, to, kind, into)
        lost = self.members.lost
        if lost and to in lost and to not in self.members.workers:
            reply.lose()
        else:
            there = self.world.nodes[to]
            self._carry(there, there._arrive, message, tensors)
        return reply

    def _carry(
        self,
        to: SimulatedNode,
        arrive: Callable[..., None],
        message: Message,
        payload: Sequence[Tensor],
    ) -> None:
        """Sends a message over the network, and counts the bytes of its payload."""
        nbytes = 0
        for tensor in payload:
            nbytes += tensor.nbytes
        self.bytes_sent += nbytes
        world = self.world
        if world.costs.sites is not None and world.costs.sites_crossed(self.me, to.me) is not None:
            self.bytes_between += nbytes
        world.network.carry(self.me, to.me, nbytes, arrive, message)

    def _arrive(self, message: Message) -> None:
        reply = message.reply if isinstance(message, SimulatedRequest) else None
        if self.crashed:
            if reply is not None:
                reply.lose()
            return
        if reply is not None:
            self._unanswered[reply] = None
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
                if isinstance(message, MembershipChange):
                    del inbox[index]
                    self._change_members(message)
                    fiber.changes_seen = self._changes
                    return None
                if not kinds or message.kind in kinds:
                    del inbox[index]
                    late = bool(self.members.lost) and self.members.outdated(message)
                    kind = DeliveredLate if late else Delivered
                    self.log(kind(str(message.sender), message.sequence, message.kind))
                    if late:
                        break
                    if self.me.role == "server" and message.tensors:
                        self.take_time(self.world.costs.apply_time(self.rank))
                    return message
            else:
                if fiber.changes_seen != self._changes:  # another fiber took the notice from the inbox
                    fiber.changes_seen = self._changes
                    return None
                self._receivers.append((fiber, kinds))
                fiber.block("a message", *kinds)

    def subscribe(self, on_message: Callable[[Message | None], None], *kinds: str) -> None:
        def listen() -> None:
            while not self.members.over:
                on_message(self.receive(*kinds))

        self.serve(listen)

    def serve(self, function: Callable[[], None]) -> Task:
        def body() -> None:
            try:
                with torch.no_grad():
                    function()
            except Exception as error:
                if not self.crashed:
                    self.world.failed(self.me, error)

        return self.spawn(body)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        before, self.locked = self.locked, True
        try:
            yield
        finally:
            self.locked = before

    def reply(self, message: Message, *tensors: Tensor, **fields: Field) -> bool:
        assert isinstance(message, SimulatedRequest) and message.reply is not None, "replied already"
        reply, message.reply = message.reply, None
        self._unanswered.pop(reply, None)
        if reply.node.crashed:
            return False
        # The requester may not read `into` before the reply arrives, so it is filled now, without a copy.
        for place, tensor in zip(reply.into, tensors, strict=False):
            place.copy_(tensor)
        given = () if reply.into else tuple([tensor.clone() for tensor in tensors])
        self._sequence += 1
        reply_message = Message(self.me, message.kind, self._sequence, fields, given)
        self._carry(reply.node, reply.arrive, reply_message, tensors)
        return False

    def notice(self, change: MembershipChange) -> None:
        """Queues a notice; `receive` tells the strategy, after all messages that arrived before."""
        self._inbox.append(change)
        waiting, self._receivers = self._receivers, []
        for fiber, _ in waiting:
            self.world.loop.at(self.now(), fiber.resume, None)

    def _change_members(self, change: MembershipChange) -> None:
        self._changes += 1
        notice = change.notice
        peer = notice.peer
        if peer is None:
            self.members.over = True
            return
        self.members.workers = change.workers
        if notice.kind == "left":
            self.members.leave(peer, notice.incarnation, notice.finished)
            self.log(PeerLeft(str(peer), notice.incarnation, notice.reason))
        else:
            self.log(PeerJoined(str(peer)))

    def crash(self) -> None:
        """Stops all fibers of this node, as if its process were killed."""
        if self.crashed:
            return
        self.crashed = True
        for fiber in self.fibers:
            fiber.kill()
        for reply in self._unanswered:
            reply.lose()
        for queue in self.world.locks.values():
            if self in queue:
                leave(queue, self)

    # --- the rest -----------------------------------------------------------------------------------

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        task = SimulatedTask(self, function, args)
        self.world.loop.at(self.now(), task.fiber.start, None)
        return task

    def log(self, event: Event) -> None:
        self.world.coordinator.log(self._name, event)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        self.world.coordinator.tally.totals[self.me, self.incarnation] = Totals(
            steps, samples, self.bytes_sent, self.bytes_between, compute_s, wait_s
        )

    def install_random_state(self) -> None:
        """Called before the script or the optimizer of this node runs."""
        self.world.generators.install(self.random)

    def install_modules(self) -> None:
        """Called before a fiber of this node continues."""
        if self.world.modules is not None:
            self.world.modules.install(self._modules)

    def take_time(self, seconds: float) -> None:
        if seconds > 0:
            self.current().sleep(seconds)


class _SimulatedMemory(Memory):
    """Ordinary memory: all simulated nodes are in one process."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        if not self._node.world.costs.free:
            raise UsageError(
                "the strategy works on memory that all workers share, and in the cluster file they are on "
                "hosts with links between them: leave bandwidth, latency and sites out, or use a strategy "
                "that sends, such as async"
            )
        return self._node.world.memory.setdefault(name, torch.zeros(count, dtype=dtype))

    def lock(self, name: str) -> Lock:
        return SimulatedLock(self._node, name)
