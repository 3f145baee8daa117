"""Recovery: how workers get messages that they have missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.strategies.broadcast.confirmation import EVERY
from polyrhythm.strategies.broadcast.messages import KNOWN, SNAPSHOT, Outgoing, read_known, read_snapshot

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, Known
    from polyrhythm.strategies.broadcast.outbox import Outbox
    from polyrhythm.strategies.broadcast.topology import BroadcastTopology


class ResumePoints:
    """The checkpoint that each origin has resumed from, by its digest; empty if from none."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.mine = ""
        self.theirs: dict[str, str] = {}  # by origin, as far as they have said

    def check(self) -> None:
        """UsageError if workers resumed from different checkpoints."""
        for origin, resumed in self.theirs.items():
            if resumed != self.mine:
                raise UsageError(
                    f"worker {origin.partition('.')[0]} resumed from a different checkpoint than "
                    f"{self.node.me}: either each worker loads the state that it saved itself, all of the "
                    "same step, or none does"
                )


class Recovery:
    """A worker that finds a gap tells what it knows. The other sends what is missing.

    If that is no longer kept one by one, it sends a snapshot of its log. It also tells in turn what it knows
    if it lacks something itself.
    """

    def __init__(
        self,
        node: Node,
        log: DeliveryLog,
        outbox: Outbox,
        topology: BroadcastTopology,
        resumed: ResumePoints,
    ) -> None:
        self.node, self.log, self.outbox, self.topology, self.resumed = node, log, outbox, topology, resumed
        # By peer and origin, at the last request: the last known message, and the length of the gap.
        self._requested: dict[tuple[Peer, str], tuple[int, int]] = {}
        # What both knew when a snapshot could not be used, and how often in a row.
        self._useless: dict[Peer, tuple[tuple[Known, Known], int]] = {}

    def tell(self) -> None:
        """Tells the neighbors what this worker knows. They send what it lacks, and request what they lack."""
        self.outbox.post(self.topology.neighbors, KNOWN)

    def request(self, peer: Peer, origin: str, number: int) -> None:
        """Requests the messages that are missing before this one.

        All of them are sent again, so one request is enough, unless it is lost with its connection.
        It is repeated when other messages are missing, or twice as many.
        """
        known = self.log.known.get(origin, 0)
        before, gap = self._requested.get((peer, origin), (known, 0))
        if before != known or number - known >= 2 * gap:
            self._requested[peer, origin] = known, max(number - known, EVERY)
            self.outbox.post([peer], KNOWN)

    def on_known(self, message: Message) -> None:
        """Sends what the sender lacks, and tells what this worker knows if it lacks something."""
        theirs = read_known(message)
        with self.node.lock():
            missing, lacks = self.log.missing(theirs), self.log.lacks(theirs)
            waiting = self.outbox.waiting(message.sender)
        items = [SNAPSHOT] if missing is None else [Outgoing("pulses", *each) for each in missing]
        items = [item for item in items if item not in waiting]
        self.outbox.post([message.sender], *items, *([KNOWN] if lacks else []))

    def on_snapshot(self, message: Message) -> None:
        snapshot = read_snapshot(message, self.log)
        if message.fields.get("resumed", "") != self.resumed.mine:
            return  # one of the two has not loaded its checkpoint yet
        with self.node.lock():
            lacks = self.log.lacks(snapshot.known)
            installed = lacks and self.log.install(snapshot)
        if installed and self.topology.forwards:
            self.tell()
        elif lacks and not installed:  # the sender must get more of this worker's messages first
            self._note_useless(message.sender, snapshot.known)
            self.outbox.post([message.sender], KNOWN)

    def _note_useless(self, peer: Peer, theirs: Known) -> None:
        """Two workers that were cut off from each other, but not from the rest, may each have merged messages
        that the other has in part. Then neither can use a snapshot of the other."""
        now = theirs, dict(self.log.known)
        before, times = self._useless.get(peer, (now, 0))
        self._useless[peer] = now, times + 1 if before == now else 0
        if times >= 3:
            raise PolyrhythmError(
                f"{self.node.me} and {peer} have exchanged nothing for so long that neither can get "
                "from the other what it lacks: is the network between them too slow for this strategy?"
            )

    def forget(self) -> None:
        """Workers joined or left: requests may have been lost."""
        self._requested.clear()
