"""NestedReplica: a replica whose optimizer step is that of another strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyrhythm.model.replica import Replica

if TYPE_CHECKING:
    from torch import Tensor


class NestedReplica(Replica):
    """The replica of the outer of two strategies: `apply` takes a step of the inner one."""

    def __init__(self, replica: Replica, step: Callable[[], None], samples: Callable[[], int]) -> None:
        # Everything else is looked up in the replica itself.
        self._replica, self._step, self._count = replica, step, samples

    def __getattr__(self, name: str) -> Any:
        return self._count() if name == "samples" else getattr(self._replica, name)

    def apply(self) -> None:
        self._step()

    def consensus_vectors(self) -> tuple[Tensor, ...]:
        return self._replica.consensus_vectors()

    @contextmanager
    def at(self, vectors: Sequence[Tensor]) -> Iterator[None]:
        """Replaces the parameters for a while, for example by the consensus of the inner strategy."""
        self.parameters = tuple(vectors)
        try:
            yield
        finally:
            del self.parameters
