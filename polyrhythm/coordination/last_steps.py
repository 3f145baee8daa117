"""LastSteps: workers in lockstep end after the same number of steps. Logic without I/O."""

from __future__ import annotations

from polyrhythm.core.last_step import ended_early
from polyrhythm.core.peer import Peer


class LastSteps:
    """The workers whose script is over, and how many steps each has taken."""

    def __init__(self) -> None:
        self._steps: dict[Peer, int] = {}

    def end(self, peer: Peer, steps: int, strategy: str) -> str:
        """The script of a worker is over. Returns an error, or an empty string."""
        self._steps[peer] = steps
        return "" if steps == self._first[1] else ended_early(*self._first, peer, steps, strategy)

    def waited_for(self, workers: list[Peer], strategy: str) -> str:
        """The reason why some of these workers wait forever, if it is that another has ended."""
        others = [peer for peer in workers if peer not in self._steps]
        if not others or not self._steps:
            return ""
        return ended_early(*self._first, others[0], self._first[1] + 1, strategy)

    @property
    def _first(self) -> tuple[Peer, int]:
        return next(iter(self._steps.items()))
