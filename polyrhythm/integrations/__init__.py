"""Parts of polyrhythm inside other people's training loops: `pr.integrations.ddp`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ddp"]


# Found on first use: each needs what it is for, and that takes long to import.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"polyrhythm.integrations has no {name!r}")
    return import_module(f"polyrhythm.integrations.{name}")
