"""What a world gives to the session of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    from polyrhythm.session.api import Session


class ServerDone(BaseException):
    """A server has served; nothing of the script after `prepare` is its business."""


class WorldContext(ABC):
    """A node's place in a run, given by its world: its identity, its Node and the way to the coordinator."""

    me: Peer
    node: Node
    processes: bool = True  # whether DataLoader may start processes of its own

    @abstractmethod
    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Asks the coordinator, and blocks until it answers."""

    @abstractmethod
    def join(self, strategy: str | None, batch_norm: str | None) -> dict[str, Any]:
        """Enters the run; returns once every node is there."""

    @abstractmethod
    def bring(self, digest: str, blob: bytes) -> None:
        """Brings the final parameters to the coordinator."""

    def compute_time(self) -> float:
        """How long the step takes whose backward pass is done; on real processes it has passed already."""
        return 0.0

    def spend(self, seconds: float) -> None:
        """Lets simulated time pass."""

    def away(self) -> AbstractContextManager[None]:
        """Around whatever may let other nodes of this process run: keeps random numbers apart."""
        return nullcontext()

    def passes(self, backward: Callable[[], None]) -> None:
        """Runs a backward pass in which this node may wait for others."""
        backward()

    def within(self, wait: Callable[[], None]) -> None:
        """Waits for others in the middle of a forward pass, or of a backward pass that `passes` runs."""
        wait()

    @abstractmethod
    def flush(self) -> None:
        """Hands in what is left of the event log."""


world_context: ContextVar[WorldContext | None] = ContextVar("seat", default=None)


session: ContextVar[Session | None] = ContextVar("session", default=None)
