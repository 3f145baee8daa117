"""CallOrder: workers make the same collective calls in the same order. Logic without I/O.

A call such as `session.barrier()` that only some workers make would be paired with a later one, or waited for
until the timeout. So each worker announces its calls, and the first difference ends the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import NodeLauncher
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import EnterCall


class CallOrder:
    """The calls that some workers have made and others have not. A replacement runs the script again, and
    does not count."""

    def __init__(self, membership: Membership, launcher: NodeLauncher, refuse: Callable[[str], None]) -> None:
        self._membership, self._launcher, self._refuse = membership, launcher, refuse
        self.lockstep = False
        self._made: Counter[Peer] = Counter()
        self._first: dict[int, tuple[Peer, EnterCall]] = {}  # by number: who made it first
        self._ended: set[Peer] = set()

    def enter(self, peer: Peer, call: EnterCall, respond: Callable[[None], None]) -> None:
        """A worker makes a call."""
        respond(None)
        if peer.role != "worker" or self._membership.incarnations[peer]:
            return
        number = self._made[peer]
        self._made[peer] += 1
        first, other = self._first.setdefault(number, (peer, call))
        if other.point != call.point:
            return self._refuse(
                f"{first} is in {other.text}, and {peer} in {call.text}: all workers must make the same "
                "calls in the same order"
            )
        self._check_ended()
        if self.lockstep:
            notice = Notice(
                "waits", peer.role, peer.rank, steps=call.exchanges, calls=number, reason=call.text
            )
            self._launcher.tell(notice)
        everyone = [each for each in self._membership.workers if not self._membership.incarnations[each]]
        for passed in [each for each in self._first if all(self._made[one] > each for one in everyone)]:
            del self._first[passed]

    def end(self, peer: Peer) -> None:
        """The script of a worker is over: it makes no more calls."""
        if not self._membership.incarnations[peer]:
            self._ended.add(peer)
            self._check_ended()

    def forget(self, peer: Peer) -> None:
        """A worker has died; the others do not wait for its calls."""
        self._ended.discard(peer)

    def _check_ended(self) -> None:
        for number, (first, call) in self._first.items():
            for other in sorted(self._ended):
                if self._made[other] <= number:
                    return self._refuse(
                        f"{first} is in {call.text}, which {other} has not called before the end of its "
                        "script: all workers must call it, also those that got no batch"
                    )
