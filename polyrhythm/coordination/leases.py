"""Leases and Cohorts: which worker trains on which batches. Logic without I/O.

Workers that step at their own pace lease batches: few at a time, and fewer towards the end of an epoch, so
that a fast worker takes more and all finish together (guided self-scheduling). If an epoch has a batch for
each worker, the last ones are kept for workers that have none yet, so that no script finds an epoch empty.
Batches of a lost worker are returned and leased to others, in the next epoch at the latest. Batches of a
worker that leaves an epoch early, by `break`, are leased to others in the same epoch; when all have left it,
they are dropped, as the rest of an epoch that a single process leaves.

Workers that step together share each epoch in equal parts. If they may die and be replaced, those that share
an epoch are a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from polyrhythm.core.lease import Lease
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import DataPosition, EpochShare, ResumeData, ShareReply


def _last(leases: Sequence[Lease], count: int) -> list[Lease]:
    """The last `count` batches of these leases."""
    kept: list[Lease] = []
    for lease in reversed(leases):
        some = min(lease.count, count)
        if some:
            kept.insert(0, Lease(lease.epoch, lease.end - some, some))
        count -= some
    return kept


def _without_last(leases: Sequence[Lease], count: int) -> list[Lease]:
    """These leases without their last `count` batches."""
    kept = list(leases)
    while kept and count:
        lease = kept.pop()
        if lease.count > count:
            kept.append(Lease(lease.epoch, lease.first, lease.count - count))
        count -= min(count, lease.count)
    return kept


class Leases:
    """The leases of a run, for each of its loaders."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # by loader: the latest epoch of any worker
        self._since: dict[tuple[int, int], int] = {}  # by worker and loader: the epoch in which it joined
        self._absent: set[int] = set()  # workers that are lost; a replacement may be starting
        self._next: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], list[Lease]] = {}  # by worker and loader, the oldest first
        self._returned: dict[int, list[Lease]] = {}  # by loader: for this epoch or a later one
        self._left: dict[int, list[Lease]] = {}  # by loader: for the same epoch only
        self._at: dict[tuple[int, int], int] = {}  # by worker and loader: the epoch that it is in
        self._served: dict[tuple[int, int], set[int]] = {}  # by loader and epoch: workers that had a batch
        # By loader and epoch: the batches of an epoch whose last ones were refused to one worker, and kept.
        self._refused: dict[tuple[int, int], int] = {}
        self._positions = 0  # that were saved

    def take(
        self,
        worker: int,
        loader: int,
        epoch: int,
        batches: int,
        workers: Collection[int],
        longest: int,
        unseen: int = 0,
    ) -> Lease | None:
        """The next batches for one of these workers, at most `longest`; None if the epoch is over for it.

        The worker has trained on all batches that it held, except the last `unseen` ones, which are
        prefetched.
        """
        self._latest[loader] = max(self._latest.get(loader, 0), epoch)
        self._at[worker, loader] = epoch
        self._drop(loader, workers)
        held = self._held[worker, loader] = _last(self._held.get((worker, loader), []), unseen)
        over = epoch < self._since.get((worker, loader), 0)
        lease = self._take(worker, loader, epoch, 0 if over else batches, workers, longest)
        if lease is not None:
            held.append(lease)
            self._served.setdefault((loader, epoch), set()).add(worker)
        return lease

    def _take(
        self, worker: int, loader: int, epoch: int, batches: int, workers: Collection[int], longest: int
    ) -> Lease | None:
        returned, abandoned = self._returned.get(loader, []), self._left.get(loader, [])
        for at, lease in enumerate(returned):
            if lease.epoch <= epoch:
                return returned.pop(at)
        for at, lease in enumerate(abandoned):
            if lease.epoch == epoch:
                return abandoned.pop(at)
        first = self._next.get((loader, epoch), 0)
        left = batches - first
        count = max(1, min(longest, left // (2 * len(workers))))
        if left < count + len(workers):  # otherwise enough are left for all others
            first_of_worker = int(worker not in self._served.get((loader, epoch), ()))
            kept = self._kept(worker, loader, epoch, batches, workers)
            count = min(count, max(first_of_worker, left - kept), left)
        if count <= 0:
            if left > 0:
                self._refused[loader, epoch] = batches
            return None
        self._next[loader, epoch] = first + count
        return Lease(epoch, first, count)

    def _kept(self, worker: int, loader: int, epoch: int, batches: int, workers: Collection[int]) -> int:
        """How many batches at the end of an epoch are for other workers, which have had none of it yet."""
        if batches < len(workers):
            return 0
        served = self._served.get((loader, epoch), set())
        return sum(
            each != worker
            and each not in served
            and each not in self._absent
            and epoch >= self._since.get((each, loader), 0)
            for each in workers
        )

    def enter(self, worker: int) -> None:
        """A worker joins while others train: for it, earlier epochs are over."""
        self._absent.discard(worker)
        for loader, epoch in self._latest.items():
            self._since[worker, loader] = epoch

    def give_back(self, worker: int, loader: int, leases: Sequence[Lease], peeked: bool = False) -> int:
        """A worker leaves its epoch and returns batches; others may lease them. Returns how many.

        If it has only `peeked`, an epoch of which nothing else was leased has not begun. Batches of an
        earlier epoch, which a lost worker has left, must still be trained on.
        """
        held, count = self._held.pop((worker, loader), []), sum(lease.count for lease in leases)
        if peeked:  # it may still train on those that it has seen
            self._held[worker, loader] = _without_last(held, count)
        epoch = self._at.get((worker, loader), 0)
        left = self._left.setdefault(loader, [])
        left += [lease for lease in leases if lease.epoch == epoch]
        self._return(loader, [lease for lease in leases if lease.epoch != epoch])
        while peeked:
            ends = [each for each in left if each.end == self._next.get((loader, each.epoch))]
            peeked = bool(ends)
            for each in ends:
                left.remove(each)
                self._next[loader, each.epoch] = each.first
        return count

    def _return(self, loader: int, leases: Sequence[Lease]) -> None:
        returned = self._returned.setdefault(loader, [])
        returned.extend(leases)

    def _drop(self, loader: int, workers: Collection[int]) -> None:
        """Drops batches of epochs that all workers have left."""
        if left := self._left.get(loader):
            oldest = min(self._at.get((each, loader), 0) for each in workers)
            self._left[loader] = [lease for lease in left if lease.epoch >= oldest]

    def lose(self, worker: int) -> int:
        """A worker is gone: others may lease its batches. Returns how many."""
        self._absent.add(worker)
        held = {key: leases for key, leases in self._held.items() if key[0] == worker}
        for (_, loader), leases in held.items():
            del self._held[worker, loader]
            self._return(loader, leases)
        return sum(lease.count for leases in held.values() for lease in leases)

    def release(self, workers: Collection[int]) -> None:
        """Only these workers are left: others may lease what was kept for one that has gone."""
        for (loader, epoch), batches in self._refused.items():
            first = self._next.get((loader, epoch), 0)
            count = batches - first - self._kept(-1, loader, epoch, batches, workers)
            if count > 0:
                self._next[loader, epoch] = first + count
                self._return(loader, [Lease(epoch, first, count)])

    def position(self, loader: int) -> DataPosition:
        """Which batches of a loader have been leased, to save it."""
        self._positions += 1
        leased = {epoch: count for (which, epoch), count in self._next.items() if which == loader}
        returned, left = self._returned.get(loader, []), self._left.get(loader, [])
        return DataPosition(self._positions, leased, list(returned), list(left))

    def resume(self, loader: int, saved: Mapping[int, ResumeData]) -> None:
        """The workers of a run continue from the positions that they saved together."""
        last = max((each.position for each in saved.values() if each.position), key=lambda it: it.number)
        self._positions = last.number
        self._returned[loader], self._left[loader] = list(last.returned), list(last.left)
        self._next.update({(loader, epoch): count for epoch, count in last.leased.items()})
        for worker, each in saved.items():
            self._held[worker, loader] = list(each.held)
            self._latest[loader] = max(self._latest.get(loader, 0), each.epoch)
            self._at[worker, loader] = each.epoch
            if each.batches or each.held:
                self._served.setdefault((loader, each.epoch), set()).add(worker)

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

    def keep(self, ranks: Collection[int]) -> None:
        """Only these workers share epochs. Called before the first one."""
        self._last = {worker: 0 for worker in self._last if worker.rank in ranks}

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
