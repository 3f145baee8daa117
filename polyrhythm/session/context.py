"""What a world gives to the session of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import Request, Welcome
from polyrhythm.core.resolve import ResolvedStrategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.session.api import Session

R = TypeVar("R")


class ServerDone(BaseException):
    """Ends the script on a server, which runs nothing of it after `prepare`."""


class WorldContext(ABC):
    """A node's place in a run, given by its world: its identity, its Node and the way to the coordinator."""

    me: Peer
    node: Node
    plan: Plan
    processes: bool = True  # DataLoader may start processes of its own

    @property
    @abstractmethod
    def strategy(self) -> ResolvedStrategy | None:
        """The run's strategy, if it is settled already."""

    @abstractmethod
    def request(self, request: Request[R]) -> R:
        """Sends a request to the coordinator and blocks until the reply."""

    @abstractmethod
    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        """Joins the run and proposes a strategy; returns once every node has joined.

        The strategy and policy that all train with are those of the first node, unless they are settled.
        """

    @abstractmethod
    def bring(self, digest: str, file: Sequence[Tensor]) -> None:
        """Sends the final parameters to the coordinator, as the parts of a file: tensors of bytes."""

    def compute_time(self) -> float:
        """The simulated duration of the step whose backward pass is done; 0 on real processes."""
        return 0.0

    def spend(self, seconds: float) -> None:
        """Lets simulated time pass."""

    def away(self) -> AbstractContextManager[None]:
        """Surrounds code that may let other nodes of this process run: keeps their random states apart."""
        return nullcontext()

    def passes(self, backward: Callable[[], None]) -> None:
        """Runs a backward pass in which this node may wait for others."""
        backward()

    def within(self, wait: Callable[[], None]) -> None:
        """Waits for others during a forward pass, or during a backward pass that `passes` runs."""
        wait()

    @abstractmethod
    def flush(self) -> None:
        """Sends all events and totals so far to the coordinator."""


world_context: ContextVar[WorldContext | None] = ContextVar("world_context", default=None)
session: ContextVar[Session | None] = ContextVar("session", default=None)
