"""ConsensusModel: copies of the models, with the parameters that the workers agree on."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.model.replica import Replica


class ConsensusModel:
    """Copies some models. Their trained parameters are views into the consensus vectors of all replicas.

    A copy and its memory are the script's: nothing changes them later, and they are freed when the script
    drops them.
    """

    def __init__(self, models: Sequence[nn.Module], replicas: Sequence[Replica] = ()) -> None:
        self._models, self._replicas = list(models), list(replicas)
        self._copies: WeakSet[nn.Module] = WeakSet()

    def copy(self, *vectors: Sequence[Tensor], lasting: bool = True) -> list[nn.Module]:
        """New copies of the models, with these parameters of each replica; not `lasting`: in their memory."""
        if len(self._copies) > 2 * len(self._models):
            gc.collect()  # models that refer to themselves are not freed at once
        copies: dict[int, Any] = _activations(self._models)
        for replica, mine in zip(self._replicas, vectors, strict=True):
            held = replica.take_consensus(mine) if lasting else tuple(mine)
            for parameter, piece in zip(replica.layout.parameters, replica.layout.pieces, strict=True):
                if isinstance(parameter, nn.Parameter):
                    place = replica.layout.tensor(held, piece)
                    copies[id(parameter)] = type(parameter)(place, parameter.requires_grad)
        made = copy.deepcopy(self._models, copies)
        self._copies.update(made)
        return made


def one_or_all(models: Sequence[nn.Module]) -> Any:
    """What a script gets: its model, or a tuple if it has several."""
    return models[0] if len(models) == 1 else tuple(models)


def joined(models: Sequence[nn.Module]) -> nn.Module:
    """One model, or several as a list whose names begin with their places: "0.weight", "1.weight"."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def _activations(models: Sequence[nn.Module]) -> dict[int, Any]:
    """Copies of tensors that a forward pass has left in the modules, by id: `deepcopy` refuses them."""
    found = {}
    for module in joined(models).modules():
        for value in pytree.tree_leaves(vars(module)):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                found[id(value)] = torch.clone(value.detach())
    return found
