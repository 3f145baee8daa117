"""Gathers: exchanges of values between all workers, at the same points of their scripts. Logic without I/O.

A gather is complete when every worker has sent its value. A worker that has died is not waited for, unless it
is replaced: the replacement runs the script from the start, so it gets the values of the gathers that are
over, and takes part in the one that is open. Servers run the script up to `prepare`: until then they take
part, and send no values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Gather, Gathered

Respond = Callable[[Gathered], None]
Fail = Callable[[str, int], None]  # ends the run with a message and an exit code


class Gathers:
    """The gathers of a run, of which one is open at a time."""

    def __init__(self, membership: Membership, done: Collection[Peer], fail: Fail) -> None:
        self._membership, self._fail = membership, fail
        self._done = done  # workers whose scripts have ended
        self.keep = False  # the values of past gathers, because workers may be replaced
        self.waiting: ReplyBarrier[Gathered] = ReplyBarrier()
        self._past: list[list[bytes]] = []  # the values of the gathers that are over
        self._open: dict[Peer, Gather] = {}
        self._serving: set[Peer] = set()

    def add(self, peer: Peer, request: Gather, respond: Respond) -> None:
        """A node has arrived at a gather."""
        if request.number < len(self._past):
            if request.steps:
                self._refuse(
                    f"{peer} replaced a worker that died, and comes to {request.point} when the others are "
                    "further: where workers are replaced, call it once per epoch"
                )
            respond(Gathered(self._past[request.number]))
            return
        self._open[peer] = request
        self.waiting.add(peer, respond)
        first = next(iter(self._open))
        if self._open[first].point == request.point:
            self.advance()
        else:
            self._refuse(
                f"{first} is at {self._open[first].point}, and {peer} at {request.point}: all workers must "
                "call them at the same points of the script"
            )

    def prepared(self, peer: Peer) -> None:
        """A node has built its model. If it is a server, it leaves the script."""
        if peer.role == "server":
            self._serving.add(peer)
            self.advance()

    def lose(self, peer: Peer) -> None:
        """A node has left or died."""
        self.waiting.forget(peer)
        self._open.pop(peer, None)
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
        nodes = {*membership.members, *membership.expected} - self._serving - {*self._open}
        if not any(each.role == "server" or membership.leads(each) for each in nodes):
            values = [self._open[peer].value for peer in sorted(self._open) if peer.role == "worker"]
            self._past.append(values if self.keep else [])
            self._open = {}
            self.waiting.release_all(lambda peer: Gathered(values))

    def _refuse(self, why: str) -> None:
        self._fail(why, UsageError.exit_code)
