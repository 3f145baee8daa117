"""Plan: everything that a run was asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy


@dataclass(frozen=True)
class Plan:
    """Everything that a run was asked to do. It is made once and passed whole to launcher, coordinator and
    nodes."""

    strategy: Strategy | None
    workers: int
    servers: int = 0
    sites: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the ranks of the workers at each site
