"""Node: all that a strategy may do to the world.

A strategy is plain blocking code against `Node`. What blocking means is the world's business: in
`worlds.processes` it is a wait on a socket, in `worlds.simulated` it is a switch to the event queue.

- `send` is one-way. The payload is copied: the sender may overwrite it at once.
- `request` lends. The tensors that go out, and those in `into` that the reply will fill, belong to the
  conversation until `Reply.wait()` returns. So on one host nothing is copied on the way out, and the reply is
  written straight into its place.
- `subscribe` has a function handle messages while the script computes; `lock` keeps the two apart.
- `group` gives the collectives.

A strategy that draws random numbers uses its own generator, seeded with `Node.seed`. The global generators
belong to the script: after a wait in simulation they may hold the state of another worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from polyrhythm.core.events import Event
from polyrhythm.core.group import Group, Task
from polyrhythm.core.mesh import Axis, Mesh
from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import Peer
from polyrhythm.core.stopping import Stopping

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lock(ABC):
    """A lock that all workers of a host see under one name. Fair: waiters go before the last
    holder. Released if its holder dies."""

    @abstractmethod
    def take(self) -> None:
        """Blocks until this worker has it; nothing happens if it has it already. WaitError, which names the
        holder, if that takes too long."""

    @abstractmethod
    def release(self) -> None:
        """Lets others have it; nothing happens if this worker does not have it."""

    @property
    def mutex(self) -> memoryview | None:
        """The mutex that compiled code takes by itself (see `optim.sparse_sgd_loops`); None if there is none,
        as in simulation."""
        return None

    def waited(self, seconds: float) -> None:
        """Called when compiled code has waited so long. WaitError, which names the holder, if too long."""


class Memory(ABC):
    """Memory that a node lends to others, or shares with all workers of its host."""

    @abstractmethod
    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """An uninitialized flat tensor that this node can lend to others of its host without a copy."""

    def temporary(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Like `empty`, but the memory is freed with the tensor: do not drop it while it is lent."""
        return self.empty(count, dtype, device)

    @abstractmethod
    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor that all workers of this host see under this name, zero at first.

        It outlives the worker that requested it first. UsageError if some workers are on another host.
        """

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """The lock of this name, for the workers of this host."""


class Members:
    """The nodes of a run, as far as one of them has been told.

    `Node.receive` tells: changes while a node does not receive become visible when it does.
    """

    def __init__(self) -> None:
        self.workers: Sequence[Peer] = ()  # by rank
        self.servers: Sequence[Peer] = ()  # by rank
        self.lost: dict[Peer, int] = {}  # workers that died before they finished: their last incarnation
        self.over = False  # every worker has left, and none will join
        self._left: dict[Peer, int] = {}  # the last incarnation of a peer that has left, for any reason

    def alive(self, message: Message) -> bool:
        """True if the sender of this message is still in the run. A replacement is another sender."""
        return message.incarnation > self._left.get(message.sender, -1)

    def outdated(self, message: Message) -> bool:
        """True if the sender of this message has died since: its memory may belong to another node."""
        return message.incarnation <= self.lost.get(message.sender, -1)

    def leave(self, peer: Peer, incarnation: int, finished: bool) -> None:
        """Records that a worker has left."""
        self._left[peer] = incarnation
        if not finished:
            self.lost[peer] = incarnation


class Node(ABC):
    """One worker or server, as a strategy sees it."""

    me: Peer
    seed: int
    members: Members
    memory: Memory
    incarnation: int = 0  # how many workers of this rank have died before this one
    stopping: Stopping  # whether the run ends early, and where this worker stops
    cohort: int = 0  # which set of workers shared the data when this one joined (see `coordination.leases`)
    mesh: Mesh  # set when it has joined the run
    # By kind of notice: called in any thread when another node has left, is done or waits. Returns an error
    # that ends the run, or an empty string.
    on_notice: dict[str, Callable[[Notice], str]]

    @property
    def rank(self) -> int:
        return self.me.rank

    @property
    @abstractmethod
    def everyone(self) -> Group:
        """All workers of the run."""

    def group(self, *axes: Axis) -> Group:
        """The workers whose place in the mesh differs from this one's on these axes only."""
        return self.everyone.split([Peer("worker", rank) for rank in self.mesh.ranks(self.rank, *axes)])

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: on the wall clock, or virtual."""

    @abstractmethod
    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        """Sends a one-way message; the tensors are copied. Blocks while the receiver's queue is full."""

    @abstractmethod
    def request(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        """Sends a request and returns at once. `tensors` and `into` are lent until the reply is in."""

    @abstractmethod
    def reply(self, message: Message, *tensors: Tensor, **fields: Field) -> bool:
        """Replies to a request. The sender's `into` is filled before this returns or soon after; the tensors
        are copied. The message's own tensors must not be used afterwards.

        True if the tensors lie in the sender's memory now, so that they cannot be lost on the way.
        """

    @abstractmethod
    def receive(self, *kinds: str) -> Message | None:
        """The next message of one of these kinds (of any kind, if none is named), in order of arrival.

        None if membership changed while waiting: look at `members`, and call again.
        """

    @abstractmethod
    def subscribe(self, on_message: Callable[[Message | None], None], *kinds: str) -> None:
        """From now on calls `on_message` with each message of these kinds, one at a time, beside the script.

        `on_message(None)` means that membership changed. The handler must not wait for other nodes: they wait
        for it. An error that it raises ends the run.
        """

    @abstractmethod
    def serve(self, function: Callable[[], None]) -> Task:
        """Runs a function that receives messages beside the script, such as the loop of a server.

        An error that it raises ends the run.
        """

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Guards state that the script's own thread and subscribed handlers share.

        Do not wait inside: a node that waits for this one would wait for both.
        """

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        """A hint: the tensors of the next request of this kind may be received straight `into` place.

        The message tells if they were: its tensors lie there or elsewhere. Call the returned function when
        the message is here or no longer wanted; nothing is written there afterwards.
        """
        return lambda: None

    @abstractmethod
    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        """Runs a function beside this one, to overlap communication with computing."""

    def whole_norm(self, norm: float) -> float:
        """The norm of a vector of the whole model, from that of the part that this worker holds.

        All workers that hold the model call it at the same point, and wait for each other.
        """
        return norm

    @abstractmethod
    def log(self, event: Event) -> None:
        """Adds an event to the log of the run (see `core.events`). Never blocks and never raises.

        A user's own strategy logs `Note("name", {"field": value})`.
        """

    @abstractmethod
    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        """Reports the work of this node so far, for progress and the summary."""


def others(node: Node) -> list[Peer]:
    """All other workers of the run, as far as this node has been told."""
    return [peer for peer in node.members.workers if peer != node.me]
