"""Schedules in which the session knows the loss: forward and backward passes of micro-batches take turns.

GPipe runs all forward passes of a batch before its backward passes, so a stage keeps the activations of all
M micro-batches. Under 1F1B stage s of K is K - s - 1 forward passes ahead, and then runs a backward pass
after each. It keeps K - s at most, and is idle for as long as under GPipe. `parallel.pipedream` goes on
across batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from polyrhythm.parallel.loss import LOSS
from polyrhythm.parallel.micro_batches import MicroBatchOf
from polyrhythm.parallel.pipeline import Pass, StageRunner
from polyrhythm.parallel.place_plan import PlacePlan, SegmentPlan


class BatchPass(Pass):
    """One batch whose loss the last stage computes: the passes of its micro-batches through one stage.

    `stashed`: the forward pass copies the parameters, and the backward pass uses the copies, though a step
    may come in between (weight stashing).
    """

    def __init__(
        self, runner: StageRunner, plan: PlacePlan, pieces: list[MicroBatchOf], stashed: bool = False
    ) -> None:
        super().__init__(runner, plan, next(runner.passes), pieces, (), [], runner.trained)
        self._fingerprint = runner.link.fingerprint
        self._rows = sum(each.rows for each in pieces)
        self._stashed = stashed
        self._used: Sequence[Tensor] = self._trained  # with the values of the forward pass
        self._copies: Mapping[int, Tensor] = {}  # of the parameters, by id
        self._computed: Tensor | None = None  # on the last stage: the loss of the micro-batches so far
        self.left = len(pieces)  # micro-batches whose backward pass has not run
        self.gradients: list[Tensor | None] = []  # of the parameters here, when none is left

    def begin(self) -> None:
        """Fetches the parameters that this stage borrows, and copies all if they are stashed."""
        self._here()
        self.exchange_tied()
        if self._stashed:
            self._used = [each.detach().clone().requires_grad_() for each in self._trained]
            self._copies = {id(each): copy for each, copy in zip(self._trained, self._used, strict=True)}

    def forward_next(self, number: int) -> None:
        """Runs the forward pass of one micro-batch."""
        self._here()
        known = self.forward_one(number, keep=True)
        if LOSS in known:
            part = known[LOSS].detach() * self._weight(number)
            self._computed = part if self._computed is None else self._computed + part

    def backward_next(self, number: int) -> None:
        """Runs the backward pass of one micro-batch; after the last one the gradients are known."""
        self._here()
        arriving = {}
        if self._computed is not None:
            arriving[LOSS] = [torch.full_like(self._computed, self._weight(number))]
        self.backward_one(number, arriving)
        self.left -= 1
        if not self.left:
            self.gradients = self.sums()
            self._used, self._copies = (), {}

    def send_loss(self) -> None:
        """On the last stage: sends the loss of the batch to all others."""
        if self._computed is not None:
            self._here()
            self.runner.link.send_all(self.kind(LOSS), {LOSS: self._computed})

    def loss(self, last: int) -> Tensor:
        """The loss of the batch, which the last stage has sent; called once."""
        if self._computed is not None:
            return self._computed
        self._here()
        found: Tensor = self.runner.link.receive(last, self.kind(LOSS))[LOSS]
        return found

    def _here(self) -> None:
        """The messages that follow are about this batch."""
        self.runner.link.fingerprint = self._fingerprint

    def _weight(self, number: int) -> float:
        """The share of a micro-batch in the loss of the batch."""
        return self._sizes[number] / self._rows

    @property
    def differentiated(self) -> Sequence[Tensor]:
        return self._used

    def function_of(self, segment: SegmentPlan) -> Callable[..., Sequence[Any]]:
        if not self._stashed:
            return segment.run
        module: Any = segment.run
        named = module.named_parameters(remove_duplicate=False)
        copies = {name: self._copies[id(each)] for name, each in named if id(each) in self._copies}
        return lambda *given: functional_call(module, copies, given)


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
        for number in range(batch.left):
            batch.forward_next(number)
            self._passes.append((batch, number))
            if len(self._passes) > self._ahead:
                self._backward()
        batch.send_loss()

    def backward(self, batch: BatchPass) -> None:
        """Runs the remaining backward passes, up to those of a batch."""
        while batch.left:
            self._backward()

    def _backward(self) -> None:
        batch, number = self._passes.popleft()
        batch.backward_next(number)

    def clear(self) -> None:
        """Drops all of them."""
        self._passes.clear()
