"""SimulatedContext: the place of a simulated node in a run, and the time that its computing takes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.random.mtrand import set_bit_generator
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import JoinRun, Request, Welcome, kind_of
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.session.context import WorldContext
from polyrhythm.worlds.simulated.backward_thread import BackwardThread, without_hooks
from polyrhythm.worlds.simulated.node import SimulatedNode

R = TypeVar("R")


class SimulatedContext(WorldContext):
    """A simulated node's place in a run; it calls the coordinator directly."""

    processes = False

    def __init__(self, node: SimulatedNode) -> None:
        self.node: SimulatedNode = node
        self.me, self.plan = node.me, node.world.plan
        self._backward: BackwardThread | None = None  # the backward pass that it is in, if it may wait there
        self._numbers = np.random.MT19937()
        self._numbers.state = node.world.numbers.state  # type: ignore[assignment]

    @property
    def strategy(self) -> ResolvedStrategy | None:
        return self.node.world.coordinator.strategy

    def request(self, request: Request[R]) -> R:
        if self.node.crashed:
            # A loader that closes returns its lease, but the coordinator has taken that already.
            return None  # type: ignore[return-value]
        answers: list[R] = []
        fiber = self.node.current()
        blocked = False

        def respond(answer: R) -> None:
            answers.append(answer)
            if blocked:
                self.node.world.loop.at(self.node.now(), fiber.resume, None)

        self.node.world.coordinator.handle(self.me, request, respond, self.node.incarnation)
        blocked = True
        if not answers:
            with self.away():
                while not answers:
                    fiber.block("all nodes", "to get as far as", repr(kind_of(request)))
        return answers[0]

    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        welcome = self.request(JoinRun(strategy, batch_norm))
        self.node.cohort = welcome.cohort
        self.node.meet()
        return welcome

    def bring(self, digest: str, file: Sequence[Tensor]) -> None:
        parts = [part.numpy().data for part in file]
        self.node.world.coordinator.result(self.me, digest, parts, lambda: None)

    def compute_time(self) -> float:
        return self.node.world.costs.step_time(self.me.rank, self.node.world.loop.now)

    def spend(self, seconds: float) -> None:
        self.node.take_time(seconds)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        state = random.getstate()
        try:
            yield
        finally:
            random.setstate(state)
            self.come()

    def passes(self, backward: Callable[[], None]) -> None:
        if self._backward is not None:  # one pass inside another, as with checkpointing
            backward()
            return
        self._backward = BackwardThread(backward)
        try:
            self._backward.run()
        finally:
            self._backward = None

    def within(self, wait: Callable[[], None]) -> None:
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

    def come(self) -> None:
        """Installs this worker's numpy bit generator; copying its state would take long."""
        set_bit_generator(self._numbers)

    def flush(self) -> None:
        pass
