"""How a script calls its model with what the loader gives: learnt from the training steps.

A batch may be a tuple, a dict or anything else, and only the script knows which parts of it are the input.
So the arguments of its first call are looked for in the batch. Each tensor among them has to be a part of it,
but may be on another device, of another dtype or of another shape per example. What is no tensor, such as a
list of lengths, may be a part of the batch or always the same: later calls tell which of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.session.batch_norm.hooks import Hook

_ASKED = "batch_norm=recompute has to call the model as the script does, and"
_ELSE = "do that in the dataset or in the model, or use batch_norm=local, or mean where workers step together"

Path = tuple[int, ...]  # to a part of a batch: the how manieth at each level


@dataclass(frozen=True)
class _Part:
    """A tensor that is a part of the batch: which one, and what is made of it."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one example

    def of(self, batch: Any) -> Tensor:
        found: Tensor = _at(batch, self.path).to(self.device, self.dtype)
        return found.reshape(len(found), *self.shape)


@dataclass
class _Plain:
    """What is no tensor: where in the batch it may come from, and whether it was always the same."""

    value: Any
    paths: list[Path]
    same: bool = True

    def watch(self, value: Any, batch: Any) -> None:
        self.paths = [path for path in self.paths if _same(_at(batch, path), value)]
        self.same = self.same and _same(self.value, value)
        if not self.paths and not self.same:
            raise UsageError(
                f"{_ASKED} cannot see how an argument that changes, {_short(self.value)} at first and "
                f"{_short(value)} now, comes out of the batch: {_ELSE}"
            )

    def of(self, batch: Any) -> Any:
        return _at(batch, self.paths[0]) if self.paths else self.value


class Call:
    """Watches a loader and a model; once it has seen a call, it can be repeated with other batches."""

    def __init__(self, model: nn.Module) -> None:
        self._batch: Any = None
        self._made: tuple[list[_Part | _Plain], Any] | None = None
        model.register_forward_pre_hook(Hook(self._see), with_kwargs=True)

    def given(self, batch: Any) -> None:
        """The loader gives this one out."""
        self._batch = batch

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None or not model.training:
            return
        batch, self._batch = self._batch, None
        values, form = _values(args, kwargs)
        if self._made is None:
            self._made = [_found(value, batch) for value in values], form
            return
        ways, first = self._made
        if form != first or any(
            isinstance(value, Tensor) != isinstance(way, _Part)
            for value, way in zip(values, ways, strict=True)
        ):
            raise UsageError(f"{_ASKED} the script has called it with other arguments before: {_ELSE}")
        for value, way in zip(values, ways, strict=True):
            if isinstance(way, _Plain):
                way.watch(value, batch)

    def again(self, model: nn.Module, batch: Any) -> bool:
        """Calls the model with this batch; if no call was seen yet, with its first part.

        False tells that the model does not take that.
        """
        try:
            if self._made is None:
                args, kwargs = (pytree.tree_leaves(batch)[0],), {}
            else:
                ways, form = self._made
                args, kwargs = pytree.tree_unflatten([way.of(batch) for way in ways], form)
            model(*args, **kwargs)
        except Exception as error:
            if self._made is None:
                return False
            raise UsageError(
                f"batch_norm=recompute cannot call the model as the script did in its first step "
                f"({type(error).__name__}: {error}): {_ELSE}"
            ) from error
        return True


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arguments, taken apart where there are tensors in them: a list of numbers is one value."""
    call = (args, kwargs)

    def whole(value: Any) -> bool:
        if value is call or value is args or value is kwargs:
            return False
        return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))

    return pytree.tree_flatten(call, is_leaf=whole)


def _found(value: Any, batch: Any) -> _Part | _Plain:
    if not isinstance(value, Tensor):
        # A number of its own comes before one that a list begins with: that is the same by chance.
        return _Plain(value, sorted((path for path, part in _parts(batch) if _same(part, value)), key=len))
    for path, part in _parts(batch):
        if isinstance(part, Tensor) and part.dim() and value.shape[:1] == part.shape[:1]:
            made = _Part(path, value.device, value.dtype, tuple(value.shape[1:]))
            if part.numel() == value.numel() and torch.equal(made.of(batch).nan_to_num(), value.nan_to_num()):
                return made
    raise UsageError(
        f"{_ASKED} cannot see how what it is called with (a tensor of shape {tuple(value.shape)}) comes out "
        f"of the batch: {_ELSE}"
    )


def _inner(tree: Any) -> list[Any]:
    """What a list, dict or the like consists of; nothing if it is none."""
    inner = pytree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    return [] if len(inner) == 1 and inner[0] is tree else inner


def _parts(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All parts of a batch, itself and lists as wholes too, in order."""
    yield path, tree
    for number, each in enumerate(_inner(tree)):
        yield from _parts(each, (*path, number))


def _at(tree: Any, path: Path) -> Any:
    """The part that this path leads to; None if there is none."""
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
    except Exception:  # arrays, and lists in which there are some
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
