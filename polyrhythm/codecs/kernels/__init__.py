"""Loops compiled by numba, for tensors on the CPU: one pass where tensor operations would need five.

Modules in here import numba, which takes half a second, so nothing imports them before a codec is used:
`load()` does. It needs `pip install 'polyrhythm[codecs]'`; everything else works without.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

from polyrhythm.errors import UsageError


class Kernels(NamedTuple):
    """The compiled modules."""

    rice: ModuleType
    scan: ModuleType


@cache
def load() -> Kernels:
    """The compiled modules; UsageError if what they need is not installed."""
    try:
        import google_crc32c  # noqa: F401
        import numba  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"sparse codecs need {error.name}, which is not installed: pip install 'polyrhythm[codecs]'"
        ) from None
    from polyrhythm.codecs.kernels import rice, scan

    return Kernels(rice, scan)
