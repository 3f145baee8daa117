"""The mean of codes that cannot be summed, in a ring: decoded, added and encoded again at each hop.

As in `ring`, worker p sends chunk p-t in step t. It decodes the chunk it receives, adds it to its own and
encodes the sum for the next hop, so each link carries 2(n-1)/n of the codes for any number of workers. A
complete chunk is encoded once, by one worker, and then passed on unchanged, so all workers decode the same.

Each hop rounds, so more workers lose more precision. With error feedback nothing is lost: the worker that
encodes a partial sum keeps the residual of its code, and adds it to its own values in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives.ring import arrival
from polyrhythm.core.errors import PeerLost, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Coding
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


def mean(node: Node, workers: Sequence[Peer], coding: Coding, vectors: Sequence[Tensor], number: int) -> None:
    """Replaces the segments that the codec encodes by their mean over these workers."""
    n, p = len(workers), workers.index(node.me)
    left, right = workers[p - 1], workers[(p + 1) % n]
    name = f"hops {number}"
    totals = [values.clone() for values in coding.values(vectors)]

    def swap(turn: int, codes: Sequence[Tensor]) -> list[Tensor]:
        """Sends codes to the right neighbour, and receives as many from the left one."""
        reply = node.request(right, f"{name} {turn}", *codes)
        try:
            message = arrival(node, left, f"{name} {turn}", f"{name} lost", workers)
        except PeerLost as error:
            if right in node.members.workers:
                node.send(right, f"{name} lost", why=str(error))
            raise
        if len(message.tensors) != len(totals):
            raise WireError(
                f"{left} sent {len(message.tensors)} codes, but {coding.codec} makes {len(totals)}"
            )
        given = [code.clone() for code in message.tensors]
        node.reply(message)
        reply.wait()
        return given

    for turn in range(n - 1):
        codes = swap(turn, coding.encode_chunk(totals, (p - turn) % n, n))
        coding.add_chunk(codes, totals, (p - turn - 1) % n, n)
    mine = (p + 1) % n
    chunks = {mine: coding.encode_chunk(totals, mine, n)}
    for turn in range(n - 1):
        chunks[(p - turn) % n] = swap(n - 1 + turn, chunks[(p + 1 - turn) % n])
    coding.combine_chunks([chunks[chunk] for chunk in range(n)], vectors)
