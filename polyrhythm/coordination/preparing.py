"""Preparing: the nodes that have built their models and wait for the others. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyrhythm.coordination.leases import Leases
from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import NodeLauncher
from polyrhythm.coordination.reply_barrier import ReplyBarrier
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import Prepared, PreparedReply

FIRST = Peer("worker", 0)


class Preparing:
    """Their pending replies, and what the scripts of workers have seeded. Worker 0 decides for all."""

    def __init__(self, membership: Membership, leases: Leases, launcher: NodeLauncher) -> None:
        self._membership, self._leases, self._launcher = membership, leases, launcher
        self._waiting: ReplyBarrier[PreparedReply] = ReplyBarrier()
        self._seeds: dict[Peer, int | None] = {}
        self._settings: dict[Peer, list[tuple[str, dict[str, str]]]] = {}

    def add(self, peer: Peer, request: Prepared, respond: Callable[[PreparedReply], None]) -> None:
        """A node has built its model. What a worker's replacement has does not count."""
        self._waiting.add(peer, respond)
        if peer.role == "worker":
            self._seeds.setdefault(peer, request.seed)
            self._settings.setdefault(peer, request.settings)

    def announce(self, peer: Peer) -> None:
        """A replacement has built its model. It is announced together with the others that hold the model.

        This is when all of them are ready, so that nobody waits for a worker that is still loading its data,
        and before they get their replies, so that nobody gets a message from an unknown worker.
        """
        model, membership = self._membership.model_of(peer), self._membership
        if not all(each in self._waiting for each in model):
            return
        for each in model:
            membership.announce(each)
            self._leases.enter(each.rank)
            address = membership.members[each][0]
            self._launcher.tell(Notice("joined", each.role, each.rank, address=address))
        self.release(model)

    def forget(self, peer: Peer) -> None:
        """A node has died: it gets no reply."""
        self._waiting.forget(peer)

    def release(self, peers: Sequence[Peer] = ()) -> None:
        """Replies to these waiting nodes, or to all."""
        differ = len({*self._seeds.values()}) > 1
        reply = PreparedReply(self._seeds.get(FIRST), differ, self._different_settings())
        for peer in peers or self._waiting:
            self._waiting.release(peer, reply)

    def _different_settings(self) -> str:
        """The first setting of a worker that is not that of worker 0, in words; "" if there is none."""
        expected = self._settings.get(FIRST, [])
        for peer, settings in sorted(self._settings.items()):
            for (what, mine), (_, first) in zip(settings, expected, strict=False):
                for name in mine:
                    if mine[name] != first.get(name, mine[name]):
                        return f"{what} has {name}={mine[name]} on {peer} and {first[name]} on {FIRST}"
        return ""
