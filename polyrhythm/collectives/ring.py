"""Ring all-reduce: every worker communicates with its two neighbours only (Patarasuk, Yuan 2009).

Every vector is cut into n chunks, and worker p sends to worker p+1. In step t it sends chunk p-t and receives
chunk p-t-1 (all modulo n). In the first n-1 steps, *share-reduce* (reduce-scatter), it reduces the received
chunk into its own; then worker p holds chunk p+1 complete. In the other n-1 steps, *share-only* (all-gather),
it overwrites its own chunk with the received one. So each worker sends 2(n-1)/n of the vectors, and all links
carry equally much.

Each chunk is reduced along one path and then copied, so all workers have the same bits. They differ from a
sum in rank order, but do not depend on the other vectors of the same call.

A chunk travels in segments. A segment that has arrived is reduced and sent on at once, while the next one
arrives, so that sending, receiving and adding overlap.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyrhythm.collectives.arithmetic import flat_views
from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer

SEGMENT = 1 << 22  # the most bytes of a segment; with smaller ones Python takes longer than the network
AHEAD = 4  # segments that a worker may send before it receives; twice as many may lack a reply


@dataclass(frozen=True)
class Turn:
    """One step of one worker, as reported to `trace` when it is over."""

    phase: str  # share-reduce or share-only
    step: int  # from 0 in each phase
    rank: int
    to: int
    sent: int  # the chunk that the worker sent
    elements: int  # of that chunk
    nbytes: int
    received: int  # the chunk that it received


Trace = Callable[[Turn], None]


class RingLinks(ABC):
    """The links to the two neighbours in the ring. Segments are numbered and arrive in order."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        """Starts sending segment `out` to the right, and receiving one from the left.

        `out` must not change until `wait_sent`. Without `fold` the segment may be received into `places`.
        """

    @abstractmethod
    def arrived(self, number: int) -> Sequence[Tensor]:
        """Waits for a segment from the left."""

    @abstractmethod
    def release(self, number: int) -> None:
        """Called when the received segment has been used."""

    @abstractmethod
    def wait_sent(self, number: int) -> None:
        """Waits until the segment sent with this number, if any, may be overwritten."""


def all_reduce(
    node: Node,
    workers: Sequence[Peer],
    tensors: Sequence[Tensor],
    op: str,
    number: int,
    trace: Trace | None = None,
    group: Sequence[Peer] = (),
) -> None:
    """Replaces each tensor by its reduction over these workers; `number` identifies the collective.

    `group`: those whose death ends it, if they are more than these workers.
    """
    links = _NodeLinks(node, workers, number, group or workers)
    try:
        reduce_in_ring(links, tensors, op, trace)
    except PeerLost as error:
        links.report_loss(error)
        raise
    finally:
        links.close()


def all_reduce_distributed(
    tensors: Tensor | Sequence[Tensor], op: str = "sum", group: Any = None, trace: Trace | None = None
) -> None:
    """Replaces each tensor by its sum, mean, max or min over a process group of `torch.distributed`.

    Works in any script with an initialized process group; tensors must be on a device of its backend.
    """
    import torch

    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    reduce_in_ring(_TorchLinks(group), given, op, trace)


def reduce_in_ring(links: RingLinks, tensors: Sequence[Tensor], op: str, trace: Trace | None = None) -> None:
    """The algorithm, for any links to the neighbours."""
    n, p = links.size, links.rank
    vectors = flat_views(tensors, op)
    if n == 1:
        return
    # A sum of 16-bit floats overflows earlier than their mean, so they are divided first.
    divided_first = op == "mean" and [vector for vector in vectors if vector.element_size() < 4]
    for vector in divided_first or ():
        vector.div_(n)
    longest = sum(-(-vector.numel() // n) * vector.element_size() for vector in vectors)
    segments = max(1, -(-longest // SEGMENT))
    turns, share_only = 2 * (n - 1), (n - 1) * segments

    def views(chunk: int, segment: int) -> list[Tensor]:
        return [vector[slice(*bounds(vector.numel(), n, chunk, segments, segment))] for vector in vectors]

    def exchange(number: int) -> None:
        turn, segment = divmod(number, segments)
        # In share-only, a received segment overwrites one that was sent this many segments before.
        links.wait_sent(number - share_only)
        out, places = views((p - turn) % n, segment), views((p - turn - 1) % n, segment)
        links.exchange(number, out, places, fold=number < share_only)

    # Segment i + ahead is sent after segment i was received. It is one of the worker's own, or was received
    # before, because ahead <= segments. There is no deadlock: a worker only waits for one that is behind it.
    ahead = min(segments, AHEAD)
    for number in range(ahead):
        exchange(number)
    for number in range(turns * segments):
        turn, segment = divmod(number, segments)
        places = views((p - turn - 1) % n, segment)
        received = links.arrived(number)
        for place, piece in zip(places, received, strict=True):
            if number >= share_only:
                if piece.data_ptr() != place.data_ptr():
                    place.copy_(piece)
                continue
            _fold(place, piece, op)
            if op == "mean" and turn == n - 2 and place.element_size() >= 4:  # complete, on this worker only
                place.div_(n)
        links.release(number)
        if number + ahead < turns * segments:
            exchange(number + ahead)
        if trace is not None and segment == segments - 1:
            trace(_turn(vectors, n, p, turn))
    for number in range(share_only, turns * segments):
        links.wait_sent(number)


def bounds(count: int, chunks: int, chunk: int, segments: int = 1, segment: int = 0) -> tuple[int, int]:
    """Start and stop of a segment of a chunk, in a vector of `count` elements. Later chunks are longer.

    >>> [bounds(17, 4, chunk) for chunk in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 17)]
    """
    start, stop = count * chunk // chunks, count * (chunk + 1) // chunks
    length = stop - start
    return start + length * segment // segments, start + length * (segment + 1) // segments


def sent_elements(count: int, workers: int, rank: int) -> int:
    """The number of elements that a worker sends: in each phase all chunks except one.

    >>> [sent_elements(17, 4, rank) for rank in range(4)]
    [26, 25, 25, 26]
    """
    if workers == 1:
        return 0
    skipped = [bounds(count, workers, (rank + after) % workers) for after in (1, 2)]
    return 2 * count - sum(stop - start for start, stop in skipped)


def arrival(node: Node, left: Peer, kind: str, lost: str, group: Sequence[Peer]) -> Message:
    """Receives a message from the left neighbour; raises PeerLost if it is gone, or one of the group died."""
    while True:
        try:
            message = node.receive(kind, lost)
        except WaitError as error:
            raise WaitError(f"{error}; no data from {left}, which may itself be blocked") from None
        if message is None:
            # Workers that have finished may be gone, but the left neighbour leaves after its last segment.
            for peer in (*(each for each in group if each in node.members.lost), left):
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
    elif op == "product":
        place.mul_(piece)
    else:
        place.add_(piece)


class _NodeLinks(RingLinks):
    """Links over a `Node`: a segment is a request, and its reply is only a header.

    So a segment is sent from the tensor itself, on one host it is read from there, and a broken connection
    loses and repeats nothing.
    """

    def __init__(self, node: Node, workers: Sequence[Peer], number: int, group: Sequence[Peer]) -> None:
        self.rank, self.size = workers.index(node.me), len(workers)
        self._node, self._group, self._name = node, group, f"ring {number}"
        self._left, self._right = workers[self.rank - 1], workers[(self.rank + 1) % self.size]
        self._replies: dict[int, Reply] = {}
        self._places: dict[int, Sequence[Tensor]] = {}
        self._expected: dict[
            int, Callable[[], None]
        ] = {}  # cancels receiving a segment directly into its place
        self._message: Any = None

    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        self.wait_sent(number - 2 * AHEAD)  # a connection pauses while many messages are unread
        self._places[number] = places
        if not fold:
            self._expected[number] = self._node.expect(self._left, f"{self._name} {number}", places)
        self._replies[number] = self._node.request(self._right, f"{self._name} {number}", *out)

    def arrived(self, number: int) -> Sequence[Tensor]:
        name = self._name
        message = arrival(self._node, self._left, f"{name} {number}", f"{name} lost", self._group)
        if number in self._expected:
            self._expected.pop(number)()
        expected = [(place.dtype, place.numel()) for place in self._places.pop(number)]
        given = [(piece.dtype, piece.numel()) for piece in message.tensors]
        if given != expected:
            raise WireError(
                f"{self._left} sent {given} but {self._node.me} has {expected}: all workers must reduce "
                "tensors of the same sizes and dtypes"
            )
        self._message = message
        return message.tensors

    def release(self, number: int) -> None:
        message, self._message = self._message, None
        self._node.reply(message)

    def wait_sent(self, number: int) -> None:
        if (reply := self._replies.pop(number, None)) is not None:
            reply.wait()

    def close(self) -> None:
        while self._expected:
            self._expected.popitem()[1]()

    def report_loss(self, error: PeerLost) -> None:
        """Tells the right neighbour which worker is gone, since it may not be waiting for that one itself."""
        if self._right in self._node.members.workers:
            with contextlib.suppress(PolyrhythmError):
                self._node.send(self._right, f"{self._name} lost", why=str(error))


class _TorchLinks(RingLinks):
    """Links over `torch.distributed`, by point-to-point messages."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            raise UsageError("there is no process group: call torch.distributed.init_process_group first")
        self._group = group if group is not None else distributed.group.WORLD
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this process is not in the process group")
        ranks = distributed.get_process_group_ranks(self._group)
        self._left, self._right = ranks[self.rank - 1], ranks[(self.rank + 1) % self.size]
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._receiving: dict[int, tuple[Sequence[Tensor], Sequence[Any]]] = {}
        self._sending: dict[int, Sequence[Any]] = {}

    def exchange(self, number: int, out: Sequence[Tensor], places: Sequence[Tensor], fold: bool) -> None:
        import torch.distributed as dist

        into = [self._buffer(number, index, place) for index, place in enumerate(places)] if fold else places
        operations = [
            *(dist.P2POp(dist.isend, piece, self._right, self._group, number) for piece in out if len(piece)),
            *(dist.P2POp(dist.irecv, place, self._left, self._group, number) for place in into if len(place)),
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        sends = sum(1 for piece in out if len(piece))
        separate = len(works) == len(operations)  # some backends return one work for all
        self._sending[number] = works[:sends] if separate else works
        self._receiving[number] = into, works[sends:] if separate else works

    def _buffer(self, number: int, index: int, place: Tensor) -> Tensor:
        """Memory for a segment that will be reduced. At most AHEAD segments are in flight."""
        import torch

        slot = number % AHEAD, index
        if slot not in self._buffers or len(self._buffers[slot]) < len(place):
            self._buffers[slot] = torch.empty_like(place)
        return self._buffers[slot][: len(place)]

    def arrived(self, number: int) -> Sequence[Tensor]:
        into, works = self._receiving.pop(number)
        self._wait(works, self._left, "from")
        return into

    def release(self, number: int) -> None:
        pass

    def wait_sent(self, number: int) -> None:
        self._wait(self._sending.pop(number, ()), self._right, "to")

    def _wait(self, works: Sequence[Any], other: int, way: str) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} waited for a segment {way} rank {other}: {error}") from error
