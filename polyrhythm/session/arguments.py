"""Arguments: what a script passes to `prepare`, sorted by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError


class Arguments:
    """The objects that a script passes to `prepare`, in any order."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = tuple(objects)
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loaders: list[DataLoader[Any]] = []
        for thing in self._objects:
            self._sort(thing)

    def _sort(self, thing: Any) -> None:
        kinds: tuple[tuple[type, list[Any]], ...] = (
            (nn.Module, self.models),
            (torch.optim.Optimizer, self.optimizers),
            (DataLoader, self.loaders),
        )
        for kind, those in kinds:
            if isinstance(thing, kind):
                if any(thing is other for other in those):
                    raise UsageError(f"session.prepare() got the same {type(thing).__name__} twice")
                those.append(thing)
                return
        raise UsageError(
            f"session.prepare() takes models, optimizers and loaders, not {type(thing).__name__}; pass each "
            "as an argument of its own"
        )

    def returned(self, replaced: Mapping[Any, Any]) -> Any:
        """The objects in the order in which they were given, some replaced by others."""
        return tuple(replaced.get(thing, thing) for thing in self._objects)
