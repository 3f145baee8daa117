"""EarlyEnd: limits the time that an interrupted or failed run takes to save its model."""

from __future__ import annotations

import time
from collections.abc import Callable

from polyrhythm.coordination.coordinator import Coordinator
from polyrhythm.coordination.ending import INTERRUPTED
from polyrhythm.core.errors import Interrupted
from polyrhythm.launch.signals import HINT, STOP

OFFER = 15.0  # seconds for some worker of a run that has failed to say what it has
SEND = 300.0  # seconds for it to send that: a large model takes long between hosts


class EarlyEnd:
    """Counts signals, and decides what the first and the second one do."""

    def __init__(self, coordinator: Coordinator, say: Callable[[str], None]) -> None:
        self._coordinator, self._say = coordinator, say
        self.signals = 0  # how often Ctrl-C was pressed, or SIGTERM arrived
        self._stop_until: float | None = None
        self._failed_at: float | None = None

    def advance(self) -> None:
        """Called by the launcher's loop, again and again."""
        coordinator, ending, now = self._coordinator, self._coordinator.ending, time.monotonic()
        if self.signals and coordinator.failure is None and self._stop_until is None:
            if coordinator.stop():
                self._say(HINT)
                self._stop_until = now + self._patience()
            else:
                self._interrupt()
        if self._stop_until is not None and now > self._stop_until:
            self._interrupt()  # some worker does not get to its next step
        if coordinator.failure is not None:
            self._failed_at = self._failed_at or now
        late = self._failed_at is not None and now > self._failed_at + (SEND if ending.sending else OFFER)
        if self.signals > 1 or late:
            self._interrupt()
            ending.give_up()

    def _patience(self) -> float:
        """Seconds for the workers to stop: enough for a few steps as long as those so far."""
        tally, plan = self._coordinator.tally, self._coordinator.plan
        seconds = (self._coordinator.clock() - tally.began) * plan.workers / max(1, tally.progress()[0])
        return min(STOP, 5.0 + 5 * seconds)

    def _interrupt(self) -> None:
        self._coordinator.fail(INTERRUPTED, Interrupted.exit_code)
