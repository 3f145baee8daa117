"""WorldContext: the interface of a world to the session of a node."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import Request, Welcome
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.core.result_part import ResultPart

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

    from polyrhythm.session.api import Session
    from polyrhythm.session.arguments import Arguments

R = TypeVar("R")


class ServerDone(BaseException):
    """Ends the script on a server, which runs no code after `prepare`."""


class EndedInPrepare(BaseException):
    """Ends a script in `prepare`, for a caller that only wants what it has prepared."""

    def __init__(self, given: Arguments) -> None:
        super().__init__()
        self.given = given


class WorldContext(ABC):
    """A node's identity, its Node and its connection to the coordinator, provided by its world."""

    me: Peer
    node: Node
    plan: Plan
    processes: bool = True  # DataLoaders may start worker processes
    workload: float = 1.0  # examples of the present batch by the usual number, where batches are balanced

    @property
    @abstractmethod
    def strategy(self) -> ResolvedStrategy | None:
        """The strategy of the run, if it is known already."""

    @abstractmethod
    def request(self, request: Request[R]) -> R:
        """Sends a request to the coordinator and blocks until the reply."""

    @abstractmethod
    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        """Joins the run and proposes a strategy; returns once every node has joined.

        Unless they are known already, the first node to join decides strategy and BatchNorm policy for all.
        """

    @abstractmethod
    def send_result(self, digest: str, file: Sequence[Tensor]) -> None:
        """Sends the final parameters to the coordinator, as the parts of a file: tensors of bytes."""

    @abstractmethod
    def send_result_part(self, part: ResultPart, tensors: Sequence[Tensor]) -> None:
        """Sends a part of the final parameters of a divided model: tensors of bytes, and where they belong.

        `send_result` then gets no digest, and the places of all parameters in the file.
        """

    @property
    def worker(self) -> Peer:
        """This node by itself, also where several workers hold one model and are one to the session."""
        return self.me

    def worker_of(self, node: Peer) -> Peer:
        """The worker of this session that a node is, or holds a part of the model of."""
        return node

    def compute_time(self) -> float:
        """The simulated duration of the step that has just run its backward pass; 0 on real processes."""
        return 0.0

    def advance_time(self, seconds: float) -> None:
        """Advances simulated time."""

    def blocking(self) -> AbstractContextManager[None]:
        """A context for code that may block. Other nodes of this process may run meanwhile, each with its own
        random states; ends with `install_random_state`."""
        return nullcontext()

    def install_random_state(self) -> None:
        """Called before the script or its optimizer runs: others of this process may have drawn since."""

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Runs a backward pass that may block on other nodes."""
        backward()

    def wait_in_pass(self, wait: Callable[[], None]) -> None:
        """Blocks on other nodes inside a forward pass, or inside a backward pass run by `run_backward`."""
        wait()

    def script_frame(self) -> FrameType | None:
        """Where the script of this node is now; called in any thread."""
        return sys._current_frames().get(threading.main_thread().ident or 0)

    @abstractmethod
    def flush(self) -> None:
        """Sends all events and totals so far to the coordinator."""


world_context: ContextVar[WorldContext | None] = ContextVar("world_context", default=None)
# Called before a backward pass that the script runs in a run, but outside a session.
without_session: ContextVar[Callable[[], None] | None] = ContextVar("without_session", default=None)
# True: the script ends in `prepare`, which raises EndedInPrepare.
ends_in_prepare: ContextVar[bool] = ContextVar("ends_in_prepare", default=False)
# Called when the script begins to iterate over any DataLoader.
on_iterate: ContextVar[Callable[[DataLoader[Any]], None] | None] = ContextVar("on_iterate", default=None)
session: ContextVar[Session | None] = ContextVar("session", default=None)
