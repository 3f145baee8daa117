"""Loops compiled by numba, for tensors on the CPU: one pass where tensor operations need five.

Modules in here import numba, which takes half a second, so `load()` imports them when a codec is first used.
That needs `pip install 'polyrhythm[codecs]'`; everything else works without.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

from polyrhythm.core.errors import UsageError


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


def missing(checksums: bool = True) -> str:
    """Which of numba and the checksum library cannot be imported, and why; empty if both can."""
    name = "numba"
    try:
        import numba  # noqa: F401

        if checksums:
            name = "google_crc32c"
            import google_crc32c  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == name:
            return f"{name}, which is not installed: pip install 'polyrhythm[codecs]'"
        return _broken(name, error)
    except Exception as error:  # numba refuses a NumPy that is too new, or a library is missing
        return _broken(name, error)
    return ""


def _broken(name: str, error: Exception) -> str:
    return f"{name}, which is installed but cannot be imported ({type(error).__name__}: {error})"
