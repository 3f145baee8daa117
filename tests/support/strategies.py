"""Strategies for tests: one function in place of a worker's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import polyrhythm as pr
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Worker


@dataclass(frozen=True)
class Stepping(pr.Strategy):
    """A strategy whose worker does nothing but `take_step(worker)`. Subclasses have a name."""

    fixed: ClassVar[Traits] = Traits()

    @property
    def traits(self) -> Traits:
        return self.fixed

    def take_step(self, worker: Worker) -> None:
        worker.replica.apply()

    def worker(self, node: Any, replica: Any, group: Any) -> Worker:
        return SteppingWorker(self, node, replica, group)


class SteppingWorker(Worker):
    strategy: Stepping

    def step(self) -> None:
        self.strategy.take_step(self)


def stepping(name: str, step: Callable[[Worker], None], traits: Traits = Traits()) -> Strategy:  # noqa: B008
    """A registered strategy of this name whose workers take this step."""

    def take_step(self: Stepping, worker: Worker) -> None:
        step(worker)

    fields = {"name": name, "take_step": take_step, "fixed": traits, "__doc__": step.__doc__}
    made: type[Stepping] = dataclass(frozen=True)(type(name.title(), (Stepping,), fields))
    return made()
