"""Hooks that stay with the model they were made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Hook:
    """A hook that copies of the model, pickled too, do not have."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *call: Any) -> None:
        self._call(*call)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a copy has in place of the hook."""
