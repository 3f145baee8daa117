"""No progress bars: torch.fx makes one for every graph that it runs, and tqdm starts a thread for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx.interpreter
import torch.hub


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """A context in which torch.fx makes no progress bars."""
    interpreter: Any = torch.fx.interpreter
    before = interpreter.tqdm
    interpreter.tqdm = torch.hub._Faketqdm
    try:
        yield
    finally:
        interpreter.tqdm = before
