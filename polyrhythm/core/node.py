"""Node and Message: all that a strategy may do to the world.

A strategy is plain blocking code against `Node`. What blocking means is the world's business: in
`worlds.processes` it is a wait on a socket, in `worlds.simulated` it is a switch to the event queue.

Ways to talk, and one to agree:

- `send` is one way. The payload is snapshotted: the sender may overwrite it at once.
- `ask` lends. The tensors that go out, and those in `into` that the answer will fill, belong to the
  conversation until `Reply.wait()` returns. So on one host nothing is copied on the way out, and the
  answer is written straight into its place.
- `listen` has a function take what others send while the script computes; `exclusive` keeps the two apart.
- `all_reduce` and `broadcast` are collectives of all workers. On one host and in simulation sums are taken in
  rank order, so that lockstep strategies give the same bits in both. `begin_all_reduce` does not wait.
  `among` is the same node with a part of the workers for all: its collectives are theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from polyrhythm.core.message import Field, Message, Reply
from polyrhythm.core.peer import Peer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.compress.state import Memory
    from polyrhythm.core.codec import Codec


class Task(ABC):
    """Something under way beside its node: a function in a thread (in simulation another greenlet), or a
    collective."""

    @abstractmethod
    def join(self) -> None:
        """Blocks until it is done; raises what went wrong there."""


class Lock(ABC):
    """A lock that all workers of a host see under one name. Whoever waits gets it before one who had it; the
    death of its holder frees it."""

    @abstractmethod
    def take(self) -> None:
        """Blocks until this worker has it; nothing happens if it has it already. WaitError, which names the
        holder, if that takes too long."""

    @abstractmethod
    def release(self) -> None:
        """Lets others have it; nothing happens if this worker does not have it."""

    @property
    def mutex(self) -> memoryview | None:
        """The mutex that compiled code may take by itself, again and again (see `row_loops`); None if there
        is none, as in simulation."""
        return None

    def waited(self, seconds: float) -> None:
        """Compiled code has waited so long: raises WaitError, which names the holder, if it is in vain."""


class Coding(Protocol):
    """What a world needs to know of a codec in use (see `coder.Sender`)."""

    codec: Codec

    def send(self, vectors: Sequence[Tensor]) -> list[Tensor]: ...

    def combine(self, codes: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None: ...

    def pairs(self, vectors: Sequence[Tensor]) -> list[tuple[Tensor, Memory]]: ...

    def combine_chunks(self, chunks: Sequence[Sequence[Tensor]], into: Sequence[Tensor]) -> None: ...

    def adopt(self, theirs: Sequence[Tensor], into: Sequence[Tensor]) -> None: ...

    def codable(self, vectors: Sequence[Tensor]) -> list[Tensor]: ...


class Node(ABC):
    """One worker or server, as a strategy sees it."""

    me: Peer
    seed: int
    life: int = 0  # how many workers of this rank have died before this one
    group: int = 0  # of those that share the data: the number of the one that was there when it joined
    sites: Sequence[Sequence[Peer]] = ()  # the workers of each site, by rank, if the run has sites

    @property
    def rank(self) -> int:
        return self.me.rank

    @property
    @abstractmethod
    def workers(self) -> Sequence[Peer]:
        """The workers in the run, by rank, as far as `receive` has told: who comes and goes while a node does
        not receive, it hears of when it does."""

    @property
    @abstractmethod
    def lost(self) -> Collection[Peer]:
        """Those that died, and did not finish, as far as `receive` has told."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[Peer]:
        """The servers, by rank."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether training is over: every worker is gone, and none will come."""

    @abstractmethod
    def alive(self, message: Message) -> bool:
        """Whether whoever sent this message is still in the run; one that came back is another sender."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: on the wall clock, or virtual."""

    @abstractmethod
    def send(self, to: Peer, kind: str, *tensors: Tensor, **fields: Field) -> None:
        """Sends one way; the tensors are snapshotted. Blocks while the receiver's queue is full."""

    @abstractmethod
    def ask(
        self, to: Peer, kind: str, *tensors: Tensor, into: Sequence[Tensor] = (), **fields: Field
    ) -> Reply:
        """Sends a request and returns at once. `tensors` and `into` are lent until the reply is in."""

    @abstractmethod
    def receive(self, *kinds: str) -> Message | None:
        """The next message of one of these kinds (of any, if none is named), in order of arrival.

        None tells that membership changed while waiting: look at `workers` again, and call again.
        """

    @abstractmethod
    def listen(self, hear: Callable[[Message | None], None], *kinds: str) -> None:
        """From here on, beside the script, has each message of these kinds heard as it comes, one at a time.

        `hear(None)` tells that membership changed. It must not wait for anybody: others wait for it. What it
        raises ends the run.
        """

    @abstractmethod
    def exclusive(self) -> AbstractContextManager[None]:
        """Around what the script's own thread and what it listens with must not do at the same time.

        No wait inside: whoever waits for this node would wait for both.
        """

    def expect(self, sender: Peer, kind: str, into: Sequence[Tensor]) -> Callable[[], None]:
        """A hint: the tensors of the next ask of this kind may be put `into` their place as they come.

        Whether they were, the message tells: its tensors lie there or elsewhere. Call what this returns when
        it is here, or is not wanted any longer: afterwards nothing is written there.
        """
        return lambda: None

    @abstractmethod
    def answer(self, message: Message, *tensors: Tensor, **fields: Field) -> None:
        """Answers an `ask`. The asker's `into` is filled before this returns or soon after; the tensors
        are snapshotted. The message's own tensors must not be used afterwards."""

    def all_reduce(self, *tensors: Tensor, op: str = "sum") -> None:
        """Replaces each tensor by its sum, mean, max or min over all workers, in place."""
        self.begin_all_reduce(*tensors, op=op).join()

    @abstractmethod
    def begin_all_reduce(self, *tensors: Tensor, op: str = "sum") -> Task:
        """The same, begun and not waited for. The tensors are lent until `join()` of what it returns.

        All workers begin the same collectives in the same order; they may be joined in any.
        """

    @abstractmethod
    def begin_coded_mean(self, coding: Coding, vectors: Sequence[Tensor], *flags: Tensor) -> Task:
        """Begins to replace what is coded of the vectors by its mean over all workers, in codes.

        Each gets the codes of all others and combines them; or, round a ring, they are decoded, added to and
        coded again at each hop. The flags, a few numbers, go along as they are, and become their mean. All
        are lent until `join()`.
        """

    @abstractmethod
    def broadcast(self, *tensors: Tensor, root: int = 0) -> None:
        """Overwrites each tensor with that of worker `root`, in place."""

    @abstractmethod
    def among(self, workers: Sequence[Peer]) -> Node:
        """This node among a part of the workers, of which it is one: `workers`, `rank` (its place among them,
        from 0) and collectives are those of the part. All else is as it is here.

        Each of the part asks for it; once is enough, for the same part is the same node.
        """

    @abstractmethod
    def spawn(self, function: Callable[..., None], *args: Any) -> Task:
        """Runs a function beside this one, for strategies that overlap communication with computing."""

    @abstractmethod
    def empty(self, count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """An uninitialised flat tensor in memory that this node can lend to its neighbours without a copy."""

    @abstractmethod
    def shared(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in memory that all workers of this host see under this name, zero at first. It stays
        when a worker dies, whoever asked for it first. UsageError if some workers are on another host."""

    @abstractmethod
    def lock(self, name: str) -> Lock:
        """The lock of this name; of the workers of this host, as `shared` is."""

    @abstractmethod
    def log(self, event: str, /, **fields: Any) -> None:
        """Adds a line to the event log of the run."""

    @abstractmethod
    def totals(self, *, steps: int, samples: int, compute_s: float, wait_s: float) -> None:
        """Notes what this node has done so far, for progress and the summary."""
