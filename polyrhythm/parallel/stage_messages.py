"""StageMessages: what a place of a divided model asks of the world inside a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.parallel.micro_batches import Values
from polyrhythm.parallel.orders import Kind


@dataclass
class Computation:
    """What a place computes, which may be known only when it is done."""

    kind: Kind
    segment: int
    micro_batch: int


class StageMessages(Protocol):
    """The messages between the places of one model."""

    fingerprint: str  # of the batch that they are about

    def send(self, to: int, kind: str, values: Mapping[str, Any]) -> None:
        """Sends values to another place. They may be changed at once."""

    def send_all(self, kind: str, values: Mapping[str, Any]) -> None:
        """Sends values to all other places of this column."""

    def receive(self, sender: int, kind: str) -> Values:
        """Waits for the values that another place sends under this kind.

        Those that require a gradient there require one here.
        """

    def sum(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the places of this column, in place."""

    def run_backward(self, differentiate: Callable[[], None]) -> None:
        """Lets autograd work; workers that compute divided layers together wait for each other meanwhile."""

    def compute(self, what: Computation, micro_batches: int) -> AbstractContextManager[None]:
        """A context for the computation of one of so many micro-batches in a segment."""

    def weights(self, segment: int, micro_batch: int) -> AbstractContextManager[None]:
        """A context for weight gradients, computed when the gradient of the input is on its way."""
