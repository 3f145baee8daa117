"""Learns from the training steps how a script calls its model with a batch of the loader.

A batch may be a tuple, a dict or anything else, and only the script knows which parts of it are the input.
So the arguments of its first call are searched for in the batch. Each tensor among them must be a part of the
batch, possibly on another device, of another dtype or of another shape per example. Any other argument, such
as a list of lengths, may come from the batch or be a constant: later calls show which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.model.hooks import Hook

_NEEDS = "batch_norm=recompute has to call the model as the script does, but"
_ADVICE = (
    "compute it in the dataset or in the model, or use batch_norm=local, or mean where workers step together"
)

Path = tuple[int, ...]  # to a part of a batch: the index at each level


@dataclass(frozen=True)
class _TensorSource:
    """An argument that is a tensor of the batch: which one, and how it is converted."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one example

    def of(self, batch: Any) -> Tensor:
        found: Tensor = _at(batch, self.path).to(self.device, self.dtype)
        return found.reshape(len(found), *self.shape)


@dataclass
class _ValueSource:
    """An argument that is not a tensor: where in the batch it may come from, and whether it is constant."""

    value: Any
    paths: list[Path]
    same: bool = True

    def watch(self, value: Any, batch: Any) -> None:
        self.paths = [path for path in self.paths if _same(_at(batch, path), value)]
        self.same = self.same and _same(self.value, value)
        if not self.paths and not self.same:
            raise UsageError(
                f"{_NEEDS} cannot tell how an argument that changes, from {_short(self.value)} to "
                f"{_short(value)}, is computed from the batch: {_ADVICE}"
            )

    def of(self, batch: Any) -> Any:
        return _at(batch, self.paths[0]) if self.paths else self.value


class CallRecorder:
    """Observes a loader and a model. Once it has seen a call, it can repeat the call with other batches."""

    def __init__(self, model: nn.Module) -> None:
        self._batch: Any = None
        self._sources: tuple[list[_TensorSource | _ValueSource], Any] | None = None
        model.register_forward_pre_hook(Hook(self._on_forward), with_kwargs=True)

    def on_batch(self, batch: Any) -> None:
        """The loader gives out this batch."""
        self._batch = batch

    def _on_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None or not model.training:
            return
        batch, self._batch = self._batch, None
        values, form = _values(args, kwargs)
        if self._sources is None:
            self._sources = [_source_of(value, batch) for value in values], form
            return
        sources, first = self._sources
        if form != first or any(
            isinstance(value, Tensor) != isinstance(source, _TensorSource)
            for value, source in zip(values, sources, strict=True)
        ):
            raise UsageError(
                f"{_NEEDS} the script calls it with different arguments from step to step: {_ADVICE}"
            )
        for value, source in zip(values, sources, strict=True):
            if isinstance(source, _ValueSource):
                source.watch(value, batch)

    def replay(self, model: nn.Module, batch: Any) -> bool:
        """Calls the model with this batch; if no call was seen yet, with the first part of the batch.

        Returns False if the model does not accept that.
        """
        try:
            if self._sources is None:
                args, kwargs = (pytree.tree_leaves(batch)[0],), {}
            else:
                sources, form = self._sources
                args, kwargs = pytree.tree_unflatten([source.of(batch) for source in sources], form)
            model(*args, **kwargs)
        except Exception as error:
            if self._sources is None:
                return False
            raise UsageError(
                f"batch_norm=recompute cannot call the model as the script did in its first step "
                f"({type(error).__name__}: {error}): {_ADVICE}"
            ) from error
        return True


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arguments, flattened only where they contain tensors: a list of numbers is one value."""
    call = (args, kwargs)

    def whole(value: Any) -> bool:
        if value is call or value is args or value is kwargs:
            return False
        return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))

    return pytree.tree_flatten(call, is_leaf=whole)


def _source_of(value: Any, batch: Any) -> _TensorSource | _ValueSource:
    if not isinstance(value, Tensor):
        # Prefer the shortest path: an equal number deep inside a list is probably a coincidence.
        return _ValueSource(
            value, sorted((path for path, part in _parts(batch) if _same(part, value)), key=len)
        )
    for path, part in _parts(batch):
        if isinstance(part, Tensor) and part.dim() and value.shape[:1] == part.shape[:1]:
            source = _TensorSource(path, value.device, value.dtype, tuple(value.shape[1:]))
            if part.numel() == value.numel() and torch.equal(
                source.of(batch).nan_to_num(), value.nan_to_num()
            ):
                return source
    raise UsageError(
        f"{_NEEDS} cannot tell how its argument (a tensor of shape {tuple(value.shape)}) is computed from "
        f"the batch: {_ADVICE}"
    )


def _inner(tree: Any) -> list[Any]:
    """The elements of a list, dict or other container; empty for anything else."""
    inner = pytree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    return [] if len(inner) == 1 and inner[0] is tree else inner


def _parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All parts of a batch in order, including the batch itself and its containers."""
    yield path, tree
    for number, each in enumerate(_inner(tree)):
        yield from _parts(each, (*path, number))


def _at(tree: Any, path: Path) -> Any:
    """The part at this path; None if it does not exist."""
    for number in path:
        inner = _inner(tree)
        tree = inner[number] if number < len(inner) else None
    return tree


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    try:
        return bool(one == other)
    except Exception:  # arrays, and lists that contain arrays
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
