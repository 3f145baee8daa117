"""ModelContext: the world of a worker that holds one model together with others.

To the session all workers of a model are one: they run the same script on the same batches, so they make the
same requests in the same order. The first of them, the leader, sends a request to the coordinator and passes
the reply on to the others, the followers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.mesh import Axis
from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.core.place_node import Place, PlaceNode, receive_from
from polyrhythm.core.requests import (
    CompareReplica,
    EnterCall,
    Farewell,
    FileWritten,
    LastStep,
    LeaveRun,
    OrderDrawn,
    Prepared,
    Request,
    ScriptAt,
    ShareReply,
    ShowNote,
    StepsDone,
    Welcome,
    WorkerNames,
    kind_of,
    pack_reply,
    unpack_reply,
)
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.core.result_part import ResultPart
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.context import WorldContext

R = TypeVar("R")

# Each worker of a model sends these by itself: they are about the worker, or have no reply that matters.
_OWN = (
    CompareReplica, EnterCall, FileWritten, LastStep, OrderDrawn, Prepared, ScriptAt, ShowNote, StepsDone,
)  # fmt: skip
_REPLY = "reply to model"  # the kind of messages from leader to followers


class ModelContext(WorldContext):
    """The context of one of the workers that hold a model, for a session in which they are one worker.

    A server is in no model: it sees the models as workers.
    """

    def __init__(self, inner: WorldContext, axes: Sequence[tuple[Axis, int]]) -> None:
        self._inner, self.worker_node = inner, inner.node
        self.plan_of_workers = inner.plan
        mesh = inner.plan.mesh_of(dict(axes))
        self.size = len(mesh.ranks(0, *(axis for axis, _ in axes)))
        self.plan = inner.plan.by_models(self.size)
        self.processes = inner.processes
        inner.node.mesh = mesh
        self.axes = dict(axes)
        self.place = inner.me.rank % self.size if inner.me.role == "worker" else 0
        self.node: Node = self.node_at(self.place)
        self.me = self.node.me
        self._replies = 0

    @property
    def strategy(self) -> ResolvedStrategy | None:
        return self._inner.strategy

    def node_at(self, place: int) -> PlaceNode:
        """This node among those at one place of all models; a server has one for each place."""
        return PlaceNode(self.worker_node, Place(place, self.size), self.plan.mesh)

    def coordinate(self, axis: Axis) -> int:
        """The place of this worker on one of the axes along which the model is divided."""
        mesh = self.worker_node.mesh
        return mesh.coordinates[self._inner.me.rank][mesh.axes.index(axis)]

    @property
    def is_server(self) -> bool:
        return self._inner.me.role == "server"

    @property
    def leads(self) -> bool:
        """True on the worker that sends requests for all workers of its model."""
        return not self.place

    @property
    def model(self) -> list[Peer]:
        """The workers that hold this model, by place."""
        first = self._inner.me.rank - self.place
        return [Peer("worker", rank) for rank in range(first, first + self.size)]

    @property
    def worker(self) -> Peer:
        return self._inner.me

    @property
    def workload(self) -> float:
        return self._inner.workload

    @workload.setter
    def workload(self, value: float) -> None:
        self._inner.workload = value

    # --- requests -----------------------------------------------------------------------------------

    def request(self, request: Request[R]) -> R:
        if self.is_server:
            return self._inner.request(request)
        own = self._of_place(request)
        if isinstance(request, _OWN):
            return self._inner.request(own)
        if self.leads:
            found = self._by_model(self._inner.request(request))
            if request.reply is not None:
                self._pass_on(request, found)
            return found  # type: ignore[no-any-return]
        if request.reply is None:
            return None  # type: ignore[return-value]
        reply = self._passed_on(request)
        if isinstance(reply, Farewell) and not reply.last:
            self._inner.request(request)
        return reply

    def _of_place(self, request: Request[R]) -> Request[R]:
        """A request about the part of the model at this place."""
        own: Any = request
        if isinstance(request, Prepared):
            own = msgspec.structs.replace(request, part=f"part {self.place}")
        elif isinstance(request, CompareReplica):
            own = msgspec.structs.replace(request, part=request.part * self.size + self.place)
        return own  # type: ignore[no-any-return]

    def _by_model(self, reply: Any) -> Any:
        """A reply in which workers are models."""
        if isinstance(reply, ShareReply) and reply.share is not None:
            ranks = [rank // self.size for rank in reply.share.ranks]
            return ShareReply(msgspec.structs.replace(reply.share, ranks=ranks))
        if isinstance(reply, WorkerNames):
            leaders = (rank for rank in range(0, self.plan_of_workers.workers, self.size))
            lost = [Peer("worker", rank) for rank in leaders if str(Peer("worker", rank)) in reply.workers]
            return WorkerNames([str(self.worker_of(each)) for each in lost])
        return reply

    def _pass_on(self, request: Request[Any], reply: Any) -> None:
        packed = msgspec.msgpack.encode(pack_reply(reply))
        content = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        for follower in self.model[1:]:
            self.worker_node.send(follower, _REPLY, content, request=kind_of(request), number=self._replies)
        self._replies += 1

    def _passed_on(self, request: Request[R]) -> R:
        """The reply that the leader has got to the same request."""
        with self.blocking():
            message = receive_from(self.worker_node, self.model[0], _REPLY)
        if message["request"] != kind_of(request) or message["number"] != self._replies:
            raise PeerLost(
                f"{self._inner.me} and {self.model[0]} hold one model, but do not run the script in the "
                f"same way: one is at {message['request']!r}, the other at {kind_of(request)!r}; all workers "
                "of a model must take the same branches"
            )
        self._replies += 1
        fields: dict[str, Any] = msgspec.msgpack.decode(message.tensors[0].numpy().tobytes())
        return unpack_reply(request, fields)

    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        return self._inner.join(strategy, batch_norm)

    def send_result(self, digest: str, file: Sequence[Tensor]) -> None:
        """The leader sends what is of the whole model; the others leave."""
        self._inner.send_result(digest, file) if self.leads else self._inner.request(LeaveRun())

    def send_result_part(self, part: ResultPart, tensors: Sequence[Tensor]) -> None:
        self._inner.send_result_part(part, tensors)

    def worker_of(self, node: Peer) -> Peer:
        return Place(self.place, self.size).model(node)

    # --- the rest is that of the worker -------------------------------------------------------------

    def compute_time(self) -> float:
        return 0.0  # the parts of a model take time where they run

    def step_time(self) -> float:
        """The simulated duration of a step of a whole model on this worker."""
        return self._inner.compute_time()

    def advance_time(self, seconds: float) -> None:
        self._inner.advance_time(seconds)

    def blocking(self) -> AbstractContextManager[None]:
        return self._inner.blocking()

    def install_random_state(self) -> None:
        self._inner.install_random_state()

    def run_backward(self, backward: Callable[[], None]) -> None:
        self._inner.run_backward(backward)

    def wait_in_pass(self, wait: Callable[[], None]) -> None:
        self._inner.wait_in_pass(wait)

    def script_frame(self) -> FrameType | None:
        return self._inner.script_frame()

    def flush(self) -> None:
        self._inner.flush()


def model_context(context: WorldContext, strategy: Strategy) -> WorldContext:
    """The context for a session, in which the workers that hold one model are one worker."""
    axes = strategy.traits.model_axes
    return ModelContext(context, axes) if axes else context
