"""Rest: a place where workers that wait for nobody wait for all, so that what they save is one and the same.

Each comes to rest when its script says so. Nothing new comes of it then, so once all are there all can get
what there is; each notes it, and nobody goes on before all have. Rests are numbered, for one may have gone on
to the next while another still hears that all have noted this one. Who has not begun, or is done, is at rest.
One that begins later than others does not do so in the midst of a rest, or some would note what it does first
and others not. It runs through the script from its beginning, and passes by the places that they have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from polyrhythm.core.errors import PeerLost, WaitError
from polyrhythm.strategies.decentralized.base import others

if TYPE_CHECKING:
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node


class SnapshotBarrier:
    """Where a worker is, and who waits for it. `level` waits until all have what there is."""

    def __init__(self, node: Node, level: Callable[[], None]) -> None:
        self.node, self._level = node, level
        self.numbers = [0, 0]  # of the rest that it has come to last, and of the last one that it has noted
        self._places = 0  # of the script, where it saves, that this worker has come to
        self._at: Literal["idle", "work", "rest", "noted"] = "idle"
        self._held: list[Message] = []  # not answered yet

    def begin(self, later: bool) -> None:
        """From here on something new may come of this worker: whoever comes to rest waits for it.

        `later` than of others: some may be at rest already, and do not wait for it. So it waits for them.
        """
        while True:
            known = self.numbers[0]
            found = self._ask("noted") if later else [known]
            with self.node.lock():
                self.numbers[0] = max(self.numbers[0], *found)
                if self.numbers[0] == known:  # nor has another come to rest meanwhile
                    self.numbers[1], self._at = known, "work"
                    return

    def end(self) -> None:
        """Nothing new comes of it any longer."""
        self._at = "idle"
        self._answer()

    def come(self) -> bool:
        """The script has come to a place where it saves; False if the others have left it before this one
        began."""
        self._places += 1
        return self._places > self.numbers[1]

    def take(self, note: Callable[[], None]) -> None:
        """Waits until all are at rest and have everything. What there is is noted before anybody goes on."""
        with self.node.lock():
            self.numbers[0] = self.numbers[1] + 1
            self._at = "rest"
        self._answer()
        found = self._ask("come")
        with self.node.lock():
            self.numbers[0] = max(found)
        self._level()
        with self.node.lock():
            note()
            self.numbers[1] = self.numbers[0]
            self._at = "noted"
        self._answer()
        self._ask("noted")
        self._at = "work"

    def hear(self, message: Message | None) -> None:
        """Another is at rest, and asks whether this one has come as far; None if one has come or gone."""
        with self.node.lock():
            if message is None:
                self._held = [each for each in self._held if self.node.members.alive(each)]
            else:
                self._held.append(message)
        self._answer()

    def _ask(self, what: str) -> list[int]:
        """Waits until all others have come as far; which rest each is at, this one first."""
        node, found, late = self.node, [self.numbers[0]], []
        asked = {peer: node.request(peer, "rest", what=what, number=found[0]) for peer in others(node)}
        for peer, reply in asked.items():
            try:
                found.append(reply.wait()["number"])
            except PeerLost:
                continue
            except WaitError:
                late.append(str(peer))
        if late:
            raise WaitError(
                f"{node.me} waits where the state is saved, and {', '.join(late)} did not come to the same "
                "place: under broadcast all workers call session.state_dict() together"
            )
        return found

    def _answer(self) -> None:
        """Answers those that this worker has come as far as."""
        with self.node.lock():
            ready = [each for each in self._held if self._has_come(each)]
            self._held = [each for each in self._held if each not in ready]
            number = self.numbers[0]
        for message in ready:
            self.node.reply(message, number=number)

    def _has_come(self, message: Message) -> bool:
        number, idle = message["number"], self._at == "idle"
        if message["what"] == "come" and (idle or self._at == "rest"):
            self.numbers[0] = max(self.numbers[0], number)
            return True
        return idle or number <= self.numbers[1]
