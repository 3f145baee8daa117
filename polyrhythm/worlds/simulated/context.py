"""SimulatedContext: what the simulated world gives to the session of a node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import JoinRun, Request, Welcome, kind_of
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.core.result_part import ResultPart
from polyrhythm.session.context import WorldContext
from polyrhythm.worlds.simulated.backward_thread import BackwardThread, without_hooks
from polyrhythm.worlds.simulated.node import SimulatedNode

R = TypeVar("R")


class SimulatedContext(WorldContext):
    """The world context of a simulated node. It calls the coordinator directly."""

    processes = False

    def __init__(self, node: SimulatedNode) -> None:
        self.node: SimulatedNode = node
        self.me, self.plan = node.me, node.world.plan
        self._script = node.current()
        self._backward: BackwardThread | None = None  # runs the present backward pass, if it may wait
        self._blocking = _Blocking(node)

    @property
    def strategy(self) -> ResolvedStrategy | None:
        return self.node.world.coordinator.strategy

    def request(self, request: Request[R]) -> R:
        if self.node.crashed:
            # Closing a loader returns its lease, but the coordinator has taken that back already.
            return None  # type: ignore[return-value]
        replies: list[R] = []
        fiber = self.node.current()
        blocked = False

        def respond(reply: R) -> None:
            replies.append(reply)
            if blocked:
                self.node.world.loop.at(self.node.now(), fiber.resume, None)

        self.node.world.coordinator.handle(self.me, request, respond, self.node.incarnation)
        blocked = True
        if not replies:
            with self.blocking():
                while not replies:
                    fiber.block("all nodes to get as far as", repr(kind_of(request)))
        return replies[0]

    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        welcome = self.request(JoinRun(strategy, batch_norm))
        self.node.cohort = welcome.cohort
        self.node.learn_members()
        return welcome

    def send_result(self, digest: str, file: Sequence[Tensor]) -> None:
        parts = [part.numpy().data for part in file]
        self.node.world.coordinator.result(self.me, digest, parts, lambda: None)

    def send_result_part(self, part: ResultPart, tensors: Sequence[Tensor]) -> None:
        self.node.world.coordinator.received.add(part, [each.numpy().data for each in tensors])

    def compute_time(self) -> float:
        return self.workload * self.node.world.costs.step_time(self.me.rank, self.node.world.loop.now)

    def advance_time(self, seconds: float) -> None:
        self.node.take_time(seconds)

    def blocking(self) -> AbstractContextManager[None]:
        return self._blocking

    def run_backward(self, backward: Callable[[], None]) -> None:
        if self._backward is not None:  # a nested pass, as with checkpointing
            backward()
            return
        self._backward = BackwardThread(backward)
        try:
            self._backward.run()
        finally:
            self._backward = None

    def wait_in_pass(self, wait: Callable[[], None]) -> None:
        if self._backward is not None and self._backward.here:
            self._backward.wait(wait)
        elif torch._C._current_graph_task_id() != -1:
            raise UsageError(
                "batch_norm=sync can be simulated with loss.backward(), and not with torch.autograd.grad(); "
                "`polyrhythm run` supports both"
            )
        else:
            with without_hooks():
                wait()

    def install_random_state(self) -> None:
        self.node.install_random_state()

    def script_frame(self) -> FrameType | None:
        return self._script.frame or sys._getframe()

    def flush(self) -> None:
        pass


class _Blocking(AbstractContextManager[None]):
    """Surrounds code in which other nodes may run; can be nested and reused."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._node.install_random_state()
