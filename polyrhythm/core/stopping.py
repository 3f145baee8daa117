"""Stopping: how a worker learns that the run ends early, and where it stops.

A run that is interrupted ends as if the script had ended after its present step. Workers in lockstep must
stop after the same step, or one would wait for another forever. So each reports how many steps it has taken
and pauses after the present one, until the coordinator has announced the step after which all stop: one more
than the largest number reported, which every worker can still reach.

A run that has failed cannot agree on anything. Then each worker stops where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from polyrhythm.core.notice import Notice

PATIENCE = 60.0  # seconds; the launcher waits less for an interrupted run to end


class RunStopped(BaseException):
    """Ends the script, because the run ends. No exception that a script should handle."""


class Stopping:
    """What a node knows about an early end of the run. Notices arrive while the script runs."""

    def __init__(self) -> None:
        self.steps = 0  # calls of `optimizer.step()` that are complete
        self.stepping = False  # inside one, or one has failed: the parameters may be half changed
        self.alone = False  # the run has failed, and nobody waits for others any longer
        self.on_abandoned: Callable[[], None] = lambda: None  # called in a thread when the run has failed
        self.salvaging = threading.Event()  # set when the script has stopped and its model is being saved
        self._asked = False
        self._last: int | None = None  # the step after which all workers stop
        self._decided = threading.Event()

    def handle(self, notice: Notice) -> int | None:
        """Handles a notice that the run ends early. Returns the number of steps, if it is to be reported."""
        self._asked = True  # first, so that at most one step more is taken
        if notice.kind == "abandon":
            self.alone = True
        elif notice.step < 0:
            return self.steps
        else:
            self._last = notice.step
        self._decided.set()
        return None

    def before_step(self) -> None:
        """Called before each step is taken."""
        if self.alone:
            raise RunStopped
        self.stepping = True

    def after_step(self) -> None:
        """Called after each step."""
        self.stepping = False
        self.steps += 1
        if not self._asked:
            return
        self._decided.wait(PATIENCE)
        if self.stopped:
            raise RunStopped

    @property
    def stopped(self) -> bool:
        """True if this worker takes no more steps."""
        return self.alone or (self._last is not None and self.steps >= self._last)
