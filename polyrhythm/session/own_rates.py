"""OwnRates: notices learning rates that the script sets itself in each step, where workers differ in steps.

Outside lockstep a fast worker takes more steps than a slow one. A rate that each computes from its own count
of steps is then another one on each worker. What the script counts cannot be seen. It can be seen that it
sets the rate twice within an epoch, and that no scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

BY_HAND = (
    "the script sets the learning rate itself between batches: if it counts its own steps, workers of "
    "different speed have different rates, and none has that of a single process; use LambdaLR(optimizer, f) "
    "and pass it to session.prepare(), which counts the batches of all workers"
)


class OwnRates:
    """The learning rates of all optimizers at the last step, and the epoch in which the script set them."""

    def __init__(self, epochs: Callable[[], int], note: Callable[[str], None]) -> None:
        self._epochs, self._note = epochs, note
        self._known: Sequence[object] | None = None
        self._scheduled = True  # a scheduler has stepped since the last look; the first rates are no change
        self._changed_in = -1

    def scheduled(self) -> None:
        """A scheduler sets the rates."""
        self._scheduled = True

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Called when a step begins."""
        rates = [_fingerprint(group.get("lr")) for each in optimizers for group in each.param_groups]
        changed = rates != self._known and not self._scheduled
        self._known, self._scheduled = rates, False
        if changed:
            before, self._changed_in = self._changed_in, self._epochs()
            if before == self._changed_in:
                self._note(BY_HAND)


def _fingerprint(rate: object) -> object:
    """A value that changes with the rate. Tensors are not read, because a device would have to wait."""
    return (id(rate), rate._version) if isinstance(rate, Tensor) else rate
