"""How a script calls its model with what the loader gives: learnt from the first training step.

A batch may be a tuple, a dict or anything else, and only the script knows which parts of it are the input.
So the arguments of its first call are looked for in the batch: each tensor among them has to be a part of it,
but may be on another device, of another dtype or of another shape per example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.errors import UsageError

_ELSE = "use batch_norm=local, or mean where workers step together"


@dataclass(frozen=True)
class _Part:
    """An argument that is a part of the batch: which one, and what is made of it."""

    number: int
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one example

    def of(self, parts: Sequence[Any]) -> Tensor:
        found: Tensor = parts[self.number].to(self.device, self.dtype)
        return found.reshape(len(found), *self.shape)


class Call:
    """Watches a loader and a model until it has seen one call; can then be repeated with other batches."""

    def __init__(self, model: nn.Module) -> None:
        self._batch: Any = None
        self._made: tuple[list[Any], Any] | None = None
        self._hook = model.register_forward_pre_hook(_Watch(self._see), with_kwargs=True)

    def given(self, batch: Any) -> None:
        """The loader gives this one out."""
        if self._made is None:
            self._batch = batch

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch is None or not model.training or self._made is not None:
            return
        values, form = pytree.tree_flatten((args, kwargs))
        parts = pytree.tree_leaves(self._batch)
        self._made = [_found(value, parts) if isinstance(value, Tensor) else value for value in values], form
        self._batch = None
        self._hook.remove()

    def again(self, model: nn.Module, batch: Any) -> bool:
        """Calls the model with this batch; if no call was seen yet, with its first part.

        False tells that the model does not take that.
        """
        parts = pytree.tree_leaves(batch)
        if self._made is None:
            args, kwargs = (parts[0],), {}
        else:
            values, form = self._made
            args, kwargs = pytree.tree_unflatten(
                [value.of(parts) if isinstance(value, _Part) else value for value in values], form
            )
        try:
            model(*args, **kwargs)
        except Exception as error:
            if self._made is None:
                return False
            raise UsageError(
                f"batch_norm=recompute cannot call the model as the script did in its first step "
                f"({type(error).__name__}: {error}); {_ELSE}"
            ) from error
        return True


class _Watch:
    """A hook that copies of the model, pickled too, do not have."""

    def __init__(self, see: Callable[..., None]) -> None:
        self._see = see

    def __call__(self, *call: Any) -> None:
        self._see(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copy has in place of the hook."""


def _found(value: Tensor, parts: Sequence[Any]) -> _Part:
    for number, part in enumerate(parts):
        if isinstance(part, Tensor) and part.dim() and value.shape[:1] == part.shape[:1]:
            made = _Part(number, value.device, value.dtype, tuple(value.shape[1:]))
            if part.numel() == value.numel() and torch.equal(made.of(parts).nan_to_num(), value.nan_to_num()):
                return made
    raise UsageError(
        "batch_norm=recompute has to call the model as the script does, and cannot see how what it is called "
        f"with (a tensor of shape {tuple(value.shape)}) comes out of the batch: do that in the dataset or in "
        f"the model, or {_ELSE}"
    )
