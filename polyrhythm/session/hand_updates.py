"""HandUpdates: notices scripts that update the parameters themselves and never call `optimizer.step()`.

Most strategies exchange in `step()`. Without it each worker trains alone, or what it trains is in copies of
the parameters that the servers hold. Before the first step some methods change parameters once or twice, such
as SAM, so only several changes in a row are an error.
"""

from __future__ import annotations

from polyrhythm.core.errors import UsageError
from polyrhythm.core.worker import OnGradient, Worker
from polyrhythm.model.replica import Replica
from polyrhythm.session.loading import checksum

LIMIT = 4  # backward passes before the first step that find other parameters than the one before


class HandUpdates:
    """Looks at one parameter before each backward pass until the first step."""

    def __init__(self, worker: Worker, replica: Replica) -> None:
        self._strategy, self._replica = worker.strategy, replica
        # An own update is right where workers hold the parameters and average gradients in backward().
        gradients = all(part.exchanges == "gradients" for part in worker.strategy.parts)
        traits = worker.strategy.traits
        held = not traits.uses_servers
        # Where all workers step on the same memory, others change parameters at any time.
        self._right = traits.steps_in_place or (isinstance(worker, OnGradient) and gradients and held)
        trained = [each for each in replica.layout.parameters if each.requires_grad and each.numel()]
        self._looked_at = min(trained, key=lambda each: each.numel(), default=None)
        self._before: int | None = None
        self._changes = 0

    def check(self) -> None:
        """Called before a backward pass."""
        if self._right or self._replica.steps or self._looked_at is None:
            return
        before, self._before = self._before, checksum(self._looked_at)
        self._changes += before not in (None, self._before)
        if self._changes == LIMIT:
            raise UsageError(
                "the script changes parameters itself and never calls optimizer.step(), in which workers "
                f"exchange under {self._strategy}: let the prepared optimizer make the update, or use "
                "allreduce, which averages gradients in backward()"
            )
