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

    def __init__(self, replica: Replica, step: Callable[[], None], site_sum: Callable[[int], int]) -> None:
        # Everything else is looked up in the replica itself.
        self._replica, self._step, self._site_sum = replica, step, site_sum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def apply(self) -> None:
        self._step()

    def examples_since(self, samples: int) -> int:
        return self._site_sum(self._replica.examples_since(samples))

    def consensus_vectors(self) -> tuple[Tensor, ...]:
        return self._replica.consensus_vectors()

    def abandon_consensus(self) -> None:
        self._replica.abandon_consensus()

    @contextmanager
    def at(self, vectors: Sequence[Tensor]) -> Iterator[None]:
        """Replaces the parameters for a while, for example by the consensus of the inner strategy."""
        self.parameters = tuple(vectors)
        try:
            yield
        finally:
            del self.parameters
