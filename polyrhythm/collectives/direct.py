"""All-reduce by direct exchange: every worker reduces one slice for all others.

Worker j owns slice j. Every other worker sends it its part of slice j in a request, and gets the reduced
slice in the reply. So each worker sends 2(n-1)/n of the vector, as in a ring, in two hops instead of 2(n-1).
Each slice is reduced by one worker in rank order, so all workers have the same bits. On one host the tensors
of a request are in shared memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.core.errors import PeerLost, PolyrhythmError, WaitError
from polyrhythm.model.vectors import split

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Use
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
    for distance in range(1, len(workers)):  # each starts with its neighbour, to spread the requests
        other = (mine + distance) % len(workers)
        theirs = part(other)
        replies.append(node.request(workers[other], f"reduce {number}", *theirs, into=theirs))
    own = part(mine)
    requests = gather(node, f"reduce {number}", workers)
    given = {request.sender: request.tensors for request in requests} | {node.me: own}
    for index, place in enumerate(own):
        if place.numel():
            # The reply overwrites the tensors of the request, block by block while they are in the cache. In
            # shared memory that is the requester's own tensor, so nothing is left to copy.
            outputs = [place, *(request.tensors[index] for request in requests)]
            reduce([given[worker][index].to(place.device) for worker in workers], op, outputs)
    for request in requests:
        node.reply(request, *request.tensors)
    for reply in replies:
        reply.wait()


def all_gather(
    node: Node, workers: Sequence[Peer], tensors: Sequence[Tensor], number: int
) -> list[Sequence[Tensor]]:
    """The tensors of each of these workers, in their order; lengths may differ."""
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


def exchange(
    node: Node,
    workers: Sequence[Peer],
    what: str,
    outgoing: Sequence[Sequence[Tensor]],
    use: Use,
    number: int,
) -> None:
    """Sends `outgoing[i]` to worker i of these, and calls `use` with what they have sent to this one."""
    mine, kind = workers.index(node.me), f"exchange {number}"
    replies = []
    for distance in range(1, len(workers)):
        other = (mine + distance) % len(workers)
        replies.append(node.request(workers[other], kind, *outgoing[other], what=what))
    requests = gather(node, kind, workers)
    for request in requests:
        if request["what"] != what:
            raise PolyrhythmError(
                f"{request.sender} is in {request['what']} but {node.me} is in {what}: all workers must call "
                "the same collectives in the same order"
            )
    given = {request.sender: request.tensors for request in requests} | {node.me: outgoing[mine]}
    use([given[worker] for worker in workers])
    for request in requests:
        node.reply(request)
    for reply in replies:
        reply.wait()


def broadcast(node: Node, workers: Sequence[Peer], tensors: Sequence[Tensor], root: int, number: int) -> None:
    """Overwrites each tensor with the one of worker `root`."""
    source, kind = next(worker for worker in workers if worker.rank == root), f"broadcast {number}"
    if node.me == source:
        replies = [node.request(worker, kind, *tensors) for worker in workers if worker != source]
        for reply in replies:
            reply.wait()
    else:
        (request,) = gather(node, kind, [source, node.me], workers)
        for tensor, given in zip(tensors, request.tensors, strict=True):
            tensor.copy_(given.view(tensor.shape))
        node.reply(request)


def gather(
    node: Node, kind: str, workers: Sequence[Peer], group: Sequence[Peer] | None = None
) -> list[Message]:
    """One request of this kind from every other worker.

    Raises `PeerLost` if one of them is gone, or one of the group that they may be waiting for has died.
    """
    requests: dict[Peer, Message] = {}
    while len(requests) < len(workers) - 1:
        try:
            request = node.receive(kind)
        except WaitError as error:
            silent = [worker for worker in workers if worker not in (*requests, node.me)]
            raise WaitError(f"{error}; no data from {', '.join(map(str, silent))}") from None
        if request is not None:
            requests[request.sender] = request
            continue
        lost = node.members.lost
        for worker in (*(each for each in group or () if each in lost), *workers):
            if worker not in (*requests, *node.members.workers):
                raise PeerLost(f"{node.me} waited in {kind!r} for {worker}, which is gone")
    return list(requests.values())
