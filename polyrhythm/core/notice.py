"""Notice: what the coordinator tells nodes about other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from polyrhythm.core.peer import Peer


class Notice(msgspec.Struct, frozen=True):
    """A node has left, joined, taken its last step or made a call that all workers make together; the run is
    over: every worker is gone and none will come; or the run ends early: workers stop after a step that they
    agree on, or each where it is, because the run has failed."""

    kind: Literal["left", "joined", "done", "waits", "over", "stop", "abandon"]
    role: str = ""
    rank: int = 0
    incarnation: int = 0
    reason: str = ""  # of one that has left; the call of one that waits
    address: str = ""  # of one that has joined
    replaced: bool = False  # one that has left: another process will take its place
    steps: int = 0  # of one that is done; the exchanges that one which waits has begun
    calls: int = 0  # that one which waits has made before
    step: int = -1  # the step after which all workers stop; -1: they report where they are

    @staticmethod
    def of(kind: str, fields: Mapping[str, Any]) -> Notice:
        """The notice in a message of this kind with these fields."""
        return msgspec.convert({**fields, "kind": kind}, Notice)

    @property
    def peer(self) -> Peer | None:
        """The node that it is about; None if it is about the run."""
        return Peer(self.role, self.rank) if self.role else None

    @property
    def finished(self) -> bool:
        """True if the node has left because it was done."""
        return self.reason == "finished"
