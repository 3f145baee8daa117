"""Survivors: which worker prints for all, when worker 0 may have died."""

from __future__ import annotations

from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import WhoIsLost
from polyrhythm.session.context import WorldContext


class Survivors:
    """The workers that have not died, or will be replaced. One that has finished stays first."""

    def __init__(self, context: WorldContext, workers: int) -> None:
        self._me, self._workers, self._worker_of = context.me, workers, context.worker_of
        context.node.on_notice["left"] = self._on_left
        replaces = context.node.incarnation > 0  # others may have died before this worker joined
        self._lost = set(context.request(WhoIsLost()).workers if replaces else ())  # by name

    @property
    def first(self) -> bool:
        """True on the first of them."""
        workers = (Peer("worker", rank) for rank in range(self._workers))
        return self._me == next((each for each in workers if str(each) not in self._lost), None)

    def _on_left(self, notice: Notice) -> str:
        """Called in any thread."""
        if notice.peer is not None and not notice.finished and not notice.replaced:
            self._lost.add(str(self._worker_of(notice.peer)))
        return ""
