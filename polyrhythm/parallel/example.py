"""An example batch of a loader, and the arguments that a model takes from it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.untouched import random_states_kept

Call = tuple[tuple[Any, ...], dict[str, Any]]


def example_batch(loader: DataLoader[Any]) -> Any:
    """A batch of the first examples of a loader's dataset. It changes no random state and no sampler."""
    dataset: Any = loader.dataset
    with random_states_kept():
        if loader.batch_sampler is None:  # the dataset makes batches itself
            batches = iter(dataset) if isinstance(dataset, IterableDataset) else (dataset[0] for _ in "1")
            return loader.collate_fn(next(batches))
        count = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(count, int):
            count = len(list(next(iter(loader.batch_sampler))))
        if isinstance(dataset, IterableDataset):
            examples = list(itertools.islice(iter(dataset), count))
        else:
            examples = [dataset[number] for number in range(min(count, len(dataset)))]
    if not examples:
        raise UsageError("the training loader has no examples; a batch of it is needed to run the model once")
    return loader.collate_fn(examples)


def model_inputs(model: nn.Module, batch: Any, labelled: bool = True) -> Call:
    """The arguments of the model in a batch, on the device of the model.

    Of a pair (x, y) it is x; of a dict, the keywords that `forward` takes; of a longer tuple, as many parts
    as `forward` needs. The last part of a `labelled` batch is no input.
    """
    return on_device(model, _inputs(model, batch, labelled))


def on_device(model: nn.Module, call: Call) -> Call:
    """The arguments of a call on the device of the model."""
    held = (each.device for each in model.parameters() if not each.is_meta)
    device = next(held, torch.device("cpu"))

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    args, kwargs = call
    return pytree.tree_map(move, args), pytree.tree_map(move, kwargs)


def _inputs(model: nn.Module, batch: Any, labelled: bool) -> Call:
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        every = any(each.kind is each.VAR_KEYWORD for each in parameters)
        taken = {
            each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        kwargs = {str(name): value for name, value in batch.items() if every or name in taken}
        if not kwargs:
            keys = ", ".join(map(str, batch))
            raise UsageError(f"{type(model).__name__}.forward takes none of the keys of a batch: {keys}")
        return (), kwargs
    if not isinstance(batch, tuple | list) or not batch:
        return (batch,), {}
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = max(1, sum(each.default is each.empty for each in places))
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        needed = max(needed, len(batch) - 1)
    return tuple(batch[: min(needed, max(1, len(batch) - 1)) if labelled else needed]), {}


def given_call(example: Any) -> Call:
    """The call that a script has given as an example: a tuple of inputs, a dict of keywords, or one input."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def rows_of(call: Call) -> int:
    """The number of rows of the first tensor."""
    for leaf in pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise UsageError("a batch has no tensor, and a model is cut by its tensors")


def repeated_rows(call: Call, rows: int) -> Call:
    """As many rows as wanted, by repeating those that there are."""
    total = rows_of(call)
    times = -(-rows // total)

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == total:
            return torch.cat([leaf] * times)[:rows]
        return leaf

    args, kwargs = call
    return pytree.tree_map(repeat, args), pytree.tree_map(repeat, kwargs)


def first_rows(call: Call, rows: int) -> Call:
    """The first rows of every tensor that has a row for each example."""
    total = rows_of(call)

    def cut(leaf: Any) -> Any:
        return leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == total else leaf

    args, kwargs = call
    return pytree.tree_map(cut, args), pytree.tree_map(cut, kwargs)
