r"""Nesterov look-ahead for asynchronous pipelines: late gradients of an optimizer that looks ahead.

With momentum $\gamma$ a stage steps by

$$w(t+1) = w(t) + d(t) - \eta (1-\gamma) g(t), \quad d(t) = \gamma (w(t) - w(t-1)),$$

where the gradient $g(t)$ is that of stashed parameters $w + d$ of a few updates before: they have looked
ahead by $d$, along which the parameters have moved since, and a late gradient counts for little beside the
momentum (Ajanthan et al. 2025, https://arxiv.org/abs/2505.01099). PyTorch keeps $w + d$ as the parameters,
so the rule is its SGD with `nesterov=True` and gradients times $1-\gamma$. NAdam has the factor in its own
rule, and is what the authors use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError


def check_lookahead(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError if an optimizer does not look ahead."""
    if isinstance(optimizer, torch.optim.NAdam):
        return
    if not isinstance(optimizer, torch.optim.SGD) or not all(
        group["nesterov"] for group in optimizer.param_groups
    ):
        raise UsageError(
            "lookahead=yes needs an optimizer with Nesterov momentum: use NAdam(..., betas=(0.99, 0.999)) or "
            "SGD(..., momentum=0.9, nesterov=True)"
        )


def discounted(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Late gradients of these parameters, as the optimizer is to apply them."""
    if isinstance(optimizer, torch.optim.NAdam):
        return list(gradients)
    shares = {id(each): 1 - group["momentum"] for group in optimizer.param_groups for each in group["params"]}
    return [
        None if gradient is None else gradient * shares.get(id(each), 1.0)
        for each, gradient in zip(parameters, gradients, strict=True)
    ]
