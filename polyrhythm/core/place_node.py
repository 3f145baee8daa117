"""PlaceNode: a node among those that hold the same part of other models.

Where several workers hold one model together, each has a *place* in it: a stage, a part of each tensor. To a
strategy those that hold one model are one worker. So the node that it gets numbers the models: its peer
`worker 1` is the worker at its own place in model 1. A server has one such node for each place, with messages
of its own: "push" for place 1 is "push#1".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.core.events import Event
from polyrhythm.core.group import Coding, Group, Task, Use
from polyrhythm.core.mesh import Axis, Mesh
from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.node import Members, Node
from polyrhythm.core.peer import Peer
from polyrhythm.core.scoped_node import ScopedMemory

if TYPE_CHECKING:
    from torch import Tensor


class Place:
    """One place in each model, where `size` workers with consecutive ranks hold a model."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size

    def model(self, worker: Peer) -> Peer:
        """The model that a worker holds a part of, as a worker of the strategy."""
        return Peer(worker.role, worker.rank // self.size) if worker.role == "worker" else worker

    def worker(self, model: Peer) -> Peer:
        """The worker at this place in a model."""
        return Peer(model.role, model.rank * self.size + self.number) if model.role == "worker" else model

    def here(self, worker: Peer) -> bool:
        """True if a worker is at this place in its model."""
        return worker.rank % self.size == self.number


class PlaceNode(Node):
    """A node whose workers are those at one place in all models, numbered by model."""

    def __init__(self, node: Node, place: Place, mesh: Mesh) -> None:
        """`mesh`: the place of every model on the axes `site` and `data`."""
        self._node, self._place, self.mesh = node, place, mesh
        self._suffix = f"#{place.number}" if place.number else ""
        self.me, self.seed = place.model(node.me), node.seed
        self.incarnation, self.cohort, self.stopping = node.incarnation, node.cohort, node.stopping
        self.on_notice = node.on_notice
        self.members: Members = _PlaceMembers(node.members, place)
        self.memory = ScopedMemory(node.memory, self._suffix)
        self._group: Group | None = None

    @property
    def everyone(self) -> Group:
        if self._group is None:
            workers = [self._place.worker(model) for model in self.members.workers]
            self._group = _PlaceGroup(self._node, workers, self._place)
        return self._group

    def group(self, *axes: Axis) -> Group:
        models = [Peer("worker", rank) for rank in self.mesh.ranks(self.rank, *axes)]
        return self.everyone.split(models)

    def now(self) -> float:
        return self._node.now()

    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        self._node.send(self._place.worker(to), kind + self._suffix, *tensors, **fields)

    def request(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        there = self._place.worker(to)
        return self._node.request(there, kind + self._suffix, *tensors, into=into, **fields)

    def reply(self, message: Message, *tensors: Tensor, **fields: Field) -> bool:
        return self._node.reply(message, *tensors, **fields)

    def receive(self, *kinds: str) -> Message | None:
        return self._seen(self._node.receive(*[kind + self._suffix for kind in kinds]))

    def subscribe(self, on_message: Callable[[Message | None], None], *kinds: str) -> None:
        scoped = [kind + self._suffix for kind in kinds]
        self._node.subscribe(lambda message: on_message(self._seen(message)), *scoped)

    def serve(self, function: Callable[[], None]) -> Task:
        return self._node.serve(function)

    def lock(self) -> AbstractContextManager[None]:
        return self._node.lock()

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        return self._node.expect(self._place.worker(sender), kind + self._suffix, into)

    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        return self._node.spawn(function, *args)

    def log(self, event: Event) -> None:
        self._node.log(event)

    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        # The steps and examples of a model count once.
        once = int(self._place.number == 0)
        self._node.totals(steps=once * steps, samples=once * samples, compute_s=compute_s, wait_s=wait_s)

    def whole_norm(self, norm: float) -> float:
        me, size = self._place.number, self._place.size
        first, norms = self._node.me.rank - me, {me: norm}
        others = [place for place in range(size) if place != me]
        for place in others:
            self._node.send(Peer("worker", first + place), f"norm of place {me}", norm=norm)
        for place in others:
            message = receive_from(self._node, Peer("worker", first + place), f"norm of place {place}")
            norms[place] = message["norm"]
        return math.hypot(*(norms[place] for place in range(size)))  # in the same order at all places

    def _seen(self, message: Message | None) -> Message | None:
        if message is not None:
            message.kind = message.kind.removesuffix(self._suffix)
            message.sender = self._place.model(message.sender)
        return message


class _PlaceMembers(Members):
    """The members of a run as those at one place see them."""

    def __init__(self, members: Members, place: Place) -> None:
        self._members, self._place = members, place

    @property
    def workers(self) -> Sequence[Peer]:  # type: ignore[override]
        return [self._place.model(each) for each in self._members.workers if self._place.here(each)]

    @property
    def servers(self) -> Sequence[Peer]:  # type: ignore[override]
        return self._members.servers

    @property
    def lost(self) -> dict[Peer, int]:  # type: ignore[override]
        lost = self._members.lost.items()
        return {self._place.model(each): number for each, number in lost if self._place.here(each)}

    @property
    def over(self) -> bool:  # type: ignore[override]
        return self._members.over

    @property
    def _left(self) -> dict[Peer, int]:  # type: ignore[override]
        left = self._members._left.items()
        return {
            self._place.model(each): number
            for each, number in left
            if each.role != "worker" or self._place.here(each)
        }


class _PlaceGroup(Group):
    """Some of the workers at one place, numbered by model."""

    def __init__(self, node: Node, workers: Sequence[Peer], place: Place, name: str = "") -> None:
        self._node, self._workers, self._place, self._name = node, sorted(workers), place, name
        self.members = [place.model(each) for each in self._workers]
        self.rank = (
            self._workers.index(node.me) if node.me in self._workers else -1
        )  # a server is in no group
        if not node.incarnation:  # the others made theirs without a replacement, which has no collectives
            _ = self._group

    @cached_property
    def _group(self) -> Group:
        return self._node.everyone.split(self._workers, self._name)

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        self._group.all_reduce(*tensors, op=op)

    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        return self._group.begin_all_reduce(*tensors, op=op)

    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        return self._group.begin_coded_mean(coding, vectors, *flags)

    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        self._group.broadcast(*tensors, root=root)

    def exchange(self, what: str, outgoing: Sequence[Sequence[Tensor]], use: Use) -> None:
        self._group.exchange(what, outgoing, use)

    def split(self, members: Sequence[Peer], name: str = "") -> Group:
        workers = [self._place.worker(each) for each in members]
        return _PlaceGroup(self._node, workers, self._place, name)


def _receive(node: Node, sender: Peer, kind: str) -> Message | None:
    try:
        return node.receive(kind)
    except PeerLost:
        raise
    except WaitError as error:
        raise WaitError(
            f"{error}; it holds one model with {sender}, which has not come to the same point of the script: "
            "all workers of a model must call it, and take the same branches"
        ) from None


def receive_from(node: Node, sender: Peer, kind: str) -> Message:
    """The next message of a kind, which only this worker sends; PeerLost if it has died."""
    while (message := _receive(node, sender, kind)) is None:
        # The last message of one that has finished is still on its way.
        if sender in node.members.lost and sender not in node.members.workers:
            raise PeerLost(f"{node.me} waited for {sender}, which is gone; they hold one model together")
    return message
