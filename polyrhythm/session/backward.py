"""BackwardPasses: lets the session act before and after each backward pass of the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from polyrhythm.session.context import WorldContext
from polyrhythm.session.step import StepDriver


class BackwardPasses:
    """Runs backward passes, and hands the gradients that they leave in each part to its driver."""

    def __init__(self, context: WorldContext, drivers: Sequence[StepDriver], waits: bool) -> None:
        self._context, self._drivers = context, drivers
        self._waits = waits  # workers wait for each other inside a pass, as with batch_norm=sync

    def run(self, backward: Callable[[], None]) -> None:
        for driver in self._drivers:
            driver.before_backward()
        try:
            self._context.run_backward(backward) if self._waits else backward()
        except BaseException:
            for driver in self._drivers:
                driver.backward_failed()
            raise
        # One pass may reach several parts: a loss of a GAN's generator leaves gradients in its discriminator.
        reached = [driver for driver in self._drivers if driver.end_backward()]
        if reached:
            with torch.no_grad(), self._context.blocking():
                seconds = self._context.compute_time()
                for driver in reached:  # in the same order on all workers
                    driver.complete(seconds)
                    seconds = 0.0
