"""All-reduce by a ring: every worker talks to its two neighbours only (Patarasuk, Yuan 2009).

Every vector is cut into n chunks, and worker p sends to worker p+1. In turn t it sends chunk p-t and gets
chunk p-t-1 (all modulo n). In the first n-1 turns, *share-reduce*, it folds what it gets into its own chunk;
then worker p holds chunk p+1 complete. In the other n-1, *share-only*, it overwrites its own with what it
gets. So each sends 2(n-1)/n of the vectors, and no link carries more than any other.

Each chunk is reduced along one path and then copied: all workers have the same bits. They are not those of a
sum in rank order, but those of a vector do not depend on what else is reduced in the same call.

A chunk travels in segments. A segment that has arrived is folded and goes on at once, while the next is on
its way, so that sending, receiving and adding overlap.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyrhythm.collectives.arithmetic import checked
from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer

SEGMENT = 1 << 22  # bytes of a segment at most: with smaller ones Python takes longer than the wire
AHEAD = 4  # segments that a worker may have sent more than it has received; twice as many may be unanswered


@dataclass(frozen=True)
class Turn:
    """What one worker did in one turn: `trace` is called with it when the turn is over."""

    phase: str  # share-reduce or share-only
    step: int  # from 0 in each phase
    rank: int
    to: int
    sent: int  # the chunk that it sent,
    elements: int  # how many numbers that were,
    nbytes: int
    received: int  # and the chunk that it got meanwhile


Trace = Callable[[Turn], None]


class Port(ABC):
    """The way to the two neighbours in the ring. Segments have numbers, and come in their order."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        """Begins to send a segment to the right and expects one from the left. `out` is lent until `settle`.

        What comes may be put in its `places` as it comes, unless it has to be folded into them.
        """

    @abstractmethod
    def arrived(self, number: int) -> Sequence[Tensor]:
        """Waits for a segment from the left."""

    @abstractmethod
    def release(self, number: int) -> None:
        """What arrived is used up."""

    @abstractmethod
    def settle(self, number: int) -> None:
        """Waits until what was sent, if anything was under this number, may be overwritten."""


def all_reduce(
    node: Node,
    workers: Sequence[Peer],
    tensors: Sequence[Tensor],
    op: str,
    number: int,
    trace: Trace | None = None,
) -> None:
    """Replaces each tensor by its reduction over these workers; `number` tells the collectives apart."""
    port = _NodePort(node, workers, number)
    try:
        reduce_in_ring(port, tensors, op, trace)
    except PeerLost as error:
        port.pass_on(error)
        raise
    finally:
        port.close()


def all_reduce_distributed(
    tensors: Tensor | Sequence[Tensor], op: str = "sum", group: Any = None, trace: Trace | None = None
) -> None:
    """Replaces each tensor by its sum, mean, max or min over a process group of `torch.distributed`.

    For any script with an initialised group: tensors are on the device that its backend works with.
    """
    import torch

    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    reduce_in_ring(_DistributedPort(group), given, op, trace)


def reduce_in_ring(port: Port, tensors: Sequence[Tensor], op: str, trace: Trace | None = None) -> None:
    """The ring itself, whatever the way to the neighbours."""
    n, p = port.size, port.rank
    vectors = checked(tensors, op)
    if n == 1:
        return
    # The sum of short floats overflows sooner than their mean.
    first = op == "mean" and [vector for vector in vectors if vector.element_size() < 4]
    for vector in first or ():
        vector.div_(n)
    longest = sum(-(-vector.numel() // n) * vector.element_size() for vector in vectors)
    segments = max(1, -(-longest // SEGMENT))
    turns, share_only = 2 * (n - 1), (n - 1) * segments

    def views(chunk: int, segment: int) -> list[Tensor]:
        return [vector[slice(*bounds(vector.numel(), n, chunk, segments, segment))] for vector in vectors]

    def exchange(number: int) -> None:
        turn, segment = divmod(number, segments)
        # What arrives in share-only takes the place of what was lent as many turns before.
        port.settle(number - share_only)
        out, places = views((p - turn) % n, segment), views((p - turn - 1) % n, segment)
        port.exchange(number, out, places, fold=number < share_only)

    # Segment i + ahead goes out when segment i was taken in. It is one of the worker's own, or was taken in
    # before, since ahead <= segments. And nobody waits forever: who waits is waiting for one who is behind.
    ahead = min(segments, AHEAD)
    for number in range(ahead):
        exchange(number)
    for number in range(turns * segments):
        turn, segment = divmod(number, segments)
        places = views((p - turn - 1) % n, segment)
        came = port.arrived(number)
        for place, piece in zip(places, came, strict=True):
            if number >= share_only:
                if piece.data_ptr() != place.data_ptr():
                    place.copy_(piece)
                continue
            _fold(place, piece, op)
            if op == "mean" and turn == n - 2 and place.element_size() >= 4:  # complete, and here only
                place.div_(n)
        port.release(number)
        if number + ahead < turns * segments:
            exchange(number + ahead)
        if trace is not None and segment == segments - 1:
            trace(_turn(vectors, n, p, turn))
    for number in range(share_only, turns * segments):
        port.settle(number)


def bounds(count: int, chunks: int, chunk: int, segments: int = 1, segment: int = 0) -> tuple[int, int]:
    """Where a segment of a chunk of so many elements begins and ends. The longer chunks are the later ones.

    >>> [bounds(17, 4, chunk) for chunk in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 17)]
    """
    start, stop = count * chunk // chunks, count * (chunk + 1) // chunks
    length = stop - start
    return start + length * segment // segments, start + length * (segment + 1) // segments


def sent_elements(count: int, workers: int, rank: int) -> int:
    """How many elements a worker sends: in each phase all chunks but one.

    >>> [sent_elements(17, 4, rank) for rank in range(4)]
    [26, 25, 25, 26]
    """
    if workers == 1:
        return 0
    skipped = [bounds(count, workers, (rank + after) % workers) for after in (1, 2)]
    return 2 * count - sum(stop - start for start, stop in skipped)


def arrival(node: Node, left: Peer, kind: str, lost: str) -> Message:
    """A message of this kind from the left neighbour; PeerLost if it, or one before it, is gone."""
    while True:
        try:
            message = node.receive(kind, lost)
        except WaitError as error:
            raise WaitError(f"{error}; {left} did not, or somebody before it in the ring") from None
        if message is None:
            # One that finished its part may be gone: but the left neighbour goes after its last segment.
            for peer in (*node.members.lost, left):
                if peer not in node.members.workers:
                    raise PeerLost(f"{node.me} waited in {kind!r} for {peer}, which is gone")
        elif message.kind == lost:
            raise PeerLost(message["why"])
        else:
            return message


def _turn(vectors: Sequence[Tensor], n: int, p: int, turn: int) -> Turn:
    phase, step = divmod(turn, n - 1)
    sent = (p - turn) % n
    lengths = [stop - start for start, stop in (bounds(vector.numel(), n, sent) for vector in vectors)]
    nbytes = sum(length * v.element_size() for length, v in zip(lengths, vectors, strict=True))
    name = "share-only" if phase else "share-reduce"
    return Turn(name, step, p, (p + 1) % n, sent, sum(lengths), nbytes, (p - turn - 1) % n)


def _fold(place: Tensor, piece: Tensor, op: str) -> None:
    import torch

    if piece.device != place.device:
        piece = piece.to(place.device)
    if op == "max":
        torch.maximum(place, piece, out=place)
    elif op == "min":
        torch.minimum(place, piece, out=place)
    else:
        place.add_(piece)


class _NodePort(Port):
    """Over a `Node`: a segment is an ask, its answer a header only. So what is sent lies in its place, on one
    host it is read from there, and a connection that breaks loses and repeats nothing."""

    def __init__(self, node: Node, workers: Sequence[Peer], number: int) -> None:
        self.rank, self.size = workers.index(node.me), len(workers)
        self._node, self._name = node, f"ring {number}"
        self._left, self._right = workers[self.rank - 1], workers[(self.rank + 1) % self.size]
        self._replies: dict[int, Reply] = {}
        self._places: dict[int, Sequence[Tensor]] = {}
        self._kept: dict[int, Callable[[], None]] = {}  # places in which segments are received at once
        self._message: Any = None

    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        self.settle(number - 2 * AHEAD)  # a connection rests while many messages are unreceived
        self._places[number] = places
        if not fold:
            self._kept[number] = self._node.expect(self._left, f"{self._name} {number}", places)
        self._replies[number] = self._node.request(self._right, f"{self._name} {number}", *out)

    def arrived(self, number: int) -> Sequence[Tensor]:
        message = arrival(self._node, self._left, f"{self._name} {number}", f"{self._name} lost")
        if number in self._kept:
            self._kept.pop(number)()
        expected = [(place.dtype, place.numel()) for place in self._places.pop(number)]
        given = [(piece.dtype, piece.numel()) for piece in message.tensors]
        if given != expected:
            raise WireError(
                f"{self._left} sent {given} where {self._node.me} has {expected}: all workers must reduce "
                "tensors of the same sizes and dtypes"
            )
        self._message = message
        return message.tensors

    def release(self, number: int) -> None:
        message, self._message = self._message, None
        self._node.reply(message)

    def settle(self, number: int) -> None:
        if (reply := self._replies.pop(number, None)) is not None:
            reply.wait()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1]()

    def pass_on(self, error: PeerLost) -> None:
        """Tells the right neighbour who is gone: it may be somebody that it does not wait for itself."""
        if self._right in self._node.members.workers:
            with contextlib.suppress(PolyrhythmError):
                self._node.send(self._right, f"{self._name} lost", why=str(error))


class _DistributedPort(Port):
    """Over `torch.distributed`, point to point."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            raise UsageError("there is no process group: call torch.distributed.init_process_group first")
        self._group = group if group is not None else distributed.group.WORLD
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this process is not in the process group that it shall reduce with")
        everyone = distributed.get_process_group_ranks(self._group)
        self._left, self._right = everyone[self.rank - 1], everyone[(self.rank + 1) % self.size]
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._coming: dict[int, tuple[Sequence[Tensor], Sequence[Any]]] = {}
        self._going: dict[int, Sequence[Any]] = {}

    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        import torch.distributed as dist

        into = [self._room(number, index, place) for index, place in enumerate(places)] if fold else places
        operations = [
            *(dist.P2POp(dist.isend, piece, self._right, self._group, number) for piece in out if len(piece)),
            *(dist.P2POp(dist.irecv, place, self._left, self._group, number) for place in into if len(place)),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        sends = sum(1 for piece in out if len(piece))
        apart = len(works) == len(operations)  # otherwise one of them stands for all
        self._going[number] = works[:sends] if apart else works
        self._coming[number] = into, works[sends:] if apart else works

    def _room(self, number: int, index: int, place: Tensor) -> Tensor:
        """Memory for a piece that will be folded. No more than AHEAD segments are on their way at a time."""
        import torch

        slot = number % AHEAD, index
        if slot not in self._rooms or len(self._rooms[slot]) < len(place):
            self._rooms[slot] = torch.empty_like(place)
        return self._rooms[slot][: len(place)]

    def arrived(self, number: int) -> Sequence[Tensor]:
        into, works = self._coming.pop(number)
        self._wait(works, self._left, "from")
        return into

    def release(self, number: int) -> None:
        pass

    def settle(self, number: int) -> None:
        self._wait(self._going.pop(number, ()), self._right, "to")

    def _wait(self, works: Sequence[Any], other: int, way: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} waited for a segment {way} rank {other}: {error}") from error
