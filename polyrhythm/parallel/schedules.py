"""BatchPass: one batch whose loss the session knows, so that forward and backward passes can take turns.

`parallel.orders` says in which order a place runs them for one batch; `parallel.pipedream` goes on across
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from polyrhythm.parallel.loss import LOSS
from polyrhythm.parallel.micro_batches import MicroBatchOf, Values
from polyrhythm.parallel.orders import Action
from polyrhythm.parallel.pipeline import Pass, StageRunner
from polyrhythm.parallel.place_plan import PlacePlan, SegmentPlan
from polyrhythm.parallel.stage_messages import Computation
from polyrhythm.parallel.weight_gradients import PutOff


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
        self._computed: Tensor | None = None  # on the last place: the loss of the micro-batches so far
        self._known: dict[int, Values] = {}  # by micro-batch: what a later chunk may need
        self._arriving: dict[int, dict[str, list[Tensor]]] = {}  # and the gradients for an earlier chunk
        self._later: dict[tuple[int, int], PutOff] = {}  # by micro-batch and segment, put off
        self.pieces = len(pieces)
        self._left = len(pieces) * len(plan.segments)  # passes that complete the gradients of a chunk
        self.gradients: list[Tensor | None] = []  # of the parameters here, when none is left

    def begin(self) -> None:
        """Fetches the parameters that this stage borrows, and copies all if they are stashed."""
        self._here()
        self.exchange_tied()
        if self._stashed:
            self._used = [each.detach().clone().requires_grad_() for each in self._trained]
            self._copies = {id(each): copy for each, copy in zip(self._trained, self._used, strict=True)}

    def run(self, action: Action) -> None:
        """Runs a pass of one micro-batch through a chunk; after the last one the gradients are known."""
        self._here()
        segment = self._plan.segments[action.chunk]
        if action.kind == "forward":
            self._forward(action.micro_batch, segment)
        elif action.kind == "weights":
            self._weights(action.micro_batch, segment)
        else:
            self._backward(action.micro_batch, segment, apart=action.kind == "input")
        self._left -= action.kind in ("backward", "weights")
        if self.complete:
            self.gradients = self.sums()
            self._used, self._copies = (), {}

    @property
    def complete(self) -> bool:
        """True if all passes of the batch have run here."""
        return not self._left

    def _forward(self, number: int, segment: SegmentPlan) -> None:
        known = self._known.pop(number, None) or dict(self._micro_batches[number].values)
        self.forward_segment(number, segment, known, keep=True)
        if segment is not self._plan.segments[-1]:
            self._known[number] = known
        if LOSS in segment.outputs:
            part = known[LOSS].detach() * self._weight(number)
            self._computed = part if self._computed is None else self._computed + part
            if number == self.pieces - 1:
                self.runner.link.send_all(self.kind(LOSS), {LOSS: self._computed})

    def _backward(self, number: int, segment: SegmentPlan, apart: bool) -> None:
        arriving = self._arriving.pop(number, {})
        if LOSS in segment.outputs:
            assert self._computed is not None
            arriving[LOSS] = [torch.full_like(self._computed, self._weight(number))]
        self.backward_segment(number, segment, arriving, apart)
        if segment is not self._plan.segments[0]:
            self._arriving[number] = arriving
        if apart:
            self._later[number, segment.number] = self.runner.later.take()

    def _weights(self, number: int, segment: SegmentPlan) -> None:
        """Computes the weight gradients of one micro-batch that were put off."""
        if later := self._later.pop((number, segment.number)):
            with self.runner.link.compute(Computation("weights", segment.number, number), self.pieces):
                later.add_to(self._totals, self.differentiated)

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
