"""ModelSplit: how one model is divided over several workers, as a value.

`allreduce@pipeline:2` trains copies of a model whose stages are on two workers each. The workers that hold
one model together are to the strategy, on the data axis, one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyrhythm.core.grammar import Configured
from polyrhythm.core.mesh import Axis


@dataclass(frozen=True)
class ModelSplit(Configured):
    """How one model is divided over several workers."""

    kind = "split"
    registry: ClassVar[dict[str, type[ModelSplit]]] = {}
    axis: ClassVar[Axis]
    advice: ClassVar[str] = "use fewer workers"  # if a worker would have nothing to train

    @property
    def size(self) -> int:
        """How many workers hold one model on this axis."""
        raise NotImplementedError(f"{type(self).__name__} has no size")

    @property
    def micro_batches(self) -> int:
        """The pieces that a batch is cut into."""
        return 1

    @property
    def needs_loss(self) -> bool:
        """True if the session must know the loss: forward and backward passes take turns."""
        return False

    @property
    def asynchronous(self) -> bool:
        """True if gradients are those of earlier batches, at earlier parameters."""
        return False

    @property
    def recompute(self) -> bool:
        """True if activations are computed again in the backward pass."""
        return False

    @property
    def spill(self) -> bool:
        """True if parameters are kept in a file while the script builds the model."""
        return False
