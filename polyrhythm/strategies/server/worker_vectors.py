"""WorkerVectors: what a server keeps for each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.model.vectors import copied

if TYPE_CHECKING:
    from polyrhythm.core.worker import State
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors


class WorkerVectors(dict[int, "Vectors"]):
    """Vectors of the size of a shard by the rank of a worker, zero when they are first used."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self._shard = shard

    def __missing__(self, worker: int) -> Vectors:
        self[worker] = vectors = self._shard.zeros()
        return vectors

    def state_dict(self) -> State:
        return {"vectors": {worker: list(vectors) for worker, vectors in self.items()}}

    def load_state_dict(self, state: State) -> None:
        self.clear()
        for worker, vectors in state["vectors"].items():
            copied(vectors, self[worker])
