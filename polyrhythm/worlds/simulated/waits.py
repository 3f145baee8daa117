"""Waits of a single simulated node: for a reply, for a spawned function, for a lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import PeerLost, PolyrhythmError
from polyrhythm.core.group import Task
from polyrhythm.core.message import Message, Reply
from polyrhythm.core.node import Lock
from polyrhythm.core.peer import Peer
from polyrhythm.worlds.simulated.fibers import Fiber

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.worlds.simulated.node import SimulatedNode


class SimulatedReply(Reply):
    """The reply to a request, on virtual time."""

    def __init__(self, node: SimulatedNode, to: Peer, kind: str, into: Sequence[Tensor]) -> None:
        self.node, self.to, self.kind, self.into = node, to, kind, into
        self.message: Message | None = None
        self.fiber: Fiber | None = None
        self.lost = False

    @property
    def arrived(self) -> bool:
        return self.message is not None or self.lost

    def wait(self) -> Message:
        while self.message is None:
            if self.lost:
                raise PeerLost(
                    f"{self.node.me} waited for {self.to} to reply to {self.kind!r}, which is gone"
                )
            self.fiber = self.node.current()
            self.fiber.block(self)
        return self.message

    def lose(self) -> None:
        """Called when the receiver of the request is gone and will never reply."""
        self.lost = True
        if self.fiber is not None:
            self.node.world.loop.at(self.node.now(), self.fiber.resume, None)

    def arrive(self, message: Message) -> None:
        self.message = message
        if self.fiber is not None:
            self.fiber.resume()

    def __str__(self) -> str:
        return f"{self.to} to reply to {self.kind!r}"


class SimulatedRequest(Message):
    """A request as its receiver sees it."""

    reply: SimulatedReply | None = None  # None once it is sent


class SimulatedTask(Task):
    """A spawned function, in a fiber of its own."""

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
            self.waiter.block("a function that it spawned")
        if self.error is not None:
            raise self.error


class SimulatedLock(Lock):
    """One node's handle on a lock. The lock is a queue of nodes, and the first of them holds it."""

    def __init__(self, node: SimulatedNode, name: str) -> None:
        self._node, self._name = node, name
        self._queue: list[SimulatedNode] = node.world.locks.setdefault(name, [])

    def take(self) -> None:
        if self._node not in self._queue:
            self._queue.append(self._node)
        while self._queue[0] is not self._node:
            self._node.current().block("the lock", repr(self._name))

    def release(self) -> None:
        if self._queue and self._queue[0] is self._node:
            leave(self._queue, self._node)


def leave(queue: list[SimulatedNode], node: SimulatedNode) -> None:
    """Removes a node from the queue of a lock; if it held the lock, the next one gets it."""
    first = queue[0] is node
    queue.remove(node)
    if first and queue:
        for fiber in queue[0].fibers:
            if fiber.waiting and fiber.waiting[0] == "the lock":
                fiber.loop.at(fiber.loop.now, fiber.resume, None)
