"""An example of what the script will call its model with, from the data of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.example import Call, example_batch, model_inputs
from polyrhythm.session.arguments import Arguments

ROWS = 4  # of the example
_PASS = "pass what the model is called with: session.prepare(model, optimizer, loader, example=(x,))"

__all__ = ["Call", "example_call", "given_call"]


def example_call(given: Arguments) -> Call:
    """The arguments of a call of the model, from the first examples of the first loader."""
    if not given.loaders:
        raise UsageError(f"a divided model needs an example of its inputs, and no loader was given: {_PASS}")
    if isinstance(given.loaders[0].dataset, IterableDataset):
        raise UsageError(f"a stream gives its examples once, so none can be looked at: {_PASS}")
    batch = example_batch(given.loaders[0], ROWS)
    if not isinstance(batch, Mapping | list | tuple | Tensor):
        raise UsageError(f"a batch of the loader is a {type(batch).__name__}, which tells no inputs: {_PASS}")
    return model_inputs(given.models[0], batch)


def given_call(example: Any) -> Call:
    """The call that a script has given as an example: a tuple of inputs, a dict of keywords, or one input."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}
