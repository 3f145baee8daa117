"""Notice: what the coordinator tells nodes about other nodes."""

from __future__ import annotations

from typing import Literal

import msgspec

from polyrhythm.core.peer import Peer


class Notice(msgspec.Struct, frozen=True):
    """A node has left or joined, or the run is over: then every worker is gone and none will come."""

    kind: Literal["left", "joined", "over"]
    role: str = ""
    rank: int = 0
    incarnation: int = 0
    reason: str = ""  # of one that has left
    address: str = ""  # of one that has joined

    @property
    def peer(self) -> Peer | None:
        """The node that it is about; None if the run is over."""
        return Peer(self.role, self.rank) if self.role else None

    @property
    def finished(self) -> bool:
        """True if the node has left because it was done."""
        return self.reason == "finished"
