"""OptimizerRunner: runs the steps of the user's optimizer on a worker or a server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


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
        self.running = False  # inside a step

    def run(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Runs a step of this optimizer, without the hooks of the script: see `session.step_hooks`."""
        self._install_random_state()
        before = self._clock()
        self.running = True
        try:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                with _without_hooks(optimizer):
                    step()
            else:
                step()
        finally:
            self.running = False
        self.seconds += self._clock() - before


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
