"""Hooks that are not copied with the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Hook:
    """A hook that does nothing in a copy of the model, whether copied or pickled."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *call: Any) -> None:
        self._call(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _nothing(*_: Any) -> None:
    """Replaces the hook in a copy."""
