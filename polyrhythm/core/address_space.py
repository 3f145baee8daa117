"""The limit of the address space of this process (ulimit -v)."""

from __future__ import annotations

import resource


def address_space() -> int | None:
    """The bytes that this process may map; None if there is no limit."""
    found, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if found == resource.RLIM_INFINITY else found
