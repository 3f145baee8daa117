"""KerasWeights: the variables of a Keras model as a plain module, which a session can prepare and copy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import nn

from polyrhythm.session.seeds import mix


class KerasWeights(nn.Module):
    """The variables of a built model. Trainable ones are parameters; all others are buffers.

    Names begin with the place of a variable in `model.weights`, by which the variables of two workers are
    paired: Keras numbers layers per process, so the same model may have other names in another one. A call is
    one training step.
    """

    def __init__(self, model: Any, train: Callable[[Any], Any]) -> None:
        super().__init__()
        trained = {id(each) for each in model.trainable_variables}
        for number, each in enumerate(model.weights):
            if id(each) in trained:
                self.register_parameter(_name(number, each.name), each.value)
            else:
                self.register_buffer(_name(number, each.name), each.value)
        # Of torch modules inside the model.
        for number, (name, buffer) in enumerate(model.named_buffers(), len(model.weights)):
            self.register_buffer(_name(number, name), buffer)
        self._train = train

    def forward(self, data: Any) -> Any:
        return self._train(data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_train": None}  # a copy has no model


def _name(number: int, name: str) -> str:
    return f"{number}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"


def separate_seeds(model: Any, rank: int) -> None:
    """Gives a worker numbers of its own, for dropout and the like; the first one keeps those of the script.

    Layers of Keras draw from generators of their own, which all workers have seeded alike.
    """
    known = {id(each) for each in model.weights}
    for variable in model.variables if rank else ():
        if id(variable) not in known and tuple(variable.shape) == (2,):
            seed, count = (int(each) for each in keras.ops.convert_to_numpy(variable))
            variable.assign(torch.tensor([mix("keras", seed, rank) % 10**9, count]))
