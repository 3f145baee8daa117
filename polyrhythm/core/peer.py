"""Peer: the name of a node."""

from __future__ import annotations

from dataclasses import dataclass

# The replacement of a peer that died is its next incarnation. The sequence numbers of an incarnation begin at
# incarnation << INCARNATION_SHIFT: they keep rising, and each tells to which incarnation it belongs.
INCARNATION_SHIFT = 40


@dataclass(frozen=True, order=True)
class Peer:
    """The name of a node: its role and its rank among the nodes of that role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


COORDINATOR = Peer("coordinator", 0)  # the coordinator's name on the wire
