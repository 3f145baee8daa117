"""ReliableBroadcast: delivers every message of every worker to all others, though workers join and leave.

Messages are numbered by origin, and the delivery log says which are known. The rules:

- Messages wait in an outbox, by peer, and are sent beside the script: no worker waits for another.
- A worker that finds a gap tells what it knows ("known"). The other sends what is missing, or a snapshot of
  its log ("snapshot") if that is no longer kept.
- Now and then each worker tells its neighbors what all workers on its side have ("confirm"). Messages that
  all workers on both sides of all edges have are dropped.
- Messages that a worker has not confirmed for long are merged, by origin. A worker that turns out to have
  some of them gets a snapshot.
- When a worker joins or leaves, all tell what they know: from now on it may differ, and so may the tree.
- "settle" gets its reply when all messages that it names are known; the reply to "state" has everything.
- To save a state that is the same for all, workers meet at a snapshot barrier. Each message of pulses names
  the checkpoint that its origin resumed from: it must be the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import PeerLost, WireError
from polyrhythm.core.node import others
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.broadcast.confirmation import EVERY, Confirmations
from polyrhythm.strategies.broadcast.messages import (
    CONFIRM,
    KNOWN,
    Outgoing,
    read_pulses,
    read_snapshot,
)
from polyrhythm.strategies.broadcast.outbox import Composed, Outbox
from polyrhythm.strategies.broadcast.recovery import Recovery, ResumePoints
from polyrhythm.strategies.broadcast.settling import Settling
from polyrhythm.strategies.broadcast.topology import BroadcastTopology
from polyrhythm.strategies.snapshot_barrier import SnapshotBarrier

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, LogSnapshot
    from polyrhythm.strategies.call_numbers import CallNumbers

MIN_BYTES = 1 << 20  # of more than MIN_MESSAGES messages that may be unconfirmed in any case
MIN_MESSAGES = 4 * EVERY
PATIENCE = 16  # times in a row that the network may be called behind


class ReliableBroadcast:
    """What one worker sends to the others and receives from them."""

    kinds: ClassVar[tuple[str, ...]] = (
        "pulses", "known", "confirm", "snapshot", "state", "settle", "digest", SnapshotBarrier.kind,
    )  # fmt: skip

    def __init__(
        self,
        node: Node,
        log: DeliveryLog,
        base: Sequence[Tensor],
        fanout: int | None,
        calls: CallNumbers,
    ) -> None:
        self.node, self.log, self.base = node, log, base
        self.origin, self.sent = f"{node.rank}.{node.incarnation}", 0
        self.ready = not node.incarnation  # a replacement knows nothing before it has requested it
        self.topology = BroadcastTopology(node, fanout)  # fanout of the tree; None is a mesh
        self.resumed = ResumePoints(node)
        self.outbox = Outbox(node, self._compose)
        self.confirmations = Confirmations(node, log, self.topology)
        self.recovery = Recovery(node, log, self.outbox, self.topology, self.resumed)
        self.settling = Settling(node, log, self.outbox)
        self.barrier = SnapshotBarrier(node, self.settling.settle_all, calls)
        self._behind = 0  # times in a row that the network was behind
        self._present = set(others(node))

    # --- sending ------------------------------------------------------------------------------------

    def add(self, codes: Sequence[Tensor]) -> None:
        """Takes this worker's next message into its own log."""
        alone = not self.topology.neighbors
        with self.node.lock():
            self.sent += 1
            self.log.add(self.origin, self.sent, codes)
            if alone:
                self.log.drop(self.origin, self.sent)

    def publish(self) -> None:
        """Sends the message that was added last."""
        self.outbox.post(self.topology.neighbors, Outgoing("pulses", self.origin, self.sent))
        self._merge(self.origin)

    def behind(self) -> bool:
        """True if so much is unconfirmed that it is better to send later, in fewer messages."""
        with self.node.lock():
            count, size = self.log.kept(self.origin)
        share = self._counts_size // len(self.topology.everyone)
        behind = count > MIN_MESSAGES and size > max(MIN_BYTES, share) and self._behind < PATIENCE
        self._behind = self._behind + 1 if behind else 0
        return behind

    @property
    def _counts_size(self) -> int:
        """The bytes of k, the counts of all pulses."""
        return sum(vector.nbytes for vector in self.log.counts)

    def _merge(self, origin: str) -> None:
        """Merges the kept messages of an origin if they have more bytes than k.

        Then some worker has not confirmed anything for long. Messages that were sent to it are not merged
        with messages that still wait for it: it may have received the former.
        """
        with self.node.lock():
            if self.log.unmerged(origin) <= max(MIN_BYTES, self._counts_size):
                return
            firsts = (self.log.message(origin, number) for number in self.outbox.first_waiting(origin))
            self.log.merge(origin, {entry.first - 1 for entry in firsts if entry is not None})
            self.outbox.rename(self._renamed)

    def _renamed(self, item: Outgoing) -> Outgoing:
        """The same item for all messages that are merged into one."""
        entry = self.log.message(item.origin, item.number) if item.kind == "pulses" else None
        return item if entry is None else Outgoing("pulses", item.origin, entry.last)

    def _compose(self, peer: Peer, item: Outgoing) -> Composed | None:
        if item.kind == "pulses":
            return self._compose_pulses(item.origin, item.number)
        if item.kind == "snapshot":
            snapshot = self.log.snapshot()
            return snapshot.tensors, self._snapshot_fields(snapshot)
        if item.kind == "confirm":
            return (), {"known": self.confirmations.side(peer), "workers": self.topology.ranks}
        return (), {"known": dict(self.log.known)}

    def _compose_pulses(self, origin: str, number: int) -> Composed | None:
        entry = self.log.message(origin, number)
        if entry is None:
            return None
        fields: dict[str, Any] = {"origin": origin, "number": entry.last}
        if entry.first < entry.last:
            fields["first"] = entry.first
        if origin == self.origin or origin in self.resumed.theirs:
            fields["resumed"] = self.resumed.theirs.get(origin, self.resumed.mine)
        return entry.codes, fields

    def _snapshot_fields(self, snapshot: LogSnapshot) -> dict[str, Any]:
        return {"known": snapshot.known, "kept": dict(snapshot.kept), "resumed": self.resumed.mine}

    # --- receiving ----------------------------------------------------------------------------------

    def on_message(self, message: Message | None) -> None:
        """Takes a message of another worker; None if a worker joined or left."""
        if message is None:
            self.barrier.on_message(None)
            self._on_membership()
        elif message.kind == "settle":
            self._on_settle(message)
        elif message.kind == SnapshotBarrier.kind:
            self.barrier.on_message(message)
        elif message.kind == "digest":
            self.node.reply(message, digest=self.log.digest())
        elif message.kind == "state":
            self._on_state(message)
        elif self.ready:
            on_message = {
                "pulses": self._on_pulses,
                "known": self.recovery.on_known,
                "snapshot": self.recovery.on_snapshot,
                "confirm": self.confirmations.on_confirm,
            }[message.kind]
            on_message(message)
            self.settling.reply()

    def _on_pulses(self, message: Message) -> None:
        origin, first, number = read_pulses(message)
        if "resumed" in message.fields:
            self.resumed.theirs[origin] = message["resumed"]
        try:
            with self.node.lock():
                result = self.log.add(origin, number, message.tensors, first)
        except WireError as error:
            raise WireError(f"{message.sender} sent pulses of {origin}: {error}") from None
        if result == "gap":
            self.recovery.request(message.sender, origin, number)
        elif result == "partly known":
            self.outbox.post([message.sender], KNOWN)
        elif result == "new":
            neighbors = self.topology.neighbors
            if self.topology.forwards:
                onward = [peer for peer in neighbors if peer != message.sender]
                self.outbox.post(onward, Outgoing("pulses", origin, number))
            self._merge(origin)
            if self.confirmations.due(origin, number - first + 1):
                self.outbox.post(neighbors, CONFIRM)

    def _on_settle(self, message: Message) -> None:
        lacks = self.settling.on_settle(message)
        if lacks and self.ready:  # the messages are on their way, or were lost with a connection
            holders = self.topology.neighbors if self.topology.forwards else [message.sender]
            self.outbox.post(holders, KNOWN)

    def _on_state(self, message: Message) -> None:
        with self.node.lock():
            snapshot = self.log.snapshot()
        if self.ready:
            fields = self._snapshot_fields(snapshot) | {"snapshots": list(self.barrier.numbers)}
            self.node.reply(message, *self.base, *snapshot.tensors, ready=True, **fields)
        else:
            self.node.reply(message, ready=False)

    def _on_membership(self) -> None:
        present = set(others(self.node))
        with self.node.lock():
            self.settling.forget_dead()
            gone, self._present = self._present - present, present
            self.confirmations.forget()
            self.recovery.forget()
        # If workers leave because they have finished, the run is over and nothing is missing.
        if self.ready and all(peer in self.node.members.lost for peer in gone):
            self.recovery.tell()

    # --- joining late -------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Takes w0, k and the kept messages from any worker that has them."""
        node, base = self.node, self.base
        while True:
            late = [node.rank]
            for peer in others(node):
                try:
                    reply = node.request(peer, "state").wait()
                except PeerLost:
                    continue
                if reply["ready"]:
                    copied(reply.tensors[: len(base)], base)
                    with node.lock():
                        self.resumed.mine = reply["resumed"]
                        self.barrier.numbers = reply["snapshots"]
                        self.log.install(read_snapshot(reply, self.log, len(base)))
                        self.ready = True
                    self.recovery.tell()  # messages that arrived meanwhile were ignored
                    return self.settling.reply()
                late.append(peer.rank)
            if node.rank == min(late):  # all workers are replacements: none knows anything
                self.ready = True
                return
