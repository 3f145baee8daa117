"""DataSharing: handles requests of workers for batches and epochs. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection

from polyrhythm.coordination.leases import Cohorts, Leases
from polyrhythm.coordination.membership import Membership
from polyrhythm.core.events import Event, LeaseReturned, LeaseTaken
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import LeaseReply, ReturnLease, ShareEpoch, ShareReply, TakeLease


class DataSharing:
    """Assigns batches to workers: by leases, or in equal parts of an epoch."""

    def __init__(self, workers: int, membership: Membership, log: Callable[[Event], None]) -> None:
        self.leases, self.cohorts = Leases(), Cohorts(workers)
        self._membership, self._log = membership, log

    def take_lease(self, peer: Peer, request: TakeLease, longest: int) -> LeaseReply:
        """Leases at most `longest` batches to a worker."""
        workers = len(self._membership.workers)
        loader, epoch = request.loader, request.epoch
        lease = self.leases.take(peer.rank, loader, epoch, request.batches, workers, longest, request.unseen)
        if lease is not None:
            self._log(LeaseTaken(str(peer), loader, lease.epoch, lease.first, lease.count))
        return LeaseReply(lease)

    def return_lease(self, peer: Peer, request: ReturnLease) -> None:
        """Takes back batches that a worker will not train on."""
        returned = self.leases.give_back(peer.rank, request.loader, request.unseen)
        self._log(LeaseReturned(str(peer), request.loader, returned))

    def share_epoch(self, peer: Peer, request: ShareEpoch, respond: Callable[[ShareReply], None]) -> None:
        """A worker wants to begin an epoch; `begin` replies."""
        incarnation = self._membership.incarnations[peer]
        self.cohorts.request(peer, incarnation, request.loader, request.epoch, respond)

    def begin(self, done: Collection[Peer]) -> None:
        """Begins the epochs that all workers have requested, except those that are done."""
        training = (each for each in self._membership.workers if each not in done)
        self.cohorts.reply({each: self._membership.incarnations[each] for each in training})

    def lose(self, peer: Peer, reason: str) -> int:
        """A node has left. Returns how many of its leased batches are available again."""
        return self.leases.lose(peer.rank) if peer.role == "worker" and reason != "finished" else 0
