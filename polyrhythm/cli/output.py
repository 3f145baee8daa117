"""Standard output for JSON alone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Sends everything written to standard output to standard error, also that of child processes."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)
