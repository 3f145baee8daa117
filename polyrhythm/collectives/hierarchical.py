"""All-reduce between hosts with several workers each: shared memory inside a host, a ring between hosts.

The workers of a host reduce into the buffers of their first worker, one slice each. The first workers of all
hosts all-reduce in a ring, and the others copy the result. So a host's link carries 2(h-1)/h of the vector
for h hosts, for any number of workers per host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives import ring
from polyrhythm.collectives.shared_memory import SharedMemory

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


def all_reduce(
    node: Node,
    inside: SharedMemory | None,
    firsts: Sequence[Peer],
    workers: Sequence[Peer],
    tensors: Sequence[Tensor],
    op: str,
    number: int,
) -> None:
    """Replaces each tensor by its reduction over these workers; `firsts` are the first workers of each host.

    `inside` is None for a worker that is alone on its host.
    """
    fold = "sum" if op == "mean" else op
    places, staged = inside.stage(tensors) if inside else (list(tensors), [])
    if inside:
        inside.begin(places, f"{fold} to first").join()
    if node.me in firsts:
        ring.all_reduce(node, firsts, places, fold, number, group=workers)
        if op == "mean":
            for place in places:
                place.div_(len(workers))
    if inside:
        inside.begin(places, "copy of first").join()
        inside.unstage(staged)
