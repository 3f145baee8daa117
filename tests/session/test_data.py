"""Who trains on what: every example once, for all speeds of workers and all sizes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler

from polyrhythm.coordination.leases import Leases
from polyrhythm.core.errors import UsageError
from polyrhythm.core.lease import Lease
from polyrhythm.core.strategy import Traits
from polyrhythm.session.data import SharedLoader, Training
from polyrhythm.session.given import GivenBatch
from polyrhythm.session.seeds import mix
from polyrhythm.session.sharing import (
    CohortPlace,
    CohortSharing,
    Coordination,
    LeasedSharing,
    LockstepSharing,
    Sharing,
)

LONGEST = Traits.max_lease  # batches


class Numbers(Dataset[int]):
    """Example i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Training):
    """Training on every batch, which counts."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, float]] = []

    def on_batch(self, samples: int, batch: GivenBatch) -> None:
        super().on_batch(samples, batch)
        self.counts.append((samples, batch.scale))


class Shared(SharedLoader):
    """A worker's loader, and what it counted: (samples, factor) of each batch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int = 0,
        workers: int = 1,
        seed: int = 0,
        sharing: Sharing | None = None,
    ) -> None:
        training = Counting()
        sharing = LockstepSharing(rank, workers) if sharing is None else sharing
        super().__init__(loader, sharing, seed, training)
        self.counts = training.counts

    def batches(self) -> list[list[int]]:
        return [batch.tolist() for batch in self]


def dealt(workers: int, make: Any, **more: Any) -> list[list[tuple[list[int], int]]]:
    """For each worker its batches of an epoch, each with the number of examples that count."""
    shared = [Shared(make(), rank, workers, **more) for rank in range(workers)]
    epochs = [each.batches() for each in shared]
    return [
        list(zip(epoch, [samples for samples, _ in each.counts], strict=True))
        for each, epoch in zip(shared, epochs, strict=True)
    ]


sizes = {"size": some.integers(1, 60), "batch": some.integers(1, 9), "workers": some.integers(1, 7)}


@settings(deadline=None)
@given(**sizes, shuffle=some.booleans(), drop=some.booleans(), seed=some.integers(0, 9))
def test_a_lockstep_epoch_is_a_partition(
    size: int, batch: int, workers: int, shuffle: bool, drop: bool, seed: int
) -> None:
    """All workers take equally many steps, and what counts is each example of the epoch exactly once."""
    data = Numbers(size)

    def make() -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch, shuffle=shuffle, drop_last=drop)

    shares = dealt(workers, make, seed=seed)
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == len(Shared(make(), 0, workers))
    counted = Counter(index for share in shares for indexes, samples in share if samples for index in indexes)
    kept = size // batch * batch if drop else size
    assert counted.total() == kept and set(counted.values()) <= {1}
    assert all(indexes and samples in (0, len(indexes)) for share in shares for indexes, samples in share)
    for round_ in zip(*shares, strict=True):
        assert any(samples for _, samples in round_)


@settings(deadline=None)
@given(size=some.integers(1, 60), batch=some.integers(2, 9), workers=some.integers(1, 7))
def test_full_rounds_are_one_batch_per_worker(size: int, batch: int, workers: int) -> None:
    """All rounds but the last give every worker a full batch; only the last is dealt out evenly."""
    shares = dealt(workers, lambda: DataLoader(Numbers(size), batch_size=batch))
    for number, round_ in enumerate(zip(*shares, strict=True)):
        first, last = number * batch * workers, min(size, (number + 1) * batch * workers)
        members = {index for indexes, samples in round_ if samples for index in indexes}
        assert members == set(range(first, last))
        given = [samples for _, samples in round_ if samples]
        assert max(given) - min(given) <= 1
        if last - first == batch * workers:
            assert given == [batch] * workers
        # BatchNorm cannot train on one; only an odd rest in batches of two leaves no choice.
        assert min(given) >= 2 or last - first == 1 or (batch == 2 and (last - first) % 2)


@settings(deadline=None)
@given(**sizes, own=some.booleans(), died=some.integers(0, 3))
def test_factor_weighted_mean_over_workers_is_the_mean_of_the_round(
    size: int, batch: int, workers: int, own: bool, died: int
) -> None:
    """Full rounds count 1; in all of them, the mean of factor * batch mean is the mean of the round,
    also if some of the workers that the run began with have died."""

    def make() -> DataLoader[Any]:
        if own:
            return DataLoader(Numbers(12), batch_sampler=InPairs())
        return DataLoader(Numbers(size), batch_size=batch)

    def share(rank: int) -> Shared:
        def join(epoch: int) -> CohortPlace:
            return CohortPlace(rank, workers, epoch)

        return Shared(make(), sharing=CohortSharing(workers + died, join, lambda examples: None))

    shared = [share(rank) for rank in range(workers)]
    epochs = [each.batches() for each in shared]
    for number, round_ in enumerate(zip(*epochs, strict=True)):
        counts = [each.counts[number] for each in shared]
        pairs = list(zip(round_, counts, strict=True))
        examples = [index for indexes, (samples, _) in pairs if samples for index in indexes]
        mean = sum(factor * sum(indexes) / len(indexes) for indexes, (_, factor) in pairs)
        assert mean / workers == pytest.approx(sum(examples) / len(examples))
        assert [bool(samples) for samples, _ in counts] == [bool(factor) for _, factor in counts]
        if len({samples for samples, _ in counts}) == 1:
            assert {factor for _, factor in counts} == {1.0}


@settings(deadline=None)
@given(**sizes)
@example(size=3, batch=2, workers=2)
@example(size=11, batch=2, workers=4)
def test_no_batch_is_longer_than_asked(size: int, batch: int, workers: int) -> None:
    """Who asked for batches of B has memory for B."""
    shares = dealt(workers, lambda: DataLoader(Numbers(size), batch_size=batch))
    assert all(len(indexes) <= batch for share in shares for indexes, _ in share)


@pytest.mark.parametrize("workers", [2, 5])
def test_batches_of_one_example_are_shared_among_all_workers(workers: int) -> None:
    """With batches of one, every worker gets one, and none stands idle in a full round."""
    shares = dealt(workers, lambda: DataLoader(Numbers(4 * workers), batch_size=1))
    assert all(samples == 1 for share in shares for _, samples in share)


@settings(deadline=None)
@given(size=some.integers(1, 60), batch=some.integers(1, 9), drop=some.booleans())
def test_one_worker_has_the_plain_order(size: int, batch: int, drop: bool) -> None:
    """Alone, the loader gives what the user's own loader gives."""
    loader = DataLoader(Numbers(size), batch_size=batch, drop_last=drop)
    assert Shared(loader).batches() == [each.tolist() for each in loader]


def test_one_worker_has_the_order_that_the_seed_draws() -> None:
    """Shuffled, it is the order that the user's loader draws from the seed of the run and the epoch."""
    shared = Shared(DataLoader(Numbers(30), batch_size=4, shuffle=True), seed=3)
    for epoch in range(2):
        torch.manual_seed(mix("order", 3, epoch))
        order = [list(batch) for batch in shared.loader.batch_sampler]
        assert shared.batches() == order


@pytest.mark.parametrize("generator", [False, True])
def test_shuffled_epochs_differ_and_repeat_with_the_same_seed(generator: bool) -> None:
    """Each epoch has its own shuffle; the same seed repeats all epochs, another seed changes them."""

    def make(seed: int) -> Shared:
        own = torch.Generator() if generator else None
        return Shared(DataLoader(Numbers(40), batch_size=4, shuffle=True, generator=own), seed=seed)

    one, again, other = make(1), make(1), make(2)
    epochs = [one.batches() for _ in range(3)]
    assert epochs == [again.batches() for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3 and other.batches() != epochs[0]


class InPairs(BatchSampler):
    """Batches that belong together, of several lengths."""

    def __init__(self) -> None:
        self.lists = [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9], [10, 11]]

    def __iter__(self) -> Any:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_batches_of_the_users_own_sampler_stay_whole(workers: int) -> None:
    """They are dealt out as they are, each once; who gets none borrows one that does not count."""
    shares = dealt(workers, lambda: DataLoader(Numbers(12), batch_sampler=InPairs()))
    counted = [indexes for share in shares for indexes, samples in share if samples]
    assert sorted(counted) == InPairs().lists
    assert {len(share) for share in shares} == {-(-5 // workers)}


@pytest.mark.parametrize("workers", [1, 3])
def test_range_batches_reach_the_dataset_as_ranges(workers: int) -> None:
    """A dataset may then take a slice: rows one after the other need no list of their numbers."""

    class Blocks(Numbers):
        def __getitems__(self, indexes: range) -> range:
            assert isinstance(indexes, range)
            return indexes

    batches = [range(0, 4), range(4, 10), range(10, 11)]
    loader = DataLoader(Blocks(11), batch_sampler=batches, collate_fn=lambda batch: batch)
    leases = Leases()
    shared = [leased(leases, rank, workers, lambda: loader) for rank in range(workers)]
    seen = [each for worker in shared for each in worker]
    assert seen == batches


def test_a_plain_batch_sampler_keeps_its_size() -> None:
    """A torch BatchSampler given by hand means what `batch_size` means."""
    sampler = BatchSampler(SequentialSampler(range(24)), batch_size=4, drop_last=False)
    shares = dealt(2, lambda: DataLoader(Numbers(24), batch_sampler=sampler))
    assert [len(indexes) for share in shares for indexes, _ in share] == [4] * 6


def test_shared_loader_gives_the_same_batches_with_num_workers() -> None:
    """With num_workers the batches and their counts are the same, in the same order."""

    def make(loaders: int) -> Shared:
        return Shared(DataLoader(Numbers(23), batch_size=3, shuffle=True, num_workers=loaders), 1, 3)

    several, none = make(2), make(0)
    for _ in range(2):
        assert several.batches() == none.batches()
    assert several.counts == none.counts


def test_shared_loader_forwards_attributes_to_the_dataloader() -> None:
    """What is asked of it and not of us, such as the dataset, is answered by the DataLoader."""
    loader = DataLoader(Numbers(8), batch_size=3)
    shared = Shared(loader, 0, 2)
    assert (shared.dataset, shared.batch_size) == (loader.dataset, 3)


def test_unbatched_loaders_are_refused() -> None:
    """A map-style dataset without batches has nothing to deal out."""
    with pytest.raises(UsageError, match="batch_size=None"):
        Shared(DataLoader(Numbers(3), batch_size=None))


# --- leases -----------------------------------------------------------------------------------------


@given(some.integers(0, 200), some.integers(1, 9), some.randoms(use_true_random=False))
def test_leases_are_a_partition(batches: int, workers: int, chance: Any) -> None:
    """For any requests each batch is leased once, in order; each worker has one if there are enough."""
    leases, given, asking = Leases(), list[int](), set(range(workers))
    had = set()
    while asking:
        worker = chance.choice(sorted(asking))
        lease = leases.take(worker, 0, 0, batches, range(workers), LONGEST)
        if lease is None:
            asking.remove(worker)
            continue
        had.add(worker)
        given += range(lease.first, lease.end)
    assert given == list(range(batches))
    assert len(had) == workers or batches < workers
    assert leases.undone == 0


@given(some.integers(1, 2000), some.integers(1, 9))
def test_leases_shrink_towards_the_end(batches: int, workers: int) -> None:
    """Sizes never grow, are at most LONGEST and a share of what is left, and end with single batches."""
    leases, sizes, left = Leases(), [], batches
    for worker in range(workers):
        leases._served.setdefault((0, 0), set()).add(worker)  # none is kept for them
    while (lease := leases.take(0, 0, 0, batches, range(workers), LONGEST)) is not None:
        assert lease.count <= max(1, left // (2 * workers))
        left -= lease.count
        sizes.append(lease.count)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] <= LONGEST and sizes[-1] == 1


@given(some.integers(1, 60), some.integers(2, 6), some.integers(1, 3), some.randoms(use_true_random=False))
def test_leases_of_lost_workers_are_redone_or_counted_as_undone(
    batches: int, workers: int, epochs: int, chance: Any
) -> None:
    """However steps, losses and replacements interleave, each batch is finished once or counted as undone."""
    leases = Leases()
    held: dict[int, Lease] = {}
    at = dict.fromkeys(range(workers), 0)
    starting: set[int] = set()  # replacements that are members, and build their models
    done: Counter[tuple[int, int]] = Counter()
    while any(epoch < epochs for epoch in at.values()):
        worker = chance.choice([each for each, epoch in at.items() if epoch < epochs])
        if len(at) > 1 and chance.random() > 0.9:
            lease = held.pop(worker, None)
            assert leases.lose(worker) == (lease.count if lease else 0)
            del at[worker]
            leases.release([*at, *starting])
            if chance.random() < 0.5:
                starting.add(worker)
            continue
        if starting and chance.random() > 0.8:
            ready = starting.pop()
            leases.enter(ready)
            at[ready] = 0
        if (lease := held.pop(worker, None)) is not None:
            done.update((lease.epoch, number) for number in range(lease.first, lease.first + lease.count))
        lease = leases.take(worker, 0, at[worker], batches, [*at, *starting], LONGEST)
        if lease is None:
            at[worker] += 1
        else:
            assert lease.epoch <= at[worker]
            held[worker] = lease
    assert set(done.values()) <= {1}
    assert len(done) + leases.undone == epochs * batches


@given(some.lists(some.integers(0, 40), min_size=1, max_size=3), some.randoms(use_true_random=False))
def test_each_loader_has_its_own_leases(batches: list[int], chance: Any) -> None:
    """However workers go from one loader to the other, each loader is read once; a loss returns both."""
    leases, given = Leases(), Counter[tuple[int, int]]()
    open_ = {loader: {0, 1, 2} for loader in range(len(batches))}
    while open_:
        loader = chance.choice(sorted(open_))
        worker = chance.choice(sorted(open_[loader]))
        lease = leases.take(worker, loader, 0, batches[loader], range(3), LONGEST)
        if lease is None:
            open_[loader].remove(worker)
            if not open_[loader]:
                del open_[loader]
        else:
            given.update((loader, number) for number in range(lease.first, lease.first + lease.count))
    assert set(given.values()) <= {1}
    assert set(given) == {(loader, number) for loader, count in enumerate(batches) for number in range(count)}


def test_a_lost_worker_returns_the_leases_of_all_its_loaders() -> None:
    """What it held of each loader goes back to that loader."""
    leases = Leases()
    first, second = leases.take(1, 0, 0, 40, [0, 1], LONGEST), leases.take(1, 1, 0, 12, [0, 1], LONGEST)
    assert first == Lease(0, 0, 8) and second == Lease(0, 0, 3)
    assert leases.lose(1) == leases.undone == 11 and leases.lose(1) == 0
    assert leases.take(0, 1, 0, 12, [0], LONGEST) == second
    assert leases.take(0, 0, 0, 40, [0], LONGEST) == first
    assert leases.undone == 0


def test_returned_leases_are_handed_out_again() -> None:
    """What a lost worker held is leased in the same epoch or a later one, but not in an earlier one."""
    leases = Leases()
    assert leases.take(0, 0, 3, 16, [0], LONGEST) == Lease(3, 0, 8)
    assert leases.take(0, 0, 3, 16, [0], LONGEST, unseen=3) == Lease(3, 8, 4)
    assert leases.lose(0) == leases.undone == 7
    assert leases.take(1, 0, 2, 1, [1], LONGEST) == Lease(2, 0, 1)
    assert leases.take(1, 0, 4, 16, [1], LONGEST) == Lease(3, 5, 3)
    assert leases.take(1, 0, 4, 16, [1], LONGEST, unseen=3) == Lease(3, 8, 4)
    assert leases.undone == 0


def test_a_lost_worker_returns_batches_prefetched_but_not_seen() -> None:
    """A worker that is lost returns what it had leased and not seen, over several leases, and no more."""
    leases = Leases()
    assert leases.take(0, 0, 0, 40, [0], LONGEST) == Lease(0, 0, 8)
    assert leases.take(0, 0, 0, 40, [0], LONGEST, unseen=3) == Lease(0, 8, 8)
    assert leases.lose(0) == 3 + 8
    assert leases.take(1, 0, 0, 40, [1], LONGEST) == Lease(0, 5, 3)
    assert leases.take(1, 0, 0, 40, [1], LONGEST) == Lease(0, 8, 8)


@dataclass
class Asking(Coordination):
    """The requests of one worker, without a coordinator between."""

    leases: Leases
    rank: int
    workers: int

    def take(self, epoch: int, batches: int, unseen: int) -> Lease | None:
        return self.leases.take(self.rank, 0, epoch, batches, range(self.workers), LONGEST, unseen)

    def give_back(self, leases: list[Lease], peeked: bool) -> None:
        self.leases.give_back(self.rank, 0, leases, peeked)


def leased(leases: Leases, rank: int, workers: int, make: Any, seed: int = 0) -> Shared:
    """A worker's loader that leases from `leases`."""
    return Shared(make(), seed=seed, sharing=LeasedSharing(workers, Asking(leases, rank, workers)))


@settings(deadline=None)
@given(**sizes, seed=some.integers(0, 5), chance=some.randoms(use_true_random=False))
def test_a_leased_epoch_is_a_partition(size: int, batch: int, workers: int, seed: int, chance: Any) -> None:
    """Workers at any pace see the user's own batches, each once per epoch, and every example counts."""

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(size), batch_size=batch, shuffle=True)

    leases = Leases()
    shared = [leased(leases, rank, workers, make, seed) for rank in range(workers)]
    whole = sorted(Shared(make(), seed=seed).batches())
    running = {rank: iter(each) for rank, each in enumerate(shared)}
    seen = []
    while running:
        rank = chance.choice(sorted(running))
        indexes = next(running[rank], None)
        if indexes is None:
            del running[rank]
        else:
            seen.append(indexes.tolist())
    assert sorted(seen) == whole
    assert sum(samples for each in shared for samples, _ in each.counts) == size
    assert {factor for each in shared for _, factor in each.counts} == {1.0}


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_worker_that_breaks_out_of_an_epoch_returns_its_leases(loaders: int) -> None:
    """After a `break` the epoch is over for that worker, and the others get what it has not seen."""

    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(64), batch_size=2, num_workers=loaders)

    leases = Leases()
    one, other = (leased(leases, rank, 2, make) for rank in range(2))
    seen = []
    for batch in one:
        seen += batch.tolist()
        if len(seen) == 6:
            break
    assert one.epoch == 1 and leases.position(0).left == [Lease(0, 3, 5)]
    for batch in other:
        seen += batch.tolist()
    assert sorted(seen) == list(range(64)) and leases.undone == 0


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_lockstep_epoch_may_be_left_early(loaders: int) -> None:
    """After a `break` the next epoch begins, with its own order and its own factors."""

    def make() -> Shared:
        loader = DataLoader(Numbers(23), batch_size=2, shuffle=True, num_workers=loaders)
        return Shared(loader, 1, 3)

    early, late = make(), make()
    next(iter(early))
    assert early.epoch == 1
    late.batches()
    late.counts.clear()
    early.counts.clear()
    assert early.batches() == late.batches()
    assert early.counts == late.counts


class Shuffled(Sampler[int]):
    """A sampler that draws from Python's and numpy's random numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        return iter([order[place] for place in np.random.permutation(self.size)])

    def __len__(self) -> int:
        return self.size


def test_a_sampler_may_draw_from_any_source() -> None:
    """Workers whose random states differ draw the same order, and go on with their own numbers."""
    seen: list[int] = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        shared = Shared(DataLoader(Numbers(40), batch_size=4, sampler=Shuffled(40)), rank, 2)
        seen += [index for batch in shared.batches() for index in batch]
        expected = random.Random(rank).random(), np.random.RandomState(rank).random()
        assert (random.random(), np.random.random()) == expected
    assert sorted(seen) == list(range(40))
