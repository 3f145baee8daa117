"""Leases and Cohorts: which worker trains on which batches. Logic without I/O.

Workers that step at their own pace lease batches: few at a time, and fewer towards the end of an epoch, so
that a fast worker takes more and all finish together (guided self-scheduling). Batches of a lost worker are
returned and leased to others, in the next epoch at the latest.

Workers that step together share each epoch in equal parts. If they may die and be replaced, those that share
an epoch are a cohort.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from polyrhythm.core.lease import Lease
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import EpochShare, ShareReply


def _last(leases: Sequence[Lease], count: int) -> list[Lease]:
    """The last `count` batches of these leases."""
    kept: list[Lease] = []
    for lease in reversed(leases):
        some = min(lease.count, count)
        if some:
            kept.insert(0, Lease(lease.epoch, lease.first + lease.count - some, some))
        count -= some
    return kept


class Leases:
    """The leases of a run, for each of its loaders."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # by loader: the latest epoch of any worker
        self._since: dict[tuple[int, int], int] = {}  # by worker and loader: the epoch in which it joined
        self._next: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], list[Lease]] = {}  # by worker and loader, the oldest first
        self._returned: dict[int, list[Lease]] = {}

    def take(
        self,
        worker: int,
        loader: int,
        epoch: int,
        batches: int,
        workers: int,
        longest: int,
        unseen: int = 0,
    ) -> Lease | None:
        """The next batches for a worker, at most `longest`; None if the epoch is over.

        The worker has trained on all batches that it held, except the last `unseen` ones, which are
        prefetched.
        """
        self._latest[loader] = max(self._latest.get(loader, 0), epoch)
        held = self._held[worker, loader] = _last(self._held.get((worker, loader), []), unseen)
        over = epoch < self._since.get((worker, loader), 0)
        lease = self._take(loader, epoch, 0 if over else batches, workers, longest)
        if lease is not None:
            held.append(lease)
        return lease

    def _take(self, loader: int, epoch: int, batches: int, workers: int, longest: int) -> Lease | None:
        returned = self._returned.get(loader, [])
        for at, lease in enumerate(returned):
            if lease.epoch <= epoch:
                return returned.pop(at)
        first = self._next.get((loader, epoch), 0)
        left = batches - first
        if left <= 0:
            return None
        count = max(1, min(longest, left // (2 * workers)))
        self._next[loader, epoch] = first + count
        return Lease(epoch, first, count)

    def enter(self, worker: int) -> None:
        """A worker joins while others train: for it, earlier epochs are over."""
        for loader, epoch in self._latest.items():
            self._since[worker, loader] = epoch

    def give_back(self, worker: int, loader: int, unseen: int) -> int:
        """A worker returns the last `unseen` batches that it holds; others may lease them."""
        returned = _last(self._held.pop((worker, loader), []), unseen)
        self._returned.setdefault(loader, []).extend(returned)
        return sum(lease.count for lease in returned)

    def lose(self, worker: int) -> int:
        """A worker is gone: others may lease its batches. Returns how many."""
        loaders = [loader for who, loader in self._held if who == worker]
        return sum(self.give_back(worker, loader, sys.maxsize) for loader in loaders)

    @property
    def undone(self) -> int:
        """The number of returned batches that have not been leased again."""
        return sum(lease.count for returned in self._returned.values() for lease in returned)


class Cohorts:
    """The workers that share the epochs of a run in equal parts, where workers may die and be replaced.

    An epoch begins when all workers of the previous cohort that are still in the run have requested it.
    Others that have requested it by then, such as replacements, join the cohort; earlier epochs are over for
    them. A replacement may not have requested epochs of a second loader yet: once in the cohort, it gets the
    epoch that the others begin next.
    """

    def __init__(self, workers: int) -> None:
        self._epochs: dict[int, int] = {}  # by loader: the last epoch that has begun
        self.number = 0  # how often the cohort has changed
        self._last = {Peer("worker", rank): 0 for rank in range(workers)}  # the cohort: workers, incarnations
        self._waiting: dict[tuple[int, int], dict[Peer, Callable[[ShareReply], None]]] = {}

    def request(
        self, worker: Peer, incarnation: int, loader: int, epoch: int, respond: Callable[[ShareReply], None]
    ) -> None:
        """An incarnation of a worker requests an epoch."""
        next_ = self._epochs.get(loader, -1) + 1
        if epoch < next_ and self._last.get(worker) != incarnation:
            respond(ShareReply(None))
        else:
            self._waiting.setdefault((loader, max(epoch, next_)), {})[worker] = respond

    @property
    def waiting(self) -> set[Peer]:
        """Workers whose epoch has not begun yet."""
        return {worker for each in self._waiting.values() for worker in each}

    def reply(self, training: Mapping[Peer, int]) -> None:
        """Begins epochs that all have requested; `training`: workers that still train, and incarnations."""
        for (loader, epoch), waiting in sorted(self._waiting.items(), key=lambda item: item[0]):
            for gone in [worker for worker in waiting if worker not in training]:
                del waiting[gone]
            # Replacements are not waited for: they may be at another point of the script.
            wanted = [
                worker for worker, incarnation in self._last.items() if training.get(worker) == incarnation
            ]
            if not waiting or not all(worker in waiting for worker in wanted):
                continue
            del self._waiting[loader, epoch]
            cohort = {worker: training[worker] for worker in sorted(waiting)}
            self._epochs[loader] = epoch
            if cohort != self._last:
                self.number, self._last = self.number + 1, cohort
            share = EpochShare([worker.rank for worker in cohort], self.number, epoch)
            for respond in waiting.values():
                respond(ShareReply(share))
