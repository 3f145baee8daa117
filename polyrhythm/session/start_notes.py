"""What a run with several workers says about a model and its optimizers before training begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from polyrhythm.core.strategy import Strategy
from polyrhythm.session.batch_norm import unchosen_note
from polyrhythm.session.batch_norm.policies import tracking


def start_notes(
    strategy: Strategy, model: nn.Module, optimizers: Sequence[Optimizer], norms_chosen: bool
) -> Iterator[str]:
    """One line each. `norms_chosen`: the user has chosen a policy for BatchNorm."""
    if tracking(model) and not norms_chosen:
        yield unchosen_note(strategy)
    groups = [group for each in optimizers for group in each.param_groups]
    if strategy.traits.stale_momentum and any(group.get("momentum") for group in groups):
        yield (
            f"under {strategy} one momentum buffer on the server takes in the stale gradients of all "
            "workers: at a learning rate that suits one worker training may fail; use dana-slim, which has a "
            "momentum for each worker, or momentum=0, or a lower rate"
        )
    traits = strategy.traits
    averages = traits.lockstep and traits.sync_period == 1 and not traits.parameters_held_by_peers
    for name, parameter in model.named_parameters() if averages else ():
        if parameter._backward_hooks:
            yield (
                f"{name} has a hook (register_hook), which sees the gradient of one worker before it is "
                "averaged: to scale or mask it is the same as alone; to clip it, use clip_grad_value_() "
                "after backward()"
            )
            return
