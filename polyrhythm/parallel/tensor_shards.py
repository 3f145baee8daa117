"""TensorShards: the parameters of a model that are divided over the workers of a tensor axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.model.layout import ELEMENTWISE
from polyrhythm.parallel.graph import ModelGraph
from polyrhythm.parallel.sharding import Sharding
from polyrhythm.parallel.splits import TensorParallel
from polyrhythm.parallel.tensor_parallel import TensorAxis, divide_tensors, join_shards
from polyrhythm.parallel.tensor_plan import choose_plan


class TensorShards:
    """The divided parameters of a model, and the operations of one worker on its parts of them."""

    def __init__(self, graph: ModelGraph, split: TensorParallel, rank: int) -> None:
        self.axis = TensorAxis(rank, split.size)
        plan = choose_plan(graph, split)
        self.shardings: Mapping[str, Sharding] = plan.shards
        self.layers = plan.layers
        self.graph = divide_tensors(graph, plan, self.axis)
        self._split = split
        self._whole: dict[str, tuple[Tensor, dict[str, Any]]] = {}  # with the optimizer's state
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}  # of the parts, and of the whole

    def take(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Leaves the parts of this worker in a model, and in the states of its optimizers.

        UsageError for optimizers that need whole tensors.
        """
        trained_by = {
            id(each): optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        for name, parameter in model.named_parameters():
            if name not in self.shardings:
                continue
            optimizer = trained_by.get(id(parameter))
            state = {} if optimizer is None else optimizer.state
            if optimizer is not None and type(optimizer) not in ELEMENTWISE:
                raise UsageError(
                    f"{type(optimizer).__name__} may need whole tensors, and {self._split} divides "
                    f"{next(iter(self.layers))}: use an element-wise optimizer such as SGD or Adam, or "
                    "pipeline"
                )
            self._whole[name] = parameter.detach(), dict(state.get(parameter, {}))
            if parameter in state:
                state[parameter] = self.state_of(name, self.axis.rank)
            whole = parameter.shape
            parameter.data, parameter.grad = self._part(name, parameter.detach(), self.axis.rank), None
            self._shapes[name] = parameter.shape, whole

    def release(self) -> None:
        """Frees the whole tensors: a worker needs no parts of others."""
        self._whole.clear()

    def of(self, name: str, parameter: nn.Parameter, rank: int) -> nn.Parameter:
        """A parameter as another worker has it. Called before `release`."""
        if name not in self.shardings:
            return parameter
        return nn.Parameter(self._part(name, self._whole[name][0], rank), parameter.requires_grad)

    def state_of(self, name: str, rank: int) -> dict[str, Any]:
        """The optimizer's state of a divided parameter, as another worker has it. Called before `release`."""
        whole, state = self._whole[name]
        return {
            key: self._part(name, each, rank)
            if isinstance(each, Tensor) and each.shape == whole.shape
            else each
            for key, each in state.items()
        }

    def _part(self, name: str, whole: Tensor, rank: int) -> Tensor:
        return TensorAxis(rank, self.axis.size).shard(whole, self.shardings[name])

    def joined(self, name: str, parts: Mapping[int, Tensor]) -> Tensor:
        """A whole tensor from those of all workers, by rank: a parameter, or a state of its optimizer."""
        tensors = [parts[rank] for rank in sorted(parts)]
        if name not in self._shapes or tensors[0].shape != self._shapes[name][0]:
            return tensors[0]  # it has no number for each element of a divided parameter
        return join_shards(tensors, self.shardings[name])

    def own_part(self, name: str, value: Any) -> Any:
        """This worker's part of what `joined` returns; other values as they are."""
        if isinstance(value, Tensor) and name in self._shapes and value.shape == self._shapes[name][1]:
            return self._part(name, value, self.axis.rank)
        return value
