"""OptimizerRunner: runs the steps of the user's optimizer on a worker or a server."""

from __future__ import annotations

from collections.abc import Callable


class OptimizerRunner:
    """Runs the steps of the user's optimizer with the node's random states, and measures their time.

    The optimizer may draw random numbers, as in Langevin dynamics. In simulation all nodes share the global
    generators, so the node's own states are installed first (see `worlds.simulated.random_states`).
    """

    def __init__(
        self, install_random_state: Callable[[], None] = lambda: None, clock: Callable[[], float] = float
    ) -> None:
        self._install_random_state, self._clock = install_random_state, clock
        self.seconds = 0.0  # in all steps so far

    def run(self, step: Callable[[], object]) -> None:
        self._install_random_state()
        before = self._clock()
        step()
        self.seconds += self._clock() - before
