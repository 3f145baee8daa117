"""Who trains on which batches when workers go at their own pace, or come and go.

Batches of an epoch are leased in small runs, smaller towards the end, so that a fast worker takes more and
all finish together (guided self-scheduling). What a lost worker held goes back and is handed out again,
at the latest in the next epoch. No I/O here: the coordinator asks and tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyrhythm.core.lease import Lease
from polyrhythm.core.peer import Peer

LONGEST = 8


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
        self._latest: dict[int, int] = {}  # the last epoch that anybody is in, by loader
        self._since: dict[tuple[int, int], int] = {}  # by worker and loader: in which epoch it came
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
        unseen: int = 0,
        longest: int = LONGEST,
    ) -> Lease | None:
        """The next batches for a worker; None when the epoch is over.

        The worker has done with those it held, but for the last `unseen` ones, which it has loaded ahead.
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
        """A worker comes while others train: the epochs before the present one are over for it."""
        for loader, epoch in self._latest.items():
            self._since[worker, loader] = epoch

    def give_back(self, worker: int, loader: int, unseen: int) -> int:
        """A worker will not train on the last `unseen` batches it holds: they are to be handed out again."""
        returned = _last(self._held.pop((worker, loader), []), unseen)
        self._returned.setdefault(loader, []).extend(returned)
        return sum(lease.count for lease in returned)

    def lose(self, worker: int) -> int:
        """A worker is gone: what it held is to be handed out again. Returns the number of batches."""
        loaders = [loader for who, loader in self._held if who == worker]
        return sum(self.give_back(worker, loader, sys.maxsize) for loader in loaders)

    @property
    def undone(self) -> int:
        """Batches that were given back and that nobody took since."""
        return sum(lease.count for returned in self._returned.values() for lease in returned)


class Deals:
    """Who shares the epochs of a run in equal parts, where workers step together but may come and go.

    An epoch begins when all are there that shared the one before and are still in the run. Whoever else is
    there by then, in place of one that died, is in from here on; the epochs before are over for it. For those
    of a second loader it may never have asked: once it is in, it gets the one that the others begin next.
    """

    def __init__(self, workers: int) -> None:
        self._epochs: dict[int, int] = {}  # the last one that was dealt, by loader
        self.number = 0  # how often a group has been another than the one before
        self._last = {Peer("worker", rank): 0 for rank in range(workers)}  # it, each in one of its lives
        self._waiting: dict[tuple[int, int], dict[Peer, Callable[[dict[str, Any]], None]]] = {}

    def request(
        self,
        worker: Peer,
        incarnation: int,
        loader: int,
        epoch: int,
        respond: Callable[[dict[str, Any]], None],
    ) -> None:
        """A worker, in one of its lives, wants to begin an epoch."""
        next_ = self._epochs.get(loader, -1) + 1
        if epoch < next_ and self._last.get(worker) != incarnation:
            respond({"over": True})
        else:
            self._waiting.setdefault((loader, max(epoch, next_)), {})[worker] = respond

    @property
    def waiting(self) -> set[Peer]:
        """Who wants to begin an epoch, and cannot yet."""
        return {worker for each in self._waiting.values() for worker in each}

    def reply(self, there: Mapping[Peer, int]) -> None:
        """Begins what can begin; `there` are the workers that may be waited for, each in one of its lives."""
        for (loader, epoch), waiting in sorted(self._waiting.items(), key=lambda item: item[0]):
            for gone in [worker for worker in waiting if worker not in there]:
                del waiting[gone]
            # Not who came in place of another: that one may be waiting elsewhere in the script.
            wanted = [
                worker for worker, incarnation in self._last.items() if there.get(worker) == incarnation
            ]
            if not waiting or not all(worker in waiting for worker in wanted):
                continue
            del self._waiting[loader, epoch]
            group = {worker: there[worker] for worker in sorted(waiting)}
            self._epochs[loader] = epoch
            if group != self._last:
                self.number, self._last = self.number + 1, group
            for respond in waiting.values():
                ranks = [worker.rank for worker in group]
                respond({"ranks": ranks, "number": self.number, "epoch": epoch})
