"""Peer: the name of a node."""

from __future__ import annotations

from dataclasses import dataclass

# A peer that died and was replaced begins a new life. The sequence numbers of a life begin at life << LIFE:
# they go on rising, so what was seen before stays known, and each tells which life it is of.
INCARNATION_SHIFT = 40


@dataclass(frozen=True, order=True)
class Peer:
    """The name of a node: its role and its rank among the nodes of that role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"
