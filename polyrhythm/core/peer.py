"""Peer: the name of a node."""

from __future__ import annotations

from typing import NamedTuple

# The replacement of a peer that died is its next incarnation. The sequence numbers of an incarnation begin at
# incarnation << INCARNATION_SHIFT: they keep rising, and each tells to which incarnation it belongs.
INCARNATION_SHIFT = 40


class Peer(NamedTuple):
    """The name of a node: its role and its rank among the nodes of that role."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


COORDINATOR = Peer("coordinator", 0)  # the coordinator's name on the wire
