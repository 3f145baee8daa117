"""Exchanges BatchNorm statistics between workers that continue when one dies.

A collective of all workers would wait for a dead one. So each worker publishes its statistics, and replies to
requests for them while its script computes (see `core.published`).

Workers in lockstep publish one round at each `agree` and fetch the same round of the others, so all see the
same statistics. A replacement has missed rounds, and without lockstep there are none: these workers fetch the
current statistics of the others, and reply with their own current ones. BatchNorm may be writing at that
moment, so these statistics may mix two consecutive batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polyrhythm.core.message import Message
from polyrhythm.core.node import Node, others
from polyrhythm.core.peer import Peer
from polyrhythm.core.published import Key, Published, key_of

NOW = Key(0, 0)  # requests the current statistics; rounds count from 1


class WorkerStatistics(NamedTuple):
    """The statistics of one worker."""

    tensors: tuple[Tensor, ...]
    samples: int  # that it has trained on


class StatisticsExchange:
    """Publishes the statistics of one worker, `own`, and fetches those of the others."""

    def __init__(self, node: Node, own: Callable[[], WorkerStatistics], lockstep: bool) -> None:
        self.node, self._own = node, own
        self._in_rounds = lockstep and not node.incarnation
        self._round = NOW
        self._published = Published(node, "norms")
        node.subscribe(self._on_message, "norms")

    def all(self) -> dict[Peer, WorkerStatistics]:
        """The statistics of each worker, by rank. Workers in lockstep call it at the same point."""
        if not self._in_rounds:
            return self.now()
        own, before = self._own(), self._round
        self._round = Key(0, before.round + 1)
        # No worker is two rounds ahead of another: it needs the other's first round to finish its own.
        self._published.forget(before)
        self._published.publish(self._round, others(self.node), own.tensors, samples=own.samples)
        return self._fetch(own, self._round)

    def now(self) -> dict[Peer, WorkerStatistics]:
        """The current statistics of each worker, by rank."""
        return self._fetch(self._own(), NOW)

    def _fetch(self, own: WorkerStatistics, key: Key) -> dict[Peer, WorkerStatistics]:
        found = {self.node.me: own}
        for fetch in [self._published.fetch(peer, key) for peer in others(self.node)]:
            if message := fetch.wait():
                tensors = tuple(each.clone() for each in message.tensors)
                found[fetch.publisher] = WorkerStatistics(tensors, message["samples"])
        return dict(sorted(found.items()))

    def _on_message(self, message: Message | None) -> None:
        if message is None or (self._in_rounds and key_of(message) > NOW):
            self._published.on_message(message)
        else:
            own = self._own()
            self.node.reply(message, *own.tensors, samples=own.samples)
