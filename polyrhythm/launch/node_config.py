"""What a node process is given when it is forked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.wire.arena import Arenas


@dataclass(frozen=True)
class NodeConfig:
    """What all nodes of a host have in common.

    The key never appears in a command line, an environment variable or a log.
    """

    plan: Plan
    key: bytes = field(repr=False)
    host: str  # nodes with the same host share memory
    began: float  # when the run began, by this host's monotonic clock
    threads: int  # of torch, per worker
    listen: str
    arenas: Arenas | None = None
    strategy: ResolvedStrategy | None = None  # if it is known already


class NodeStart(NamedTuple):
    """One node to fork: its name, its incarnation, its arena and the coordinator's address."""

    peer: Peer
    incarnation: int
    arena: int
    coordinator: str
