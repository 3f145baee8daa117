"""WarmUp: for the first steps of a run only some workers train, and the others wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.held_requests import HeldRequests
from polyrhythm.core.node import others

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


class WarmUp:
    """The workers of the ranks below `first` train for `steps` steps before the others begin.

    The others wait for the first worker that is alive ("begin"). A save ends the warm-up: all workers must
    save together, so each waits until all others have begun ("begun").
    """

    kinds: ClassVar[tuple[str, ...]] = ("begin", "begun")

    def __init__(self, node: Node, replica: Replica, steps: int, first: int) -> None:
        self.node, self.replica, self.steps, self.first = node, replica, steps, first
        self.ended = False  # before its last step
        self.begun = bool(node.incarnation)  # no worker waits for a replacement
        self._all_begun = not steps
        self._held = HeldRequests(node)

    @property
    def over(self) -> bool:
        return self.ended or self.replica.steps >= self.steps

    @property
    def follows(self) -> bool:
        """True if this worker waits for others to train."""
        return bool(self.steps) and self.node.rank >= self.first

    def training(self, workers: int) -> int:
        """How many of these workers train in this step."""
        leads = self.node.rank < self.first and not self.node.incarnation  # a replacement finds all training
        return min(workers, self.first) if leads and self._warming else workers

    @property
    def _warming(self) -> bool:
        return not self.ended and self.replica.steps <= self.steps

    def wait(self) -> None:
        """Waits until the first worker that is alive says that the warm-up is over."""
        node = self.node
        while True:
            before = [peer for peer in others(node) if peer < node.me]
            if not before:
                return
            try:
                if node.request(before[0], "begin").wait()["now"]:
                    return
            except PeerLost:  # the next one is the first then
                continue

    def begin(self) -> None:
        """This worker begins to train."""
        self.begun = True
        self._reply("begun")

    def tell(self) -> None:
        """Tells the workers that wait to begin if they may. Those that may not yet repeat their request."""
        self._reply("begin")

    def end(self) -> None:
        """Ends the warm-up."""
        self.ended = True
        self.tell()

    def wait_for_all(self) -> None:
        """Ends the warm-up, and waits until all workers have begun to train."""
        self.end()
        requests = [] if self._all_begun else [self.node.request(peer, "begun") for peer in others(self.node)]
        for reply in requests:
            try:
                reply.wait()
            except PeerLost:
                continue
        self._all_begun = True

    def on_message(self, message: Message | None) -> None:
        """Takes a request of another worker; None if a worker joined or left."""
        with self.node.lock():
            if message is None:
                self._held.forget_dead()
                return
            self._held.add(message)
        if self.over if message.kind == "begin" else self.begun:
            self._reply(message.kind)

    def _reply(self, kind: str) -> None:
        with self.node.lock():
            ready = list(self._held.take(lambda each: each.kind == kind))
        for message in ready:
            self.node.reply(message, now=self.over)
