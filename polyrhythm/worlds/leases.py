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
    def __init__(self) -> None:
        self.epoch = 0
        self._next: dict[int, int] = {}
        self._held: dict[int, Lease] = {}
        self._returned: list[Lease] = []

    def take(self, worker: int, epoch: int, batches: int, workers: int) -> Lease | None:
        """The next batches for a worker, which has done with those it held; None when the epoch is over."""
        self._held.pop(worker, None)
        self.epoch = max(self.epoch, epoch)
        lease = self._take(epoch, batches, workers)
        if lease is not None:
            self._held[worker] = lease
        return lease

    def _take(self, epoch: int, batches: int, workers: int) -> Lease | None:
        if self._returned and self._returned[0].epoch <= epoch:
            return self._returned.pop(0)
        first = self._next.get(epoch, 0)
        left = batches - first
        if left <= 0:
            return None
        count = max(1, min(LONGEST, left // (2 * workers)))
        self._next[epoch] = first + count
        return Lease(epoch, first, count)

    def lose(self, worker: int) -> Lease | None:
        """A worker is gone: what it held is to be handed out again."""
        lease = self._held.pop(worker, None)
        if lease is not None:
            self._returned.append(lease)
        return lease

    @property
    def undone(self) -> int:
        """Batches that nobody has finished: given back and not handed out again."""
        return sum(lease.count for lease in self._returned)
