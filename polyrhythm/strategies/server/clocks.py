"""Clocks: how far each worker is."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.core.worker import State


class Clocks:
    """How many pushes each worker has made. One that joins starts with the slowest, or all would wait."""

    def __init__(self, workers: Collection[int]) -> None:
        self._pushes = dict.fromkeys(workers, 0)

    @property
    def workers(self) -> Collection[int]:
        return self._pushes.keys()

    def __getitem__(self, worker: int) -> int:
        if worker not in self._pushes:
            self._pushes[worker] = self.slowest()
        return self._pushes[worker]

    def tick(self, worker: int) -> None:
        """A worker has made a push."""
        self._pushes[worker] = self[worker] + 1

    def slowest(self, paused: Collection[int] = ()) -> int:
        """The fewest pushes of a worker that is not paused."""
        if not paused:
            return min(self._pushes.values(), default=0)
        return min((count for worker, count in self._pushes.items() if worker not in paused), default=0)

    def forget(self, worker: int) -> None:
        """A worker has left."""
        del self._pushes[worker]

    def state_dict(self) -> State:
        return {"pushes": dict(self._pushes)}

    def load_state_dict(self, state: State) -> None:
        """Continues from saved counts. Workers that were not there then start with the slowest."""
        saved = state["pushes"]
        slowest = min(saved.values(), default=0)
        self._pushes = {worker: saved.get(worker, slowest) for worker in self._pushes}
