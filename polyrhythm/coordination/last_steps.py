"""LastSteps: workers in lockstep end after the same number of steps. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import NodeLauncher
from polyrhythm.core.last_step import ended_early
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import LastStep
from polyrhythm.core.resolve import ResolvedStrategy


class LastSteps:
    """The workers whose script is over, and how many steps each has taken."""

    def __init__(self, membership: Membership, launcher: NodeLauncher, refuse: Callable[[str], None]) -> None:
        self.strategy: ResolvedStrategy | None = None
        self._membership, self._launcher, self._refuse = membership, launcher, refuse
        self._steps: dict[Peer, int] = {}

    def end(self, peer: Peer, request: LastStep, respond: Callable[[None], None]) -> None:
        """The script of a worker is over. In lockstep the others must have taken as many steps."""
        respond(None)
        if self.strategy is None or not self.strategy.traits.lockstep or self._membership.incarnations[peer]:
            return  # a replacement has taken fewer
        self._steps[peer] = request.steps
        first, steps = next(iter(self._steps.items()))
        if steps != request.steps:
            self._refuse(ended_early(first, steps, peer, request.steps, self.strategy))
        self._launcher.tell(Notice("done", peer.role, peer.rank, steps=request.steps))

    def waited_for(self, workers: Sequence[Peer]) -> str:
        """The reason why some of these workers wait forever, if it is that another has ended."""
        others = [peer for peer in workers if peer not in self._steps]
        if not others or not self._steps:
            return ""
        first, steps = next(iter(self._steps.items()))
        return ended_early(first, steps, others[0], steps + 1, self.strategy)
