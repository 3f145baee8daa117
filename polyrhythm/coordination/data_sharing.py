"""DataSharing: handles requests of workers for batches and epochs. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection

from polyrhythm.coordination.leases import Cohorts, Leases
from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.events import Event, LeaseReturned, LeaseTaken
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import (
    STREAM,
    DataPosition,
    LeaseReply,
    OrderDrawn,
    ResumeData,
    ReturnLease,
    ShareEpoch,
    ShareReply,
    TakeLease,
    WhereIsData,
)


class DataSharing:
    """Assigns batches to workers: by leases, or in equal parts of an epoch."""

    def __init__(
        self,
        workers: int,
        membership: Membership,
        done: Collection[Peer],
        log: Callable[[Event], None],
        fail: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._say, self._said = say, False
        self.leases, self.cohorts = Leases(), Cohorts(workers)
        self._membership, self._log, self._fail = membership, log, fail
        self._done = done  # workers that have taken their last step
        self._orders: dict[tuple[int, int], tuple[Peer, OrderDrawn]] = {}  # by loader and epoch: the first
        self._resumed: dict[int, dict[Peer, ResumeData]] = {}  # by loader
        self._resuming: dict[int, ReplyBarrier[None]] = {}
        self._begun: dict[int, set[Peer]] = {}  # by loader: workers that have requested batches

    def share_among_models(self, workers: int, size: int) -> None:
        """So many workers hold models, of which each is on `size` of them and gets data once."""
        self._membership.model_size = size
        self.cohorts.keep(range(0, workers, size))

    def take_lease(
        self, peer: Peer, request: TakeLease, longest: int, respond: Callable[[LeaseReply], None]
    ) -> None:
        """Leases at most `longest` batches to a worker."""
        loader, epoch = request.loader, request.epoch
        self._begun.setdefault(loader, set()).add(peer)
        if self._mixed(loader):
            return
        workers = [each.rank for each in self._membership.leaders]
        lease = self.leases.take(peer.rank, loader, epoch, request.batches, workers, longest, request.unseen)
        if lease is not None:
            self._log(LeaseTaken(str(peer), loader, lease.epoch, lease.first, lease.count))
        respond(LeaseReply(lease))

    def return_lease(self, peer: Peer, request: ReturnLease, respond: Callable[[None], None]) -> None:
        """Takes back batches that a worker will not train on."""
        returned = self.leases.give_back(peer.rank, request.loader, request.leases, request.peeked)
        self._log(LeaseReturned(str(peer), request.loader, returned))
        respond(None)

    def position(self, peer: Peer, request: WhereIsData, respond: Callable[[DataPosition], None]) -> None:
        """Which batches have been leased, to save it."""
        respond(self.leases.position(request.loader))

    def resume(self, peer: Peer, request: ResumeData, respond: Callable[[None], None]) -> None:
        """A worker continues from a saved position."""
        loader, resumed = request.loader, self._resumed.setdefault(request.loader, {})
        resumed[peer] = request
        if request.position is None:  # in lockstep all are at the same place
            first, other = next(iter(resumed.items()))
            if (other.epoch, other.batches) != (request.epoch, request.batches):
                self._fail(
                    f"{peer} resumed from batch {request.batches} of epoch {request.epoch}, but {first} from "
                    f"batch {other.batches} of epoch {other.epoch}: load the same step on all workers"
                )
            if not self._mixed(loader):
                respond(None)
            return
        waiting = self._resuming.setdefault(loader, ReplyBarrier())
        waiting.add(peer, respond)
        if not self._mixed(loader) and not {*self._membership.leaders} - {*waiting}:
            self.leases.resume(loader, {each.rank: position for each, position in resumed.items()})
            waiting.release_all(lambda each: None)

    def _mixed(self, loader: int) -> bool:
        """Fails if some workers have resumed, and another has begun without."""
        resumed = self._resumed.get(loader)
        if not resumed:
            return False
        begun = sorted(self._begun.get(loader, set()).difference(resumed))
        if begun:
            self._fail(
                f"{next(iter(resumed))} continues from a saved state, but {begun[0]} does not: either each "
                "worker loads the state that it saved itself, or none does"
            )
        return bool(begun)

    def order_drawn(self, peer: Peer, request: OrderDrawn, respond: Callable[[None], None]) -> None:
        """Fails if workers draw different orders: they would train on some examples twice."""
        respond(None)
        first, drawn = self._orders.setdefault((request.loader, request.epoch), (peer, request))
        if drawn.data != request.data:
            self._fail(
                f"{peer} trains on {request.data}, but {first} on {drawn.data}: all workers must split the "
                "data in the same way, as random_split(data, lengths, torch.Generator().manual_seed(0)) does"
            )
        elif drawn.digest == request.digest:
            return
        elif request.digest.startswith(STREAM):
            if not self._said:
                self._say(
                    f"{peer} and {first} read different first batches of the training stream: each worker "
                    "trains on a part of the batches that it reads, so a dataset that divides itself by rank "
                    "loses the rest; let session.prepare() divide it, or leave its loader out of prepare()"
                )
            self._said = True
        else:
            self._fail(
                f"{peer} and {first} draw different orders of the data in epoch {request.epoch}: a sampler "
                "must draw the same order on all workers, from the global generators of torch, NumPy or "
                "Python, or from a seed that is the same on all, and by equal weights (session.mean())"
            )

    def share_epoch(self, peer: Peer, request: ShareEpoch, respond: Callable[[ShareReply], None]) -> None:
        """A worker wants to begin an epoch. The reply comes when it begins."""
        self._begun.setdefault(request.loader, set()).add(peer)
        if self._mixed(request.loader):
            return
        incarnation = self._membership.incarnations[peer]
        self.cohorts.request(peer, incarnation, request.loader, request.epoch, respond)
        self.begin()

    def begin(self) -> None:
        """Begins the epochs that all workers have requested, except those that are done."""
        training = (each for each in self._membership.leaders if each not in self._done)
        self.cohorts.reply({each: self._membership.incarnations[each] for each in training})

    def lose(self, peer: Peer, reason: str) -> int:
        """A node has left. Returns how many of its leased batches are available again."""
        if not self._membership.leads(peer):
            return 0
        returned = self.leases.lose(peer.rank) if reason != "finished" else 0
        self.leases.release([each.rank for each in self._membership.leaders])
        return returned
