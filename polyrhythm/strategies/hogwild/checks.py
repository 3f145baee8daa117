"""Which models and optimizers HogWild! refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from polyrhythm.core.strategy import Strategy
    from polyrhythm.model.replica import Replica


def check_devices(strategy: Strategy, groups: Sequence[dict[str, Any]]) -> None:
    """Refuses parameters that are not in the memory of the host."""
    for device in {each.device.type for group in groups for each in group["params"]} - {"cpu"}:
        raise UsageError(
            f"{strategy} works on memory that processes share, and the model is on {device}: leave it on the "
            "CPU, or use another strategy, such as async"
        )


def check_modules(strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses optimizers that would turn a sparse gradient into an update of all rows, or cannot take one."""
    import torch

    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    weights = {
        id(module.weight): f"{name or 'the model'} ({type(module).__name__} with sparse=True)"
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad
    }
    _refuse(strategy, optimizer, weights)


class GradientCheck:
    """The same for sparse gradients that no module announces, such as those of `F.embedding(sparse=True)`.

    They are refused before the first step that would use them.
    """

    def __init__(self, strategy: Strategy, replica: Replica) -> None:
        self.strategy, self.replica = strategy, replica
        self._accepted: set[int] = set()  # ids of parameters

    def __call__(self) -> None:
        layout = self.replica.layout
        found = {
            id(parameter): piece.name
            for parameter, piece in zip(layout.parameters, layout.pieces, strict=True)
            if parameter.grad is not None and parameter.grad.is_sparse and id(parameter) not in self._accepted
        }
        if found:
            _refuse(self.strategy, self.replica.optimizer, found)
            self._accepted.update(found)


def _refuse(strategy: Strategy, optimizer: Optimizer, sparse: Mapping[int, str]) -> None:
    """Raises UsageError if the optimizer of one of these parameters, by their ids, is not for sparse ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            wrong = _densifies(optimizer, group)
            if id(parameter) in sparse and wrong:
                raise UsageError(
                    f"{strategy}: {sparse[id(parameter)]} has sparse gradients, and {wrong} would turn "
                    "each into an update of all rows: use SGD without momentum and weight decay, Adagrad or "
                    "SparseAdam for it, or leave out sparse=True"
                )


def _densifies(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """The optimizer and its settings that do not fit sparse gradients; empty if they fit."""
    import torch

    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        return ""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        settings = [f"{key}={group[key]:g}" for key in ("momentum", "weight_decay") if group.get(key)]
        return f"{name} with {' and '.join(settings)}" if settings else ""
    # An optimizer that is not of torch is its author's responsibility.
    return name if type(optimizer).__module__.startswith("torch.optim") else ""
