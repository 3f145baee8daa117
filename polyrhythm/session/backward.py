"""BackwardPasses: lets the session act before and after each backward pass of the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyrhythm.session.context import WorldContext, session, without_session
from polyrhythm.session.step import StepDriver

_backward = torch.autograd.backward


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


def watch_backward() -> None:
    """Replaces `torch.autograd.backward`, so that the session knows when a backward pass ends.

    `Tensor.backward` looks this function up at each call. A hook inside the autograd engine would not do: a
    strategy may block here, and in simulation hundreds of workers share the engine of one thread.
    """
    if torch.autograd.backward is _backward:
        torch.autograd.backward = _backward_with_session


def _backward_with_session(*args: Any, **kwargs: Any) -> None:
    mine = session.get()
    if mine is None and (check := without_session.get()) is not None:
        check()
        without_session.set(None)  # once is enough
    if mine is None or mine.backward_passes is None:
        return _backward(*args, **kwargs)
    mine.backward_passes.run(lambda: _backward(*args, **kwargs))
