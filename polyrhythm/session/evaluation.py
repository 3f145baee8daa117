"""EvaluationLoader: an evaluation loader of which each worker sees its share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from polyrhythm.session.order import Order, SampledOrder, copy_of, order_of


class EvaluationLoader(DataLoader[Any]):
    """Gives each example of an evaluation loader to exactly one worker: every `workers`-th batch.

    No batch is repeated or filled up, so workers may have different numbers of batches, or none. All
    iterations have the same order, so it does not matter how often which worker iterates.
    """

    def __init__(
        self, loader: DataLoader[Any], rank: int, workers: int, seed: int, processes: bool = True
    ) -> None:
        self.loader, self._rank, self._workers = loader, rank, workers
        self._order: Order = order_of(loader, seed, processes)
        self._seed, self._processes = seed, processes
        self.examples = 0  # drawn by this worker in all iterations
        self._DataLoader__initialized = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, as in an unpickled copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(range(self._rank, len(self._order), self._workers))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._order.forget(0)  # drawn again, from the same seed
        mine = self._mine()
        if not isinstance(self._order, SampledOrder):
            return (each.batch for each in mine)
        return iter(
            copy_of(
                self.loader,
                self._processes,
                persistent_workers=False,
                batch_sampler=mine,
                collate_fn=self.loader.collate_fn,
            )
        )

    def _mine(self) -> Iterator[Any]:
        for number, batch in enumerate(self._order.epoch(0)):
            if number % self._workers == self._rank:
                self.examples += len(batch)
                yield batch
