"""How the batches of an epoch are shared among workers.

All workers draw the same order of batches from the seed of the run (`EpochOrder`), so no indexes are sent.

- Workers in lockstep divide the order into rounds of one batch per worker. The examples of an incomplete last
  round are divided evenly. A worker that gets none borrows examples whose gradient is scaled by 0, so that it
  can take part in the step. No example is dropped or counted twice.
- Other workers lease batches from the coordinator as they go: a fast worker takes more, and each example is
  still used once per epoch.
"""

from __future__ import annotations

import functools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from polyrhythm.core.lease import Lease
from polyrhythm.session.seeds import mix, seed_all

Indexes = Sequence[int]  # the examples of one batch
Take = Callable[[int, int, int], Lease | None]  # epoch, its number of batches, leased but unseen batches
GiveBack = Callable[[int], None]  # number of leased batches that this worker will not train on


class EpochOrder:
    """The batches of each epoch in the order in which a single process would see them."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._drawn: dict[int, list[Indexes]] = {}  # the latest two epochs
        self.batch_size = int(getattr(loader.batch_sampler, "batch_size", 1))
        # A custom batch sampler has a reason for its batches, so only those of torch's own are regrouped.
        self.splits = type(loader.batch_sampler) is BatchSampler

    def latest(self, default: int) -> int:
        """The last epoch drawn so far."""
        return max(self._drawn, default=default)

    def batches(self, epoch: int) -> list[Indexes]:
        if epoch not in self._drawn:
            self._drawn = {old: self._drawn[old] for old in sorted(self._drawn)[-1:]}
            self._drawn[epoch] = self._draw(mix("order", self._seed, epoch))
        return self._drawn[epoch]

    def _draw(self, seed: int) -> list[Indexes]:
        batches = self._loader.batch_sampler
        assert batches is not None
        if type(batches) is BatchSampler and _permutes(batches.sampler):
            return _shuffled(len(batches.sampler), batches.batch_size, batches.drop_last, seed)
        generator = getattr(self._loader.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        return _drawn_from(batches, seed)


@functools.lru_cache(maxsize=2)
def _shuffled(examples: int, batch_size: int, drop_last: bool, seed: int) -> list[Indexes]:
    """The batches of a DataLoader with `shuffle=True`. All workers of a simulation share them."""
    return _drawn_from(BatchSampler(RandomSampler(range(examples)), batch_size, drop_last), seed)


def _drawn_from(sampler: Iterable[Indexes], seed: int) -> list[Indexes]:
    """The batches of a sampler that draws from the global generators, which keep their states."""
    others = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_all(seed)
            # A range of consecutive rows may be long, and needs no list.
            return [batch if isinstance(batch, range) else list(batch) for batch in sampler]
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])


def _permutes(sampler: object) -> TypeGuard[RandomSampler]:
    """True for the sampler of a DataLoader with `shuffle=True`: it permutes all examples."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


class ScaledBatch(NamedTuple):
    """One batch of a worker, and the factor by which its gradient is scaled: 0 if the batch is borrowed."""

    indexes: Indexes
    scale: float
    position: int  # how many batches a single process would have had when the run has had this one


class Sharing(ABC):
    """Decides which batches of an epoch one worker gets."""

    borrows = False  # True if the worker may get examples of another worker, which do not count

    @abstractmethod
    def length(self, order: EpochOrder, epoch: int) -> int:
        """About how many batches the worker gets."""

    def begin(self, epoch: int) -> int | None:
        """Called before an epoch. Returns its number, or None if it is over for this worker."""
        return epoch

    @abstractmethod
    def batches(self, order: EpochOrder, epoch: int, prefetched: Sized) -> Iterator[ScaledBatch]:
        """The batches of an epoch for this worker. `prefetched`: those drawn but not yet used."""

    def used(self, samples: int) -> None:
        """Called when the script gets a batch with so many examples that count."""

    def end(self, complete: bool, prefetched: int) -> None:
        """Called after an epoch; not `complete` if the script left it early."""


class LeasedSharing(Sharing):
    """Leases batches from the coordinator, a few at a time."""

    def __init__(self, workers: int, take: Take, give_back: GiveBack) -> None:
        self._workers, self._take, self._give_back = workers, take, give_back
        self._undrawn = 0  # batches of the current lease that are not drawn yet

    def length(self, order: EpochOrder, epoch: int) -> int:
        return math.ceil(len(order.batches(epoch)) / self._workers)

    def batches(self, order: EpochOrder, epoch: int, prefetched: Sized) -> Iterator[ScaledBatch]:
        count = len(order.batches(epoch))
        while (lease := self._take(epoch, count, len(prefetched))) is not None:
            self._undrawn = lease.count
            for number in range(lease.first, lease.first + lease.count):
                self._undrawn -= 1
                yield ScaledBatch(order.batches(lease.epoch)[number], 1.0, lease.epoch * count + number + 1)

    def end(self, complete: bool, prefetched: int) -> None:
        if not complete:
            self._give_back(self._undrawn + prefetched)
        self._undrawn = 0


class LockstepSharing(Sharing):
    """Divides an epoch into rounds of one batch per worker.

    `averaged_with` are the ranks over which gradients are averaged, all by default.
    """

    def __init__(self, rank: int, workers: int, averaged_with: Sequence[int] | None = None) -> None:
        self._rank, self._workers = rank, workers
        self._averaged_with = range(workers) if averaged_with is None else averaged_with
        self.borrows = workers > 1

    def length(self, order: EpochOrder, epoch: int) -> int:
        batches = order.batches(epoch)
        if not order.splits:
            return math.ceil(len(batches) / self._workers)
        return math.ceil(sum(map(len, batches)) / (self._workers * order.batch_size))

    def batches(self, order: EpochOrder, epoch: int, prefetched: Sized) -> Iterator[ScaledBatch]:
        """One batch per round, with the scale that makes a plain mean over workers the mean over examples.

        In a complete round it is 1. A worker with n of the round's examples has n * workers / examples,
        because its batch mean stands for n examples and the mean over workers divides by their number.
        """
        batches = order.batches(epoch)
        if not order.splits:
            for first in range(0, len(batches), self._workers):
                round_ = batches[first : first + self._workers]
                mine = self._rank < len(round_)
                yield ScaledBatch(
                    round_[self._rank if mine else 0],
                    self._scale([len(each) for each in round_]),
                    epoch * len(batches) + first + len(round_),
                )
            return
        indexes = [index for batch in batches for index in batch]
        size = self._workers * order.batch_size
        for first in range(0, len(indexes), size):
            examples = indexes[first : first + size]
            sharing, full = self._workers, len(examples) == size
            if not full:  # at least two examples per worker, if possible: BatchNorm cannot train on one
                fewest = math.ceil(len(examples) / order.batch_size)
                sharing = min(sharing, max(fewest, len(examples) // 2))
            mine = self._rank < sharing
            batch = examples[(self._rank if mine else 0) :: sharing]
            used = min(len(batches), (first + size) // order.batch_size)
            yield ScaledBatch(
                batch,
                1.0 if full else self._scale([len(examples[r::sharing]) for r in range(sharing)]),
                epoch * len(batches) + used,
            )

    def _scale(self, counts: Sequence[int]) -> float:
        """The scale of this worker's gradient in a round; `counts`: the examples of each worker with some."""
        if self._rank >= len(counts):
            return 0.0
        together = sum(counts[rank] for rank in self._averaged_with if rank < len(counts))
        return counts[self._rank] * len(self._averaged_with) / together


class CohortPlace(NamedTuple):
    """The place of a worker in the cohort that shares an epoch."""

    rank: int
    workers: int
    epoch: int


class CohortSharing(LockstepSharing):
    """Lockstep sharing among workers that may die and be replaced: the cohort is fixed for each epoch.

    `join(epoch)` returns the worker's place, or None if the epoch is over. `due(examples)` reports how many
    more examples are for this worker alone; a negative number if it leaves some unused.
    """

    def __init__(
        self, workers: int, join: Callable[[int], CohortPlace | None], due: Callable[[int], None]
    ) -> None:
        super().__init__(0, workers)
        self._join, self._due = join, due
        self._unused = 0  # examples of this epoch for this worker that it has not used yet

    def begin(self, epoch: int) -> int | None:
        place = self._join(epoch)
        if place is None:
            return None
        self._rank, self._workers = place.rank, place.workers
        self._averaged_with = range(place.workers)
        return place.epoch

    def batches(self, order: EpochOrder, epoch: int, prefetched: Sized) -> Iterator[ScaledBatch]:
        batches = list(super().batches(order, epoch, prefetched))
        self._unused = sum(len(batch.indexes) for batch in batches if batch.scale)
        self._due(self._unused)
        yield from batches

    def used(self, samples: int) -> None:
        self._unused -= samples

    def end(self, complete: bool, prefetched: int) -> None:
        if self._unused:
            self._due(-self._unused)
            self._unused = 0
