"""StageLink: the messages between the workers that hold one model, inside its forward and backward passes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import MicroBatch
from polyrhythm.core.peer import Peer
from polyrhythm.core.place_node import receive_from
from polyrhythm.parallel.grid import Grid
from polyrhythm.parallel.orders import Kind
from polyrhythm.parallel.stage_messages import Computation
from polyrhythm.session.meter import DIGITS, Meter
from polyrhythm.session.model_context import ModelContext
from polyrhythm.session.random_states import OwnNumbers

SAMPLED = 64  # numbers of each input that the workers of a model compare
_GATHERED = "gathered"  # the kind of messages with what all places need of each other
FORWARD = 1 / 3  # of the duration of a step: the backward pass takes twice as long
SHARES: dict[Kind, float] = {
    "forward": FORWARD,
    "backward": 1 - FORWARD,
    "input": FORWARD,
    "weights": 1 - 2 * FORWARD,
}


class StageLink:
    """Connects the places of one model. `shares`: of the computation of the model that each segment has.

    `number`: that of the model, if the session has several.
    """

    def __init__(
        self, context: ModelContext, grid: Grid, shares: Sequence[float], random: OwnNumbers, number: int = 0
    ) -> None:
        self._context, self._node = context, context.worker_node
        self._places: Sequence[Peer] = context.model
        self._place, self._shares = context.place, shares
        self._section, self._column = grid.section(context.place), grid.column(context.place)
        row = [self._places[each] for each in grid.row(context.place)]
        self._row_group = self._node.everyone.split(row) if len(row) > 1 else None
        # All workers of a model draw the same numbers in the script, and their own in dropout.
        self.random = random
        self._suffix = f" of model {number}" if number else ""
        self.meter: Meter | None = None
        self.fingerprint = ""  # of the present batch

    def send(self, to: int, kind: str, values: Mapping[str, Any]) -> None:
        tensors = {name: each.detach() for name, each in values.items() if isinstance(each, Tensor)}
        if complex_ := [name for name, each in tensors.items() if each.is_complex()]:
            raise UsageError(
                f"the complex value {complex_[0]} would pass from one worker to another, which is not "
                "supported: cut the model elsewhere, as by split_at of a pipeline"
            )
        self._node.send(
            self._places[to],
            self._kind(kind, self._place),
            *(each.contiguous().view(-1) for each in tensors.values()),
            shapes={name: list(each.shape) for name, each in tensors.items()},
            plain={name: each for name, each in values.items() if name not in tensors},
            trained=[
                name for name, each in values.items() if isinstance(each, Tensor) and each.requires_grad
            ],
            batch=self.fingerprint,
        )

    def send_all(self, kind: str, values: Mapping[str, Any]) -> None:
        for place in self._column:
            if place != self._place:
                self.send(place, kind, values)

    def receive(self, sender: int, kind: str) -> dict[str, Any]:
        peer, whole, found = self._places[sender], self._kind(kind, sender), []
        self._wait(lambda: found.append(receive_from(self._node, peer, whole)))
        [message] = found
        if message["batch"] != self.fingerprint:
            raise UsageError(
                f"{self._node.me} and {peer} hold one model, but call it with different batches: all workers "
                "of a model must get the same, as from a loader of session.prepare(); to divide "
                "data by hand, use session.rank and session.workers, which count models"
            )
        shapes: dict[str, list[int]] = message["shapes"]
        tensors = zip(shapes.items(), message.tensors, strict=True)
        found_tensors = {name: flat.view(shape) for (name, shape), flat in tensors}
        for name in message["trained"]:
            found_tensors[name].requires_grad_()
        return {**message["plain"], **found_tensors}

    def _kind(self, kind: str, sender: int) -> str:
        return f"{kind} of place {sender}{self._suffix}"

    def sum(self, *tensors: Tensor) -> None:
        """Replaces tensors by the sums over the places of this column, the same on all."""
        for tensor, parts in zip(tensors, self._gather(self._column, *tensors), strict=True):
            tensor.copy_(torch.stack(parts).sum(0))

    def _gather(self, places: Sequence[int], *tensors: Tensor) -> list[list[Tensor]]:
        """For each of these tensors, those of some places in order. By messages: they are small."""
        mine: dict[str, Any] = {str(index): each for index, each in enumerate(tensors)}
        for place in places:
            if place != self._place:
                self.send(place, _GATHERED, mine)
        found = [mine if place == self._place else self.receive(place, _GATHERED) for place in places]
        return [[each[name].to(tensor) for each in found] for name, tensor in mine.items()]

    def sum_parts(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor over the workers that compute divided layers together, in place."""
        group = self._row_group
        assert group is not None
        self._wait(lambda: group.all_reduce(tensor.view(-1)))

    def run_backward(self, differentiate: Callable[[], None]) -> None:
        self._context.run_backward(differentiate) if self._row_group is not None else differentiate()

    def norm(self, part: Tensor, kind: float) -> Tensor:
        """The norm of the whole model from the norms of its parts. Every parameter is in one part."""
        [found] = self._gather(range(len(self._places)), part.detach().double().cpu())
        parts = torch.stack(found)
        if math.isinf(kind):
            return (parts.max() if kind > 0 else parts.min()).to(part)
        power = kind or 1.0  # the norm of kind 0 counts
        return ((parts**power).sum() ** (1 / power)).to(part)

    @contextmanager
    def compute(self, what: Computation, micro_batches: int) -> Iterator[None]:
        began = self._node.now()
        with self.random:
            yield
        seconds = self._context.step_time() * self._shares[what.segment] * SHARES[what.kind] / micro_batches
        if seconds:
            self._wait(lambda: self._context.advance_time(seconds), computes=True)
        self._log(what, began)

    @contextmanager
    def weights(self, segment: int, micro_batch: int) -> Iterator[None]:
        began = self._node.now()
        yield
        if self._node.now() > began:
            self._log(Computation("weights", segment, micro_batch), began)

    def _log(self, what: Computation, began: float) -> None:
        took, began = round(self._node.now() - began, DIGITS), round(began, DIGITS)
        self._node.log(MicroBatch(what.kind, self._section, began, took, what.segment, what.micro_batch))

    def _wait(self, function: Callable[[], object], computes: bool = False) -> None:
        """Blocks inside a pass. In simulation other nodes run meanwhile, on this thread."""

        def wait() -> None:
            before = self._node.now()
            with torch.autocast("cpu", enabled=False), torch.no_grad(), self._context.blocking():
                function()
            if self.meter is not None and not computes:
                self.meter.waited(self._node.now() - before)

        self._context.wait_in_pass(wait)


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """What the workers of a model compare of a batch: its shapes, and a few of its numbers."""
    found: list[Any] = []
    for each in inputs.values():
        if isinstance(each, Tensor):
            count = min(each.numel(), SAMPLED)
            places = torch.arange(count, device=each.device) * (each.numel() - 1) // max(count - 1, 1)
            some = each.detach().reshape(-1)[places]
            found += [list(each.shape), some.cpu().contiguous().view(torch.uint8).tolist()]
        else:
            found.append(repr(each)[:80])
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
