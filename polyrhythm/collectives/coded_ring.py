"""The mean of codes that cannot be added up, round a ring: decoded, added to and coded again at each hop.

As in `ring`, worker p sends chunk p-t in turn t. What it gets it decodes and adds to its own, and codes the
sum to send it on; so each link carries 2(n-1)/n of what is coded, however many workers there are. A complete
chunk is coded once, by one worker, and then handed on as it is: all workers decode the same codes.

Each hop rounds, so the more workers, the more is lost; with feedback it is not lost, for whoever codes a
partial sum keeps what its code left out, and adds it to its own next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.collectives.ring import arrival, bounds
from polyrhythm.core.errors import PeerLost, WireError

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Coding
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer


def mean(node: Node, workers: Sequence[Peer], coding: Coding, vectors: Sequence[Tensor], number: int) -> None:
    """Replaces what is coded of the vectors by its mean over these workers."""
    n, p = len(workers), workers.index(node.me)
    left, right = workers[p - 1], workers[(p + 1) % n]
    pairs, codec, name = coding.pairs(vectors), coding.codec, f"hops {number}"
    totals = [values.clone() for values, _ in pairs]

    def coded(chunk: int) -> list[Tensor]:
        codes = []
        for total, (_, memory) in zip(totals, pairs, strict=True):
            low, high = bounds(total.numel(), n, chunk)
            kept = memory.part(low, high)
            codes.append(codec.send(total[low:high], kept))
            kept.sent()
        return codes

    def swap(turn: int, codes: Sequence[Tensor]) -> list[Tensor]:
        """Gives codes to the right, and takes as many from the left."""
        reply = node.request(right, f"{name} {turn}", *codes)
        try:
            message = arrival(node, left, f"{name} {turn}", f"{name} lost")
        except PeerLost as error:
            if right in node.members.workers:
                node.send(right, f"{name} lost", why=str(error))
            raise
        if len(message.tensors) != len(pairs):
            raise WireError(f"{left} sent {len(message.tensors)} codes where {codec} makes {len(pairs)}")
        given = [code.clone() for code in message.tensors]
        node.reply(message)
        reply.wait()
        return given

    for turn in range(n - 1):
        for code, total in zip(swap(turn, coded((p - turn) % n)), totals, strict=True):
            low, high = bounds(total.numel(), n, (p - turn - 1) % n)
            codec.decode(code, total[low:high])
    codes = {(p + 1) % n: coded((p + 1) % n)}
    for turn in range(n - 1):
        codes[(p - turn) % n] = swap(n - 1 + turn, codes[(p + 1 - turn) % n])
    coding.combine_chunks([codes[chunk] for chunk in range(n)], vectors)
