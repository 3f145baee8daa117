"""Lets `torch.amp.GradScaler` train where it is right, and refuses it elsewhere.

A scaler skips the step of a worker whose gradient has overflowed. Under `allreduce` all workers have the same
mean gradient, so all skip the same steps and keep the same scale. Elsewhere each would decide for itself, and
a codec would keep a part of one gradient at the scale of another.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy

_step = torch.amp.GradScaler.step
_refusals: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()


def watch_scaler(optimizer: Optimizer, strategy: Strategy) -> None:
    """From here on `scaler.step(optimizer)` means what it means alone, or is an error."""
    if strategy.traits.closures and strategy.codec is None:  # all workers take the same decisions
        # A fused optimizer would get infinite gradients, in order to skip them by itself.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return
    _refusals[optimizer] = (
        f"GradScaler does not work under {strategy}, where workers would skip different steps: train in "
        "bfloat16, which needs no scaler, or use allreduce without a codec"
    )
    torch.amp.GradScaler.step = _checked_step  # type: ignore[method-assign, assignment]


def _checked_step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    if scaler.is_enabled() and (refusal := _refusals.get(optimizer)):
        raise UsageError(refusal)
    return _step(scaler, optimizer, *args, **kwargs)
