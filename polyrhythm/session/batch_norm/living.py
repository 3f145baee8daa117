"""The statistics of those that are there, where workers go on without one that dies.

A collective of all would wait for the dead. So each worker listens, and gives its statistics to whoever asks.
Workers that step together ask for those of a round, which is the how-manieth `agree` of the script: they are
given once the other has come to the same place, so all see the same. One that came late has missed rounds,
and where each goes at its own pace there are none: these ask for what the other has at the moment, and are
asked for that. BatchNorm may be writing then: each number is one that the worker has had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.message import Message
from polyrhythm.core.node import Node
from polyrhythm.core.peer import Peer

NOW = 0  # the round of whoever wants what there is at the moment


class Given(NamedTuple):
    """What one worker has."""

    tensors: tuple[Tensor, ...]
    samples: int  # that it has trained on


class Living:
    """What a worker shows the others, and sees of them."""

    def __init__(self, node: Node, own: Callable[[], Given], together: bool) -> None:
        self.node, self._own = node, own
        self._together = together and not node.incarnation
        self._round = NOW
        self._shown: dict[int, Given] = {}  # by round: the present one and the one before
        self._held: list[Message] = []  # asks for a round that this worker has not come to
        node.subscribe(self._hear, "norms")

    def all(self) -> dict[Peer, Given]:
        """What each has that is there, by rank; called by all that step together at the same place."""
        if not self._together:
            return self.now()
        own = self._own()
        with self.node.lock():
            # Nobody can be two rounds ahead of another: for the second it would need what that one shows.
            self._shown = {round_: each for round_, each in self._shown.items() if round_ == self._round}
            self._round += 1
            self._shown[self._round] = own
            held, self._held = self._held, []
        for message in held:
            self._hear(message)
        return self._ask(own, self._round)

    def now(self) -> dict[Peer, Given]:
        """What each that is there has at the moment, by rank."""
        return self._ask(self._own(), NOW)

    def _ask(self, own: Given, round_: int) -> dict[Peer, Given]:
        node = self.node
        others = [peer for peer in node.members.workers if peer != node.me]
        asked = {peer: node.request(peer, "norms", round=round_) for peer in others}
        given = {node.me: own}
        for peer, reply in asked.items():
            try:
                answer = reply.wait()
            except PeerLost:
                continue
            given[peer] = Given(tuple(each.clone() for each in answer.tensors), answer["samples"])
        return dict(sorted(given.items()))

    def _hear(self, message: Message | None) -> None:
        with self.node.lock():
            if message is None:
                self._held = [each for each in self._held if self.node.members.alive(each)]
                return
            round_ = message["round"]
            if self._together and round_ > self._round:
                self._held.append(message)
                return
            given = self._shown.get(round_)
        given = given or self._own()
        self.node.reply(message, *given.tensors, samples=given.samples)
