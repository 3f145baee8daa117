"""A borrowed batch counts for nothing: it does not move BatchNorm's running statistics either.

Who got nothing of the last round takes the step with the others on examples that are not its own (see
`data.sharing`). Their gradient is scaled to nothing, and their forward pass has copies of the statistics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.model.replica import Replica
from polyrhythm.session.batch_norm.hooks import Hook
from polyrhythm.session.batch_norm.policies import NAMES, tracking


def leave_no_trace(replica: Replica) -> None:
    """From now on batches that do not count leave the statistics of this replica's model as they are."""
    for module in tracking(replica.model).values():
        _Stage(module, replica)


class _Stage:
    """Lets copies stand in for one module's statistics while a batch that does not count passes through it.

    They are not put back in place, for autograd keeps what the forward pass has used.
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
