"""Gathers: exchanges of values between all workers, at the same points of their scripts. Logic without I/O.

A gather is complete when every worker has sent its value. A worker that has died is not waited for, unless it
is replaced. The replacement runs the script again, and its calls are paired with those that the others have
made: with the next one of the same line, in the same epoch. It gets the values of the gathers that are over,
and takes part in the one that is open. It may have missed some: calls inside a loop that has no batch for it,
and all those before the epoch at which its script resumes. Before it begins that epoch, a call belongs to the
loop over epochs if the others have made it in later epochs, and else to the time before training.
Servers run the script up to `prepare`: until then they take part, and send no values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Gather, Gathered

Respond = Callable[[Gathered], None]
Fail = Callable[[str, int], None]  # ends the run with a message and an exit code


_MISSED = (
    "{peer} replaced a worker that died, and comes to {point}, where the others are not, or no longer: where "
    "workers are replaced, make such calls once per epoch, after the loop over the loader"
)
_UNKNOWN = (
    "{peer} replaced a worker that died, and got the values of {point} from before training, but the others "
    "call it in epoch {epoch}, too: where workers are replaced, make such calls once per epoch, after the "
    "loop over the loader"
)


class _Place(NamedTuple):
    """Where in its script a worker makes a call."""

    epochs: int
    point: str
    path: str


class _Past(NamedTuple):
    """A gather that is over."""

    places: dict[Peer, _Place]
    values: list[bytes]


class Gathers:
    """The gathers of a run, of which one is open at a time."""

    def __init__(self, membership: Membership, done: Collection[Peer], fail: Fail) -> None:
        self._membership, self._fail = membership, fail
        self._done = done  # workers whose scripts have ended
        self.keep = False  # the values of past gathers, because workers may be replaced
        self.waiting: ReplyBarrier[Gathered] = ReplyBarrier()
        self._past: list[_Past] = []
        self._count = 0  # of gathers that are over
        self._open: dict[Peer, Gather] = {}
        self._serving: set[Peer] = set()
        self._next: dict[Peer, int] = {}  # by replacement: the first past gather that its next call may be
        self._resumed: dict[Peer, dict[int, int]] = {}  # by replacement: the epochs of its loaders
        self._before: dict[_Place, Peer] = {}  # where a call taken for one from before training may belong

    def add(self, peer: Peer, request: Gather, respond: Respond) -> None:
        """A node has arrived at a gather."""
        replaces = self._membership.incarnations[peer] > 0
        if (wrong := self._before.get(_place(request))) is not None:
            text = _UNKNOWN.format(peer=wrong, point=request.point, epoch=request.epochs)
            return self._refuse(text)
        request = self._in_loop(peer, request) if replaces else request
        found = self._find(peer, request) if replaces else len(self._past)
        if found is None:
            return self._refuse(_MISSED.format(peer=peer, point=request.point))
        if found < len(self._past):
            self._next[peer] = found + 1
            return respond(Gathered(self._past[found].values, found))
        self._open[peer] = request
        self.waiting.add(peer, respond)
        first = next(iter(self._open))
        if self._open[first].point != request.point:
            return self._refuse(
                f"{first} is at {self._open[first].point}, and {peer} at {request.point}: all workers must "
                "call them at the same points of the script"
            )
        for each in filter(self._membership.incarnations.__getitem__, self._open):
            if any(_place(other) != _place(self._open[each]) for other in self._open.values()):
                return self._refuse(_MISSED.format(peer=each, point=request.point))
        self.advance()

    def _in_loop(self, peer: Peer, request: Gather) -> Gather:
        """The call of a replacement that has resumed and not begun: with its epoch, if that is known."""
        resumed = sum(epoch - 1 for epoch in self._resumed.get(peer, {}).values())
        if request.epochs or not resumed:
            return request
        known = {place for past in self._past for place in past.places.values()}
        known.update(map(_place, self._open.values()))
        mine = msgspec.structs.replace(request, epochs=resumed)
        if any(_place(request)._replace(epochs=epoch) in known for epoch in range(1, resumed + 1)):
            return mine
        self._before[_place(mine)] = peer
        return request

    def _find(self, peer: Peer, request: Gather) -> int | None:
        """The number of the gather that a replacement has arrived at; None if it has none."""
        mine = _place(request)
        for number in range(self._next.get(peer, 0), len(self._past)):
            places = self._past[number].places
            place = places.get(peer) or next(iter(places.values()))
            if place == mine:
                return None if request.steps else number
            if place.epochs > mine.epochs:
                return None
        return len(self._past)

    def resume(self, peer: Peer, loader: int, epoch: int) -> None:
        """A replacement resumes with an epoch, and takes no part in gathers before it."""
        self._resumed.setdefault(peer, {})[loader] = epoch + 1
        self.advance()

    def prepared(self, peer: Peer) -> None:
        """A node has built its model. If it is a server, it leaves the script."""
        if peer.role == "server":
            self._serving.add(peer)
            self.advance()

    def lose(self, peer: Peer) -> None:
        """A node has left or died."""
        self.waiting.forget(peer)
        for each in (self._open, self._next, self._resumed):
            each.pop(peer, None)
        self._before = {place: each for place, each in self._before.items() if each != peer}
        self.advance()

    def advance(self) -> None:
        """Completes the open gather if all nodes have arrived."""
        if not self._open:
            return
        membership = self._membership
        finished = {peer for peer, reason in membership.gone.items() if reason == "finished"}
        ended = filter(membership.leads, {*self._done, *finished} - {*self._open})
        for peer in sorted(ended):
            first = next(iter(self._open))
            return self._refuse(
                f"{first} is at {self._open[first].point}, which {peer} has not called before the end of its "
                "script: all workers must call it, also those that got no batch"
            )
        begun = max(request.epochs for request in self._open.values())
        later = {peer for peer, epochs in self._resumed.items() if sum(epochs.values()) > begun}
        nodes = {*membership.members, *membership.expected} - self._serving - {*self._open} - later
        if not any(each.role == "server" or membership.leads(each) for each in nodes):
            values = [self._open[peer].value for peer in sorted(self._open) if peer.role == "worker"]
            if self.keep:
                self._past.append(_Past({peer: _place(each) for peer, each in self._open.items()}, values))
                self._next |= dict.fromkeys(self._open, len(self._past))
            number, self._count, self._open = self._count, self._count + 1, {}
            self.waiting.release_all(lambda peer: Gathered(values, number))

    def _refuse(self, why: str) -> None:
        self._fail(why, UsageError.exit_code)


def _place(request: Gather) -> _Place:
    return _Place(request.epochs, request.point, request.path)
