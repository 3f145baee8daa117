"""Rounds in which each worker transfers vectors to one other worker, or to a few.

A transfer is a publication for these receivers (see `core.published`). It is kept until they confirm it, so
each transfer arrives exactly once; one to a worker that died without requesting it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.node import others
from polyrhythm.core.peer import Peer
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.decentralized.base import CohortWorker

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Field
    from polyrhythm.core.published import Fetch


class TransferWorker(CohortWorker):
    """Steps with its cohort, in rounds of transfers. Workers are named by their place in the cohort."""

    def peer(self, place: int) -> Peer:
        return Peer("worker", self.ranks[place % len(self.ranks)])

    def transfer(self, round_: int, places: Sequence[int], vectors: Sequence[Tensor], **fields: Field) -> int:
        """Transfers a copy of the vectors to the workers at these places; returns how many are there."""
        if not places:
            return 0
        copy = copied(vectors, self.published.spare_buffers(vectors))
        with self.node.lock():
            there = [self.peer(place) for place in places if self.peer(place) not in self.cohort.gone]
            for peer in there:  # one after another, so that they get replies in this order
                self.published.publish(self.cohort.key(round_), [peer], copy, **fields)
        return len(there)

    def fetch(self, round_: int, place: int, into: Sequence[Tensor], have: int | None = None) -> Fetch | None:
        """Requests the transfer from the worker at this place; None if that died."""
        if self.peer(place) in self.cohort.gone:
            return None
        return self.published.fetch(self.peer(place), self.cohort.key(round_), into=into, have=have)

    def swap(
        self, round_: int, place: int, mine: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Swaps several groups of vectors with the worker at this place; False if that died."""
        if not self.transfer(round_, [place], [part for group in mine for part in group]):
            return False
        fetch = self.fetch(round_, place, [part for group in theirs for part in group])
        if fetch is None or fetch.wait() is None:
            return False
        fetch.acknowledge()
        return True

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        super().on_membership(ranks, number)
        # A worker that this one does not know has just joined, or has died since the cohort was formed.
        there = {self.node.me, *others(self.node)}
        for peer in sorted({Peer("worker", rank) for rank in ranks} - there):
            try:
                self.node.request(peer, "read", start=0, stop=0).wait()
            except PeerLost:
                with self.node.lock():
                    self.cohort.gone.add(peer)
        self.catch_up()
