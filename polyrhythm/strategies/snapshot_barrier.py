"""SnapshotBarrier: where workers that are not in lockstep meet to save or show a consistent state.

Each worker arrives at the barrier when its script saves, or calls `consensus()`. It produces nothing new
while it is there, so once all have arrived, all can get everything that was sent. Each then takes its
snapshot, and none continues before all have taken theirs. They continue in rank order, as at the start of a
run, so that a resumed simulation repeats the order of their steps.

Snapshots are numbered: a worker may already be at the next one while another still waits for the last reply
of this one. A worker that has not started yet, or has finished, does not hold the others up. A worker that
joins late waits until no snapshot is being taken; otherwise some snapshots would contain its first updates
and others would not. It runs the script from the beginning, and skips the saves of the others from before it
joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.core.held_requests import HeldRequests
from polyrhythm.core.node import others

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.strategies.call_numbers import CallNumbers


class SnapshotBarrier:
    """Where one worker is, and which workers wait for it.

    `deliver_all` blocks until all workers have everything that was sent. Pass messages of `kind`, and
    membership changes, to `on_message`.
    """

    kind: ClassVar[str] = "barrier"

    def __init__(self, node: Node, deliver_all: Callable[[], None], calls: CallNumbers) -> None:
        self.node, self._deliver_all, self._calls = node, deliver_all, calls
        # Of the last snapshot that this worker has reached, and of the last that it has taken.
        self.numbers = [0, 0]
        self._joined_later = False
        self._at: Literal["idle", "work", "waiting", "taken"] = "idle"
        self._held = HeldRequests(node)

    def begin(self, later: bool) -> None:
        """From here on this worker may produce something new, and snapshots wait for it.

        `later` than the others: a snapshot that is being taken does not wait for this worker, so it waits
        until that is done.
        """
        self._joined_later = later
        while True:
            known = self.numbers[0]
            found = self._wait_for("taken") if later else [known]
            with self.node.lock():
                self.numbers[0] = max(self.numbers[0], *found)
                if self.numbers[0] == known:  # and no other snapshot was begun meanwhile
                    self.numbers[1], self._at = known, "work"
                    return

    def end(self) -> None:
        """From here on this worker produces nothing new."""
        self._at = "idle"
        self._reply()

    def come(self, join: bool = False) -> bool:
        """Called when the script comes here. False if the others were here before this worker joined.

        `join`: then it takes part in a snapshot that others wait to take now, wherever in the script it is.
        """
        number = self._calls.next()
        with self.node.lock():
            awaited = any(each["what"] == "come" for each in self._held)
        return not self._joined_later or number > self.numbers[1] or (join and awaited)

    def take(self, save: Callable[[], object], read: Callable[[], object] = lambda: None) -> None:
        """Waits until all workers have come and have everything, and calls `save` before any continues.

        `save` is called inside `node.lock()`, and `read` before it, without: it may request what others have.
        """
        with self.node.lock():
            self.numbers[0] = max(self.numbers[1] + 1, self._calls.last)
            self._at = "waiting"
        self._reply()
        found = self._wait_for("come")
        with self.node.lock():
            self.numbers[0] = max(found)
        self._deliver_all()
        read()
        with self.node.lock():
            save()
            self.numbers[1] = self.numbers[0]
            self._at = "taken"
        self._reply()
        self._wait_for("taken")
        self._wait_for("left", [peer for peer in others(self.node) if peer < self.node.me])
        self._at = "work"
        self._reply()

    def on_message(self, message: Message | None) -> None:
        """Takes a request of a worker that waits for this one; None if a worker joined or left."""
        if message is not None:
            with self.node.lock():
                self._held.add(message)
        self._reply()

    def _wait_for(self, what: str, peers: Iterable[Peer] | None = None) -> list[int]:
        """Waits until all others, or these, have come as far.

        Returns the number of the snapshot that each is at, this worker's first.
        """
        node, found, late = self.node, [self.numbers[0]], []
        peers = others(node) if peers is None else peers
        requests = {peer: node.request(peer, self.kind, what=what, number=found[0]) for peer in peers}
        for peer, reply in requests.items():
            try:
                found.append(reply.wait()["number"])
            except PeerLost:
                continue
            except WaitError:
                late.append(str(peer))
        if late:
            raise WaitError(
                f"{node.me} waits for {', '.join(late)}: all workers must call session.consensus() and "
                "session.state_dict() at the same points of the script"
            )
        return found

    def _reply(self) -> None:
        """Replies to the workers that this one has come as far as, and forgets the dead."""
        with self.node.lock():
            ready = list(self._held.take(self._has_come))
            met = [each["number"] for each in ready if each["what"] == "come"]
            number = self.numbers[0] = max([self.numbers[0], *met])
        for message in ready:
            self.node.reply(message, number=number)

    def _has_come(self, message: Message) -> bool:
        """True if this worker has come to a snapshot, taken it, or left it, as the message requests."""
        what, number = message["what"], message["number"]
        if what == "left":
            return self._at != "taken" or self.numbers[1] != number
        if what == "come" and self._at == "waiting":
            return True
        return self._at == "idle" or number <= self.numbers[1]
