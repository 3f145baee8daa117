"""Imports torch in two thirds of the time: without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def quick_imports() -> Iterator[None]:
    """A context for imports. They make hundreds of thousands of objects that stay, and no garbage collection
    looks through them, neither meanwhile nor later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def import_torch() -> None:
    """Imports torch, unless it is there, and what every optimizer imports on its first use."""
    if "torch" not in sys.modules:
        with quick_imports():
            for name in ("torch._dynamo", "torch.utils.data"):
                import_module(name)
