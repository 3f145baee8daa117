r"""Asynchronous pipelines with weight stashing: PipeDream and PipeDream-2BW.

The pipeline is not drained between batches. A stage starts the forward pass of a batch before the gradients
of earlier ones have come back, keeps the parameters of that forward pass, and uses them in the backward pass:
each gradient is a true one, at parameters that are a few updates old.

Under PipeDream stage s of K (from 0) takes, for batch t, its version t - (K - s - 1), and updates after each
batch; under 2BW all stages take version t - 1, and a batch is cut into micro-batches. Neither is below the
version at which the pipeline was filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from polyrhythm.parallel.orders import Action
from polyrhythm.parallel.schedules import BatchPass


class InFlight:
    """The micro-batches that have passed forward through a stage, and not backward, the oldest first.

    `ahead`: how many forward passes the stage is ahead of its backward passes.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._passes: deque[tuple[BatchPass, int]] = deque()

    def forward(self, batch: BatchPass) -> None:
        """Runs all forward passes of a batch, and the backward passes that are due in between."""
        batch.begin()
        for number in range(batch.pieces):
            batch.run(Action("forward", number))
            self._passes.append((batch, number))
            if len(self._passes) > self._ahead:
                self._backward()

    def backward(self, batch: BatchPass) -> None:
        """Runs the remaining backward passes, up to those of a batch."""
        while not batch.complete:
            self._backward()

    def _backward(self) -> None:
        batch, number = self._passes.popleft()
        batch.run(Action("backward", number))

    def clear(self) -> None:
        """Drops all of them."""
        self._passes.clear()


class GivenPass:
    """A batch in the pipeline."""

    def __init__(self, number: int, batch: BatchPass, version: int) -> None:
        self.number, self.batch = number, batch
        self.version = version  # of the parameters here in its forward pass


class AsynchronousPipeline:
    """The batches in one stage of an asynchronous pipeline.

    `delay`: how many batches the gradients here come later than those of the newest batch.
    `heard`: the same for the losses that all stages know.
    """

    def __init__(self, stage: int, stages: int, delay: int, heard: int) -> None:
        self._last, self._delay, self._heard = stages - 1, delay, heard
        self._flight = InFlight(stages - 1 - stage)
        self._waiting: deque[GivenPass] = deque()  # batches whose gradients were not taken
        self._losses: deque[GivenPass] = deque()  # batches whose loss is not known here
        self._count = self._filled = 0  # batches so far, and when the pipeline was empty
        self._loss: Tensor | None = None
        self.version = 0  # updates so far

    @property
    def empty(self) -> bool:
        return not self._waiting

    def give(self, batch: BatchPass) -> tuple[Tensor, GivenPass | None]:
        """Runs the forward passes of a batch, and the backward passes that are due.

        Returns a loss, which is the same on all stages: that of `heard` batches before, or of the first since
        the pipeline was empty. And the batch whose gradients are complete, if there is one.
        """
        number = self._count
        self._count += 1
        self._waiting.append(GivenPass(number, batch, self.version))
        self._losses.append(self._waiting[-1])
        self._flight.forward(batch)
        ready = self._take() if self._waiting[0].number <= number - self._delay else None
        while self._losses and self._losses[0].number <= max(self._filled, number - self._heard):
            self._loss = self._losses.popleft().batch.loss(self._last)
        assert self._loss is not None
        return self._loss, ready

    def _take(self) -> GivenPass:
        self._flight.backward(self._waiting[0].batch)
        return self._waiting.popleft()

    def drain(self) -> Iterator[GivenPass]:
        """The batches in the pipeline, each when its gradients are complete; then the pipeline is empty."""
        while self._waiting:
            yield self._take()
        while self._losses:
            self._losses.popleft().batch.loss(self._last)
        self._filled = self._count

    def drop(self) -> None:
        """Drops the batches in the pipeline."""
        self._flight.clear()
        self._waiting.clear()
        self._losses.clear()
        self._filled = self._count
