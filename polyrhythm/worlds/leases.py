"""Who trains on which batches when workers go at their own pace.

Batches of an epoch are leased in small runs, smaller towards the end, so that a fast worker takes more and
all finish together (guided self-scheduling). What a lost worker held goes back and is handed out again,
at the latest in the next epoch. No I/O here: the coordinator asks and tells.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 8


@dataclass(frozen=True)
class Lease:
    """Batches `first` to `first + count` of an epoch."""

    epoch: int
    first: int
    count: int


class Leases:
    """The leases of a run, for each of its loaders."""

    def __init__(self) -> None:
        self.epoch = 0
        self._next: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], Lease] = {}
        self._returned: dict[int, list[Lease]] = {}

    def take(self, worker: int, loader: int, epoch: int, batches: int, workers: int) -> Lease | None:
        """The next batches for a worker, which has done with those it held; None when the epoch is over."""
        self._held.pop((worker, loader), None)
        self.epoch = max(self.epoch, epoch)
        lease = self._take(loader, epoch, batches, workers)
        if lease is not None:
            self._held[worker, loader] = lease
        return lease

    def _take(self, loader: int, epoch: int, batches: int, workers: int) -> Lease | None:
        returned = self._returned.get(loader, [])
        if returned and returned[0].epoch <= epoch:
            return returned.pop(0)
        first = self._next.get((loader, epoch), 0)
        left = batches - first
        if left <= 0:
            return None
        count = max(1, min(LONGEST, left // (2 * workers)))
        self._next[loader, epoch] = first + count
        return Lease(epoch, first, count)

    def give_back(self, worker: int, loader: int, lease: Lease) -> None:
        """A worker will not train on these: they are to be handed out again."""
        self._held.pop((worker, loader), None)
        if lease.count:
            self._returned.setdefault(loader, []).append(lease)

    def lose(self, worker: int) -> int:
        """A worker is gone: what it held is to be handed out again. Returns the number of batches."""
        held = [(loader, lease) for (who, loader), lease in self._held.items() if who == worker]
        for loader, lease in held:
            self.give_back(worker, loader, lease)
        return sum(lease.count for _, lease in held)

    @property
    def undone(self) -> int:
        """Batches that were given back and that nobody took since."""
        return sum(lease.count for returned in self._returned.values() for lease in returned)
