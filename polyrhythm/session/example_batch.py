"""An example of what the script will call its model with, from the data of a loader."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.core.errors import UsageError
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.random_states import restore_states, saved_states

ROWS = 4  # of the example
_PASS = "pass what the model is called with: session.prepare(model, optimizer, loader, example=(x,))"

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, and keyword arguments


def example_call(given: Arguments) -> Call:
    """The arguments of a call of the model, from the first examples of the first loader.

    Of a batch (x, y) the model gets x; of a dict, the entries that its forward method takes. The random
    states stay as they are.
    """
    if not given.loaders:
        raise UsageError(f"a divided model needs an example of its inputs, and no loader was given: {_PASS}")
    states = saved_states()
    try:
        batch = _first_batch(given.loaders[0])
    finally:
        restore_states(states)
    if isinstance(batch, Mapping):
        takes = inspect.signature(given.models[0].forward).parameters
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
        return (), {name: value for name, value in batch.items() if every or name in takes}
    if isinstance(batch, list | tuple) and batch:
        return (batch[0],), {}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise UsageError(f"a batch of the loader is a {type(batch).__name__}, which tells no inputs: {_PASS}")


def _first_batch(loader: DataLoader[Any]) -> Any:
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise UsageError(f"a stream gives its examples once, so none can be looked at: {_PASS}")
    count = min(ROWS, len(dataset))  # type: ignore[arg-type]
    rows = [dataset[number] for number in itertools.islice(range(count), ROWS)]
    collate = loader.collate_fn
    return collate(rows) if loader._auto_collation else collate(rows[0])


def given_call(example: Any) -> Call:
    """The call that a script has given as an example: a tuple of inputs, a dict of keywords, or one input."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}
