"""Keeps borrowed batches out of BatchNorm's running statistics.

A worker without examples in the last round of an epoch takes the step on borrowed ones (see
`session.sharing`). Their gradient is scaled by 0, and their forward pass updates copies of the statistics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.model.hooks import Hook
from polyrhythm.model.replica import Replica
from polyrhythm.session.batch_norm.policies import NAMES, tracking


def protect_statistics(replica: Replica) -> None:
    """From now on borrowed batches do not change the statistics of this replica's model."""
    for module in tracking(replica.model).values():
        _StatisticsSwap(module, replica)


class _StatisticsSwap:
    """Replaces one module's statistics by copies while a borrowed batch passes through it.

    Restoring the values in place would not do: autograd may have saved the tensors of the forward pass.
    """

    def __init__(self, module: _BatchNorm, replica: Replica) -> None:
        self._buffers, self._replica = module._buffers, replica
        self._own: dict[str, Tensor | None] = {}
        module.register_forward_pre_hook(Hook(self._enter))
        module.register_forward_hook(Hook(self._leave), always_call=True)

    def _enter(self, *_: Any) -> None:
        if not self._replica.gradients.counts:
            self._own = {name: self._buffers[name] for name in NAMES}
            self._buffers.update({name: own.clone() for name, own in self._own.items() if own is not None})

    def _leave(self, *_: Any) -> None:
        self._buffers.update(self._own)
        self._own = {}
