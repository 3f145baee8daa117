"""Parts of polyrhythm for other training frameworks: `pr.integrations.ddp`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["ddp", "keras", "lightning", "process_group", "transformers"]


# Imported on first use, because each imports its framework, which is slow.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"polyrhythm.integrations has no {name!r}")
    return import_module(f"polyrhythm.integrations.{name}")
