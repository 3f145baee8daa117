"""Exchanges buffers, such as BatchNorm's statistics, between workers that continue when one dies or leaves.

A collective of all workers would wait for a dead one. So each worker publishes its buffers, and replies to
requests for them while its script computes (see `core.published`).

Workers in lockstep publish one round at each `agree` and fetch the same round of the others, so all see the
same buffers. A replacement has missed rounds, and without lockstep there are none: these workers fetch the
current buffers of the others, and reply with their own current ones. BatchNorm may be writing at that moment,
so its statistics may mix two consecutive batches.

Where a worker leaves before the others are done, the lowest rank hands its buffers over before it leaves, so
that all see the buffers of one worker to the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.message import Message
from polyrhythm.core.node import Node, others
from polyrhythm.core.peer import Peer
from polyrhythm.core.published import Key, Published, key_of

NOW = Key(0, 0)  # requests the current buffers; rounds count from 1
LAST = "last norms"  # the kind of the message with the buffers of a worker that leaves


class WorkerStatistics(NamedTuple):
    """The buffers of one worker."""

    tensors: tuple[Tensor, ...]
    samples: int  # that it has trained on


def lowest(given: dict[Peer, WorkerStatistics]) -> WorkerStatistics:
    """The buffers of the lowest rank that has trained: a new replacement has not."""
    return next((each for each in given.values() if each.samples), next(iter(given.values())))


class StatisticsExchange:
    """Publishes the buffers of one worker, `own`, and fetches those of the others.

    `workers_stay`: no worker leaves before all are done.
    """

    def __init__(
        self, node: Node, own: Callable[[], WorkerStatistics], lockstep: bool, workers_stay: bool
    ) -> None:
        self.node, self._own, self._workers_stay = node, own, workers_stay
        self._in_rounds = lockstep and not node.incarnation
        self._round = NOW
        self._left: dict[Peer, WorkerStatistics] = {}  # of workers that have left, or are about to
        self._published = Published(node, "norms")
        node.subscribe(self._on_message, "norms", LAST)

    def all(self) -> dict[Peer, WorkerStatistics]:
        """The buffers of each worker, by rank. Workers in lockstep call it at the same point."""
        if not self._in_rounds:
            return self.now()
        own, before = self._own(), self._round
        self._round = Key(0, before.round + 1)
        # No worker is two rounds ahead of another: it needs the other's first round to finish its own.
        self._published.forget(before)
        self._published.publish(self._round, others(self.node), own.tensors, samples=own.samples)
        return self._fetch(own, self._round)

    def now(self) -> dict[Peer, WorkerStatistics]:
        """The current buffers of each worker, by rank."""
        return self._fetch(self._own(), NOW)

    def lowest(self, final: bool = False) -> dict[Peer, WorkerStatistics]:
        """Those of the lowest rank that has trained, if any, and of ranks below it, which have not.

        Workers in lockstep call it at the same point, except at the end (`final`).
        """
        if self._in_rounds and not final:
            return self.all()
        found: dict[Peer, WorkerStatistics] = {}
        with self.node.lock():
            peers = sorted({self.node.me, *others(self.node), *self._left})
        for peer in peers:
            if peer == self.node.me:
                found[peer] = self._own()
            elif peer in self._left:
                found[peer] = self._left[peer]
            elif (message := self._published.fetch(peer, NOW).wait()) is not None:
                found[peer] = _received(message)
            elif peer in self._left:  # it left meanwhile
                found[peer] = self._left[peer]
            if peer in found and found[peer].samples:
                break
        return found

    def leave(self) -> None:
        """This worker has taken its last step. Others may still ask for the buffers of the lowest rank."""
        with self.node.lock():
            lower = any(peer < self.node.me for peer in (*others(self.node), *self._left))
        if self._workers_stay or lower:
            return
        own = self._own()
        requests = [
            self.node.request(peer, LAST, *own.tensors, samples=own.samples) for peer in others(self.node)
        ]
        for request in requests:
            with contextlib.suppress(PeerLost):
                request.wait()

    def _fetch(self, own: WorkerStatistics, key: Key) -> dict[Peer, WorkerStatistics]:
        found = {self.node.me: own}
        for fetch in [self._published.fetch(peer, key) for peer in others(self.node)]:
            if message := fetch.wait():
                found[fetch.publisher] = _received(message)
        return dict(sorted(found.items()))

    def _on_message(self, message: Message | None) -> None:
        if message is not None and message.kind == LAST:
            with self.node.lock():
                self._left[message.sender] = _received(message)
            self.node.reply(message)
        elif message is None or (self._in_rounds and key_of(message) > NOW):
            self._published.on_message(message)
        else:
            own = self._own()
            self.node.reply(message, *own.tensors, samples=own.samples)


def _received(message: Message) -> WorkerStatistics:
    return WorkerStatistics(tuple(each.clone() for each in message.tensors), message["samples"])
