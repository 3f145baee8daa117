"""Shares the DataLoader out. SharedLoader has a long constructor: each way to share needs its own calls.

Every worker draws the same order for an epoch from the run's seed, so nothing about the data travels.

- Lockstep strategies cut the order into rounds of one batch per worker. The last round is dealt out evenly
  whatever is left; a worker that gets nothing borrows examples, which count for nothing, so that it can
  take the step with the others. No example is dropped, none counts twice, and nobody waits in vain.
- The others lease batches from the coordinator as they go: a fast worker takes more, and each epoch still
  sees each example once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from polyrhythm.core.errors import UsageError
from polyrhythm.core.lease import Lease

# (epoch, its number of batches, how many leased ones are still unseen) -> the next ones to train on
Take = Callable[[int, int, int], Lease | None]
GiveBack = Callable[[int], None]  # so many of the leased ones will not be seen: others may have them
# (epoch) -> this worker's place among those that share it, their number, and the epoch that it is for all of
# them; None if it is over
Deal = Callable[[int], tuple[int, int, int] | None]
Due = Callable[[int], None]  # so many more examples are for this worker alone; fewer, if it leaves some


def mix(*parts: object) -> int:
    """One seed from several values, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, numpy and Python."""
    if torch.accelerator.current_accelerator() is None:
        # torch.manual_seed() would also queue the seed, with a stack trace, for devices that never appear:
        # that takes 150 times as long.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@functools.lru_cache(maxsize=2)
def _shuffled(examples: int, batch_size: int, drop_last: bool, seed: int) -> list[Sequence[int]]:
    """The batches of a DataLoader with `shuffle=True`. All workers of a simulation share them."""
    return _drawn_from(BatchSampler(RandomSampler(range(examples)), batch_size, drop_last), seed)


def _drawn_from(sampler: Iterable[Sequence[int]], seed: int) -> list[Sequence[int]]:
    """The batches of a sampler that draws from the global generators; these keep their states."""
    others = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_all(seed)
            # Rows one after the other may be many, and need no list.
            return [batch if isinstance(batch, range) else list(batch) for batch in sampler]
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])


def _plain(sampler: object) -> TypeGuard[RandomSampler]:
    """True for the sampler of a DataLoader with `shuffle=True`: it permutes all examples."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


class SharedLoader:
    """Iterates over this worker's batches; otherwise like the DataLoader it was made from."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        workers: int,
        seed: int,
        leases: tuple[Take, GiveBack] | None,
        counted: Callable[[int, float], None],
        deal: Deal | None = None,
        due: Due = lambda examples: None,
        processes: bool = True,
        peers: Sequence[int] | None = None,
    ) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError("an IterableDataset cannot be shared out among workers; use a map-style dataset")
        if loader.batch_sampler is None:
            raise UsageError(
                "the DataLoader has batch_size=None; give it a batch size, so that it can be shared out"
            )
        self.loader = loader
        self.epoch = 0
        self.left_early = False  # whether the last epoch was not seen to its end
        self.watch: Callable[[Any], None] | None = None  # shown each batch as it is given out
        self._rank, self._workers, self._seed = rank, workers, seed
        self._peers = range(workers) if peers is None else peers  # over whom gradients are averaged
        self._leases, self._counted, self._deal, self._due = leases, counted, deal, due
        self._dealt_out = 0  # examples of the present epoch that are for this worker, and not yet seen
        self._drawn: dict[int, list[Sequence[int]]] = {}
        self._counts: deque[tuple[int, float]] = deque()  # of batches that are drawn and not yet seen
        self._undrawn = 0  # batches of the present lease that are not even drawn
        several = loader.num_workers if processes else 0
        self._inner: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=_Batches(self),
            num_workers=several,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout if several else 0,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor if several else None,
            persistent_workers=loader.persistent_workers if several else False,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        batches = self._order(self.epoch)
        if self._leases is not None or not self._splits:
            return math.ceil(len(batches) / self._workers)
        return math.ceil(sum(map(len, batches)) / (self._workers * self._batch_size))

    def __iter__(self) -> Iterator[Any]:
        self._counts.clear()
        self._undrawn = 0
        complete = False
        try:
            for batch in self._inner:
                count = self._counts.popleft()
                self._counted(*count)
                self._dealt_out -= count[0]
                if self.watch is not None:
                    self.watch(batch)
                yield batch
            complete = True
        finally:  # an epoch that is left early is over too
            self.epoch += 1
            self.left_early = not complete
            if self._leases is not None and not complete:
                self._leases[1](self._undrawn + len(self._counts))
            if self._deal is not None and self._dealt_out:
                self._due(-self._dealt_out)
                self._dealt_out = 0

    def indexes(self) -> Iterator[Sequence[int]]:
        """The examples of each batch of this worker in the present epoch."""
        for indexes, scale in self._leased() if self._leases is not None else self._dealt():
            self._counts.append((len(indexes) if scale else 0, scale))
            yield indexes

    def some(self, most: int) -> Iterator[Any]:
        """Up to `most` batches of the epoch drawn last, as one machine would see them, evenly spread.

        For looking at only: nothing is counted or leased, and the order of the training stays as it is.
        """
        drawn = self._order(max(self._drawn, default=self.epoch))
        batches = [batch for batch in drawn if len(batch) > 1] or drawn
        count = min(most, len(batches))
        chosen: list[Any] = [batches[number * len(batches) // count] for number in range(count)]
        return iter(DataLoader(self.loader.dataset, batch_sampler=chosen, collate_fn=self.loader.collate_fn))

    @property
    def lends(self) -> bool:
        """Whether a worker may get examples that are not its own, and do not count."""
        return self._leases is None and self._workers > 1

    @property
    def _splits(self) -> bool:
        """Whether examples may be regrouped; a sampler of the user's own made its batches for a reason."""
        return type(self.loader.batch_sampler) is BatchSampler

    @property
    def _batch_size(self) -> int:
        return int(getattr(self.loader.batch_sampler, "batch_size", 1))

    def _order(self, epoch: int) -> list[Sequence[int]]:
        """The batches of an epoch as one machine would see them."""
        if epoch not in self._drawn:
            self._drawn = {old: self._drawn[old] for old in sorted(self._drawn)[-1:]}
            self._drawn[epoch] = self._draw(mix("order", self._seed, epoch))
        return self._drawn[epoch]

    def _draw(self, seed: int) -> list[Sequence[int]]:
        batches = self.loader.batch_sampler
        assert batches is not None
        if type(batches) is BatchSampler and _plain(batches.sampler):
            return _shuffled(len(batches.sampler), batches.batch_size, batches.drop_last, seed)
        generator = getattr(self.loader.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        return _drawn_from(batches, seed)

    def _dealt(self) -> Iterator[tuple[Sequence[int], float]]:
        """This worker's batches, where all step together; it says how much is for it alone, if it may die."""
        if self._deal is not None:
            place = self._deal(self.epoch)
            if place is None:
                return
            self._rank, self._workers, self.epoch = place
            self._peers = range(self._workers)
            rounds = list(self._rounds())
            self._dealt_out = sum(len(batch) for batch, scale in rounds if scale)
            self._due(self._dealt_out)
            yield from rounds
        else:
            yield from self._rounds()

    def _rounds(self) -> Iterator[tuple[Sequence[int], float]]:
        """Rounds of one batch per worker, each with the factor that makes a plain mean over its peers right.

        In a full round it is 1. With n of their examples in the round it is n * peers / examples, for the
        mean of a batch stands for n examples, and the mean over peers divides by their number.
        """
        batches = self._order(self.epoch)
        if not self._splits:
            for first in range(0, len(batches), self._workers):
                dealt = batches[first : first + self._workers]
                mine = self._rank < len(dealt)
                batch = dealt[self._rank if mine else 0]
                yield batch, self._factor([len(each) for each in dealt])
            return
        order = [index for batch in batches for index in batch]
        size = self._workers * self._batch_size
        for first in range(0, len(order), size):
            round_ = order[first : first + size]
            sharing = self._workers
            if len(round_) < size:  # two examples each, where possible: BatchNorm cannot train on one
                fewest = math.ceil(len(round_) / self._batch_size)
                sharing = min(sharing, max(fewest, len(round_) // 2))
            mine = self._rank < sharing
            batch = round_[(self._rank if mine else 0) :: sharing]
            full = len(round_) == size
            yield batch, 1.0 if full else self._factor([len(round_[r::sharing]) for r in range(sharing)])

    def _factor(self, counts: Sequence[int]) -> float:
        """What this worker's gradient counts, where the first workers have so many examples each."""
        if self._rank >= len(counts):
            return 0.0
        together = sum(counts[rank] for rank in self._peers if rank < len(counts))
        return counts[self._rank] * len(self._peers) / together

    def _leased(self) -> Iterator[tuple[Sequence[int], float]]:
        assert self._leases is not None
        epoch, batches = self.epoch, len(self._order(self.epoch))
        while (lease := self._leases[0](epoch, batches, len(self._counts))) is not None:
            self._undrawn = lease.count
            for number in range(lease.first, lease.first + lease.count):
                self._undrawn -= 1
                yield self._order(lease.epoch)[number], 1.0


class _Batches:
    """The batch sampler that the inner DataLoader draws from."""

    def __init__(self, shared: SharedLoader) -> None:
        self.shared = shared

    def __iter__(self) -> Iterator[Any]:
        return self.shared.indexes()
