"""Meter: the time a worker spends computing and waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from polyrhythm.core.events import StepDone
from polyrhythm.core.node import Node
from polyrhythm.model.replica import Replica

DIGITS = 6  # events are recorded in microseconds


class Meter:
    """Measures compute and wait time of each step, and reports the totals to the run."""

    def __init__(self, node: Node, replicas: Sequence[Replica]) -> None:
        self._node, self._replicas = node, replicas  # one for each optimizer
        self._mark = node.now()  # the end of the last step
        self._exchange = 0.0  # seconds spent in exchanges since then
        self._samples = 0  # examples at the last step
        self._compute = self._wait = 0.0

    @property
    def steps(self) -> int:
        """The steps of all optimizers."""
        return sum(replica.steps for replica in self._replicas)

    @property
    def samples(self) -> int:
        """The examples of this worker. All optimizers train on the same ones."""
        return self._replicas[0].samples

    @property
    def compute_s(self) -> float:
        """The seconds that this worker has computed so far."""
        return self._compute

    def start(self) -> None:
        """Called when training begins."""
        self._mark = self._node.now()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A context for an exchange with other nodes before the step."""
        before = self._node.now()
        yield
        self._exchange += self._node.now() - before

    def waited(self, seconds: float) -> None:
        """The worker has waited for others inside a forward or backward pass."""
        self._exchange += seconds

    def step(self, step: Callable[[], None]) -> None:
        """Runs the strategy's step: all of it except the optimizer's work counts as waiting."""
        node, runner = self._node, self._replicas[0].runner  # the same for all
        before, optimizer = node.now(), runner.seconds
        step()
        after = node.now()
        wait = after - before + self._exchange - (runner.seconds - optimizer)
        compute = after - self._mark - wait
        self._mark, self._exchange = after, 0.0
        self._compute += compute
        self._wait += wait
        before_step, self._samples = self._samples, self.samples
        steps, samples = self.steps, self._samples - before_step
        node.log(StepDone(steps, samples, round(compute, DIGITS), round(wait, DIGITS)))
        self.report()

    def report(self) -> None:
        """Reports the totals of this worker so far."""
        self._node.totals(steps=self.steps, samples=self.samples, compute_s=self._compute, wait_s=self._wait)
