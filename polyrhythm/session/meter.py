"""Meter: the time a worker spends computing and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.core.events import StepDone
from polyrhythm.core.node import Node
from polyrhythm.model.replica import Replica

DIGITS = 6  # events are recorded in microseconds


class Meter:
    """Measures compute and wait time of each step, and reports the totals to the run."""

    def __init__(self, node: Node, replica: Replica) -> None:
        self._node, self._replica = node, replica
        self._mark = node.now()  # the end of the last step
        self._exchange = 0.0  # seconds spent in exchanges since then
        self._samples = 0  # examples at the last step
        self._compute = self._wait = 0.0

    def start(self) -> None:
        """Called when training begins."""
        self._mark = self._node.now()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A context for an exchange with other nodes before the step."""
        before = self._node.now()
        yield
        self._exchange += self._node.now() - before

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for the strategy's step: all of it except the optimizer's work counts as waiting."""
        node, replica = self._node, self._replica
        before, optimizer = node.now(), replica.runner.seconds
        yield
        after = node.now()
        wait = after - before + self._exchange - (replica.runner.seconds - optimizer)
        compute = after - self._mark - wait
        self._mark, self._exchange = after, 0.0
        self._compute += compute
        self._wait += wait
        samples, self._samples = replica.samples - self._samples, replica.samples
        node.log(StepDone(replica.steps, samples, round(compute, DIGITS), round(wait, DIGITS)))
        self.report()

    def report(self) -> None:
        """Reports the totals of this worker so far."""
        replica = self._replica
        self._node.totals(
            steps=replica.steps, samples=replica.samples, compute_s=self._compute, wait_s=self._wait
        )
