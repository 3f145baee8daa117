"""What a node on virtual time waits for: an answer, something that it spawned, a lock."""

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


class Asked(Message):
    """A message that knows who waits for its answer."""

    reply: SimulatedReply | None = None


class SimulatedTask(Task):
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


class SimulatedLock(Lock):
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
