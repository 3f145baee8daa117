"""WriteCheck: finds parameters that the script changes where the next pull would overwrite the change.

Under servers a worker's parameters are copies. `p.data.clamp_(...)` after a step changes only the copy, and
leaves no trace in PyTorch. So checksums are compared at the first steps, and then every so often.
"""

from __future__ import annotations

import torch

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import Worker
from polyrhythm.model.replica import Replica

FIRST, EVERY = 3, 100  # steps
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


class WriteCheck:
    """Compares the parameters before a step with those after the previous one."""

    def __init__(self, worker: Worker, replica: Replica) -> None:
        self._worker, self._replica = worker, replica
        self._sums: list[int] = []  # none: not to be compared
        self.after_step()

    def before_step(self) -> None:
        """Raises UsageError if the script has changed parameters since `after_step`."""
        if not self._sums:
            return
        layout = self._replica.layout
        for piece, before, now in zip(layout.pieces, self._sums, self._checksums(), strict=True):
            if now != before:
                raise UsageError(
                    f"the script changed {piece.name} outside optimizer.step(), and under "
                    f"{self._worker.strategy} servers overwrite that: change it in step() of an optimizer of "
                    "your own, which servers call, or use a strategy without servers, such as allreduce"
                )

    def after_step(self) -> None:
        steps = self._replica.steps
        self._sums = self._checksums() if steps <= FIRST or steps % EVERY == 0 else []

    def forget(self) -> None:
        """Called when a saved state has been loaded."""
        self._sums = []

    def _checksums(self) -> list[int]:
        layout, vectors = self._replica.layout, self._replica.parameters
        flat = [vectors[piece.part][piece.start : piece.stop] for piece in layout.pieces]
        return [int(each.view(_INTEGERS[each.itemsize]).sum()) for each in flat]


def write_check(worker: Worker, replica: Replica) -> WriteCheck | None:
    """The check of one part; None where the worker's own parameters are what is trained."""
    strategy = worker.strategy
    pulls = strategy.traits.uses_servers and strategy.exchanges == "gradients"
    return WriteCheck(worker, replica) if pulls else None
