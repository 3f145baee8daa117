"""SharedLoader: the DataLoader of a worker, which gives out that worker's share of the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.core.errors import UsageError
from polyrhythm.session.schedules import Progress
from polyrhythm.session.sharing import EpochOrder, Sharing


class SharedLoader:
    """Iterates over this worker's batches; otherwise behaves like the DataLoader it wraps.

    `on_batch(samples, scale)` is called before each batch: the number of examples that count, and the factor
    for the gradient. `processes`: the DataLoader may start worker processes.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sharing: Sharing,
        seed: int,
        on_batch: Callable[[int, float], None],
        processes: bool = True,
    ) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError("an IterableDataset cannot be shared among workers; use a map-style dataset")
        if loader.batch_sampler is None:
            raise UsageError(
                "the DataLoader has batch_size=None and cannot be shared among workers; give it a batch size"
            )
        self.loader = loader
        self.epoch = 0
        self.left_early = False  # the script did not finish the last epoch
        self.watch: Callable[[Any], None] | None = None  # called with each batch
        self._order, self._sharing, self._on_batch = EpochOrder(loader, seed), sharing, on_batch
        self.progress = Progress()
        self._prefetched: deque[tuple[int, float, int]] = deque()  # samples, scale, position; not yet used
        num_workers = loader.num_workers if processes else 0
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=_Batches(self),
            num_workers=num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout if num_workers else 0,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor if num_workers else None,
            persistent_workers=loader.persistent_workers if num_workers else False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self._sharing.length(self._order, self.epoch)

    def __iter__(self) -> Iterator[Any]:
        self._prefetched.clear()
        complete, self.progress.iterating = False, True
        try:
            for batch in self._inner:
                samples, scale, position = self._prefetched.popleft()
                self.progress.give(position)
                self._on_batch(samples, scale)
                self._sharing.used(samples)
                if self.watch is not None:
                    self.watch(batch)
                yield batch
            complete = True
        finally:  # an epoch that the script leaves early is over too
            self.epoch += 1
            self.progress.iterating = False
            self.left_early = not complete
            self._sharing.end(complete, len(self._prefetched))

    def indexes(self) -> Iterator[Sequence[int]]:
        """The examples of each batch of this worker in the current epoch."""
        epoch = self._sharing.begin(self.epoch)
        if epoch is None:
            return
        self.epoch = epoch
        for indexes, scale, position in self._sharing.batches(self._order, epoch, self._prefetched):
            self._prefetched.append((len(indexes) if scale else 0, scale, position))
            yield indexes

    def sample(self, most: int) -> Iterator[Any]:
        """Up to `most` batches, evenly spaced over the epoch drawn last, in the order of a single process.

        They are not counted or leased, and the order of training does not change.
        """
        drawn = self._order.batches(self._order.latest(default=self.epoch))
        batches = [batch for batch in drawn if len(batch) > 1] or drawn
        count = min(most, len(batches))
        chosen: list[Any] = [batches[number * len(batches) // count] for number in range(count)]
        return iter(DataLoader(self.loader.dataset, batch_sampler=chosen, collate_fn=self.loader.collate_fn))

    @property
    def borrows(self) -> bool:
        """True if the worker may get examples of another worker, which do not count."""
        return self._sharing.borrows


class _Batches:
    """The batch sampler of the inner DataLoader."""

    def __init__(self, shared: SharedLoader) -> None:
        self.shared = shared

    def __iter__(self) -> Iterator[Any]:
        return self.shared.indexes()
