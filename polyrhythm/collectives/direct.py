"""All-reduce by direct exchange: every worker reduces one slice for all.

Worker j owns the j-th slice. Each worker asks every other to take its part of that one's slice and to give
back the slice reduced. So each sends 2(n-1)/n of the vector, as a ring does, in two hops instead of
2(n-1); and since a slice is reduced by one worker in rank order, the result is the same bits everywhere.
On one host what is asked lies in shared memory, and nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.model.vectors import split

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


def all_reduce(node: Node, workers: Sequence[Peer], tensors: Sequence[Tensor], op: str, number: int) -> None:
    """Replaces each tensor by its reduction over these workers; `number` tells the collectives apart."""
    mine = workers.index(node.me)
    cuts = [split(tensor.numel(), len(workers)) for tensor in tensors]

    def part(slice_: int) -> tuple[Tensor, ...]:
        return tuple(tensor[slice(*cut[slice_])] for tensor, cut in zip(tensors, cuts, strict=True))

    replies = []
    for distance in range(
        1, len(workers)
    ):  # each starts with its neighbour, so that nobody is asked by all at once
        other = (mine + distance) % len(workers)
        asked = part(other)
        replies.append(node.request(workers[other], f"reduce {number}", *asked, into=asked))
    own = part(mine)
    requests = gather(node, f"reduce {number}", workers)
    given = {request.sender: request.tensors for request in requests} | {node.me: own}
    for index, place in enumerate(own):
        if place.numel():
            # What was asked is overwritten by the answer, block by block while it is in the cache: where it
            # lies in shared memory, that is its place, and there is nothing left to copy.
            outputs = [place, *(request.tensors[index] for request in requests)]
            reduce([given[worker][index].to(place.device) for worker in workers], op, outputs)
    for request in requests:
        node.reply(request, *request.tensors)
    for reply in replies:
        reply.wait()


def all_gather(
    node: Node, workers: Sequence[Peer], tensors: Sequence[Tensor], number: int
) -> list[Sequence[Tensor]]:
    """What each of these workers gives, in their order: tensors of whatever lengths."""
    mine, kind = workers.index(node.me), f"gather {number}"
    replies = [
        node.request(workers[(mine + distance) % len(workers)], kind, *tensors)
        for distance in range(1, len(workers))
    ]
    given: dict[Peer, Sequence[Tensor]] = {node.me: tensors}
    for request in gather(node, kind, workers):
        given[request.sender] = [tensor.clone() for tensor in request.tensors]
        node.reply(request)
    for reply in replies:
        reply.wait()
    return [given[worker] for worker in workers]


def broadcast(node: Node, workers: Sequence[Peer], tensors: Sequence[Tensor], root: int, number: int) -> None:
    """Overwrites each tensor with that of worker `root`."""
    if node.rank == root:
        for request in gather(node, f"broadcast {number}", workers):
            node.reply(request, *tensors)
    else:
        source = next(worker for worker in workers if worker.rank == root)
        node.request(source, f"broadcast {number}", into=tensors).wait()


def gather(node: Node, kind: str, workers: Sequence[Peer]) -> list[Message]:
    """One request of this kind from every other worker, or `PeerLost` once one of them is gone."""
    requests: dict[Peer, Message] = {}
    while len(requests) < len(workers) - 1:
        try:
            request = node.receive(kind)
        except WaitError as error:
            silent = [worker for worker in workers if worker not in (*requests, node.me)]
            raise WaitError(f"{error}; {', '.join(map(str, silent))} did not") from None
        if request is not None:
            requests[request.sender] = request
            continue
        for worker in (*node.members.lost, *workers):
            if worker not in (*requests, *node.members.workers):
                raise PeerLost(f"{node.me} waited in {kind!r} for {worker}, which is gone")
    return list(requests.values())
