"""Loops compiled by numba, for tensors on the CPU: one pass where tensor operations need five.

Modules in here import numba, which takes half a second, so `load()` imports them when a codec is first used.
That needs `pip install 'polyrhythm[codecs]'`; everything else works without.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

from polyrhythm.core.errors import UsageError
from polyrhythm.core.extras import missing


class Kernels(NamedTuple):
    """The compiled modules."""

    rice: ModuleType
    scan: ModuleType


@cache
def load() -> Kernels:
    """The compiled modules; UsageError if what they need is not installed."""
    if why := missing():
        raise UsageError(f"sparse codecs need {why}")
    from polyrhythm.compress.kernels import rice, scan

    return Kernels(rice, scan)
