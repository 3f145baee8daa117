"""Verdicts: how several servers apply the same groups of pushes.

Where pushes are held until their group is applied, several servers must form the same groups. If each chose
by itself, every worker might be held by another server, and none could push what the others wait for. So the
first server decides, and sends verdicts to the others: these pushes are a group, this one came too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from polyrhythm.core.message import Message
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.strategies.server.updates import Name, PushedUpdate

if TYPE_CHECKING:
    from polyrhythm.core.node import Node

What = Literal["group", "drop", "final"]


class Verdict(NamedTuple):
    """A decision of the first server, and those of its pushes that have arrived here."""

    what: What
    pushes: list[PushedUpdate]


class Verdicts:
    """The verdicts that a server gives, if it is the first, or carries out."""

    def __init__(self, node: Node, needed: bool) -> None:
        several = needed and len(node.members.servers) > 1
        self.leads, self.follows = several and node.rank == 0, several and node.rank > 0
        self.number = 0  # verdicts given or carried out so far
        self.pending: dict[Name, PushedUpdate] = {}  # pushes without a verdict
        self.finals = 0  # final parameters that may be given out
        self._node = node
        self._arrived: dict[int, Message] = {}  # verdicts that were not carried out yet, by number

    def announce(self, what: What, pushes: Sequence[PushedUpdate] = ()) -> None:
        """Sends a decision to the other servers, if they wait for it."""
        if not self.leads:
            return
        self.number += 1
        names = [list(push.name) for push in pushes]
        for server in self._node.members.servers[1:]:
            # A request is repeated until it has arrived; a message might be lost.
            self._node.request(server, "verdict", number=self.number, what=what, pushes=names)

    def add(self, message: Message) -> None:
        """A verdict has arrived."""
        self._arrived[message["number"]] = message
        self._node.reply(message)

    def next(self) -> Verdict | None:
        """The next verdict, once all of its pushes that may still arrive are here."""
        message = self._arrived.get(self.number + 1)
        if message is None:
            return None
        names: list[Name] = [(worker, incarnation, step) for worker, incarnation, step in message["pushes"]]
        if any(self._may_come(*name[:2]) for name in names if name not in self.pending):
            return None
        self.number += 1
        del self._arrived[self.number]
        return Verdict(message["what"], [self.pending.pop(name) for name in names if name in self.pending])

    def orphans(self) -> list[PushedUpdate]:
        """Removes and returns the pushes of the dead that never reached the first server."""
        alive = self._node.members.alive
        found = [push for push in self.pending.values() if not alive(push.message)]
        return [self.pending.pop(push.name) for push in found]

    def _may_come(self, worker: int, incarnation: int) -> bool:
        """True if this incarnation of a worker is alive."""
        sequence = incarnation << INCARNATION_SHIFT
        return self._node.members.alive(Message(Peer("worker", worker), "push", sequence))
