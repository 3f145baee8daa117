"""Lets `torch.amp.GradScaler` train where it is right, and refuses it elsewhere.

A scaler skips the step of a worker whose gradient has overflowed. Under `allreduce` all workers have the same
mean gradient, so all skip the same steps and keep the same scale. Elsewhere each would decide for itself, and
a codec would keep a part of one gradient at the scale of another.
"""

from __future__ import annotations

from torch.optim import Optimizer

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy


def keep_from_scaler(optimizer: Optimizer) -> None:
    """A fused optimizer would get infinite gradients, in order to skip them by itself."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def check_scaler(strategy: Strategy) -> None:
    """Raises UsageError unless `scaler.step(optimizer)` means what it means alone."""
    traits = strategy.traits
    if not (traits.closures and strategy.codec is None) or traits.model_axes:  # workers decide differently
        raise UsageError(
            f"GradScaler does not work under {strategy}, where workers would skip different steps: train in "
            "bfloat16, which needs no scaler, or use allreduce without a codec"
        )
