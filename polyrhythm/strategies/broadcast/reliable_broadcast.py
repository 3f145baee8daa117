"""Courier: brings every message of every worker to all others, each once, though workers come and go.

Messages are numbered by origin, and the ledger says how far each is known. The rules:

- What is sent waits in an outbox, by peer, and goes beside whatever else goes on: nobody waits for it.
- Whoever finds a gap tells what it has ("have"): the other sends what is missing, or, if it is kept no
  longer, all counts ("whole"), and tells in turn what it has if it lacks something itself.
- Now and then each tells its neighbours what all on its side have ("heard"). What all have on both sides of
  all edges is confirmed, and kept no longer.
- What somebody has not confirmed for long is merged, by origin. It is sent to one for whom it waits in one
  piece; one that turns out to have some of it gets all counts.
- When one comes or goes all tell what they have, for it may differ from now on, and so may a tree.
- "settle" is answered when all that the asker names is known, and "state" with all that there is.
- To save what is the same for all, all come to rest (see `rest`). What all go on from, if it was loaded, is
  said with each message of pulses, and must be the same.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError
from polyrhythm.core.events import ReplicaDigest
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.broadcast.delivery_log import DeliveryLog, Have
from polyrhythm.strategies.decentralized.base import others
from polyrhythm.strategies.snapshot_barrier import SnapshotBarrier

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer

EVERY = 8  # messages that come from each neighbour, on average, before they are confirmed
LEAST = 1 << 20  # bytes, of more than FEW messages, that may be on their way unconfirmed in any case
FEW = 4 * EVERY
PATIENCE = 16  # times in a row that the network may be called behind

Item = tuple[str, str, int]  # to be sent: "pulses" of an origin and their number, or another kind of message
HAVE: Item = ("have", "", 0)  # what this one has, for another who may have other messages
HEARD: Item = ("heard", "", 0)  # what all on this side have, for another to keep it no longer
WHOLE: Item = ("whole", "", 0)  # all counts, and the messages that are kept


class ReliableBroadcast:
    """What one worker sends to others and hears from them, and how far that is confirmed."""

    kinds: ClassVar[tuple[str, ...]] = (
        "pulses", "have", "heard", "whole", "state", "settle", "digest", "rest",
    )  # fmt: skip

    def __init__(self, node: Node, ledger: DeliveryLog, base: Sequence[Tensor], fanout: int | None) -> None:
        self.node, self.ledger, self.base = node, ledger, base
        self.fanout = fanout  # of the tree along which messages go; None in a mesh
        self.origin, self.sent = f"{node.rank}.{node.incarnation}", 0
        self.ready = not node.incarnation  # one that comes late has nothing to tell before it has asked
        self._held = 0  # times in a row that the network was behind
        self._there = set(others(node))
        self._outbox: dict[Peer, deque[Item]] = {}
        self._talking: set[Peer] = set()  # to whom something is being sent
        self._settle: list[Message] = []  # not answered yet
        self._asked: dict[tuple[Peer, str], tuple[int, int]] = {}  # had then, and lacked, by peer and origin
        self._taken, self._each = 0, Have()  # new messages since the last "heard": all, and by origin
        self._told: dict[Peer, Have] = {}  # what all have on the other side of each edge
        self.began = ""  # the digest of what it goes on from, if that was saved
        self._beginnings: dict[str, str] = {}  # the same of others, by origin, as far as they have said
        self._vain: dict[Peer, tuple[Any, int]] = {}  # what both had when nothing could be taken over
        self.rest = SnapshotBarrier(node, self._level)

    @property
    def everybody(self) -> list[Peer]:
        """All workers, this one too: one that has come late may not be among those it was told of."""
        return sorted({self.node.me, *self.node.members.workers})

    @property
    def neighbours(self) -> list[Peer]:
        """Whom a worker sends to: all, or its neighbours in a tree of those that are there."""
        there, me, wide = self.everybody, self.node.me, self.fanout
        if wide is None:
            return [peer for peer in there if peer != me]
        mine = there.index(me)
        places = [(mine - 1) // wide] if mine else []
        places += range(wide * mine + 1, min(wide * mine + wide + 1, len(there)))
        return [there[place] for place in places]

    # --- what is sent -------------------------------------------------------------------------------

    def enter(self, codes: Sequence[Tensor]) -> None:
        """Takes this worker's next message into its own ledger."""
        alone = not self.neighbours
        with self.node.lock():
            self.sent += 1
            self.ledger.add(self.origin, self.sent, codes)
            if alone:
                self.ledger.settled(self.origin, self.sent)

    def publish(self) -> None:
        """Has the message that was entered last sent."""
        self._post(self.neighbours, ("pulses", self.origin, self.sent))
        self._merge(self.origin)

    def behind(self) -> bool:
        """Whether so much is on its way that it is better to send later, in fewer messages."""
        with self.node.lock():
            count, size = self.ledger.kept(self.origin)
        room = self._size // len(self.everybody)
        behind = count > FEW and size > max(LEAST, room) and self._held < PATIENCE
        self._held = self._held + 1 if behind else 0
        return behind

    @property
    def _size(self) -> int:
        """The bytes of k."""
        return sum(vector.nbytes for vector in self.ledger.counts)

    def _merge(self, origin: str) -> None:
        """Merges what is kept of an origin, if that is more than k has bytes: somebody has not said for long
        what it has. Not what was sent to it with what still waits, for it may have got the former: so only
        when what is new waits already."""
        with self.node.lock():
            if self.ledger.loose(origin) <= max(LEAST, self._size):
                return
            cuts = set()
            for items in self._outbox.values():
                first = next(
                    (number for kind, whose, number in items if (kind, whose) == ("pulses", origin)), 0
                )
                entry = self.ledger.message(origin, first)
                cuts |= set() if entry is None else {entry.first - 1}
            self.ledger.merge(origin, cuts)
            for peer, items in self._outbox.items():
                self._outbox[peer] = deque(dict.fromkeys(self._in_one(item) for item in items))

    def _in_one(self, item: Item) -> Item:
        """The same for all messages that are merged."""
        kind, origin, number = item
        entry = self.ledger.message(origin, number) if kind == "pulses" else None
        return item if entry is None else (kind, origin, entry.last)

    def _post(self, to: Iterable[Peer], *items: Item) -> None:
        """Has items sent, in order, beside whatever goes on: neither a step nor an ear may wait for it."""
        for peer in to:
            with self.node.lock():
                waiting = self._outbox.setdefault(peer, deque())
                waiting.extend(item for item in items if item[0] == "pulses" or item not in waiting)
                silent = peer not in self._talking
                self._talking.add(peer)
            if silent:
                self.node.spawn(self._talk, peer)

    def _talk(self, peer: Peer) -> None:
        """Sends all that waits for a peer."""
        ledger = self.ledger
        while True:
            with self.node.lock():
                if not self._outbox[peer]:
                    self._talking.discard(peer)
                    return
                kind, origin, number = self._outbox[peer].popleft()
                tensors: Sequence[Tensor] | None = ()
                fields: dict[str, Any] = {"have": dict(ledger.have)}
                if kind == "pulses":
                    entry = ledger.message(origin, number)
                    tensors = None if entry is None else entry.codes
                    fields = {"origin": origin, "number": number}
                    if entry is not None and entry.first < entry.last:
                        fields |= {"first": entry.first, "number": entry.last}
                    if origin == self.origin or origin in self._beginnings:
                        fields["began"] = self._beginnings.get(origin, self.began)
                elif kind == "whole":
                    tensors, fields = ledger.whole()
                    fields["began"] = self.began
                elif kind == "heard":
                    fields = {"have": self._side(peer), "there": self._ranks()}
            if tensors is None:  # it is kept no longer: the peer has to know that there was something
                self._post([peer], HAVE)
                continue
            try:
                self.node.send(peer, kind, *tensors, **fields)
            except WaitError:  # it is gone
                continue

    def _side(self, peer: Peer) -> Have:
        """What all have on this worker's side of the edge to a neighbour; in a mesh it is there alone."""
        have = dict(self.ledger.have)
        if self.fanout is None:
            return have
        sides = [self._told.get(each, {}) for each in self.neighbours if each != peer]
        return {origin: min(number, *_of(sides, origin)) for origin, number in have.items()}

    def _ranks(self) -> list[int]:
        return [peer.rank for peer in self.everybody]

    # --- what is heard ------------------------------------------------------------------------------

    def hear(self, message: Message | None) -> None:
        """Takes what another sends; None if one has come or gone."""
        if message is None:
            self.rest.hear(None)
            self._look_around()
        elif message.kind == "settle":
            self._hear_settle(message)
        elif message.kind == "rest":
            self.rest.hear(message)
        elif message.kind == "digest":
            self.node.reply(message, digest=self.ledger.digest())
        elif message.kind == "state":
            with self.node.lock():
                tensors, fields = self.ledger.whole()
            if self.ready:
                fields |= {"began": self.began, "rests": list(self.rest.numbers)}
                self.node.reply(message, *self.base, *tensors, ready=True, **fields)
            else:
                self.node.reply(message, ready=False)
        elif self.ready:
            getattr(self, f"_hear_{message.kind}")(message)
            if self._settle:
                self._answer_settled()

    def _hear_pulses(self, message: Message) -> None:
        origin, number = message.fields.get("origin"), message.fields.get("number")
        if not isinstance(origin, str) or not isinstance(number, int):
            raise WireError(f"{message.sender} sent pulses without an origin and a number")
        first = message.fields.get("first", number)
        if not isinstance(first, int) or not 0 < first <= number:
            raise WireError(f"{message.sender} sent pulses from {first!r} to {number}")
        if "began" in message.fields:
            self._beginnings[origin] = message["began"]
        try:
            with self.node.lock():
                what = self.ledger.add(origin, number, message.tensors, first)
        except WireError as error:
            raise WireError(f"{message.sender} sent pulses of {origin}: {error}") from None
        if what == "gap":
            self._ask_for(message.sender, origin, number)
        elif what == "part":
            self._post([message.sender], HAVE)
        elif what == "new":
            neighbours = self.neighbours
            if self.fanout is not None:
                onward = [peer for peer in neighbours if peer != message.sender]
                self._post(onward, ("pulses", origin, number))
            self._merge(origin)
            self._taken += number - first + 1
            self._each[origin] = self._each.get(origin, 0) + number - first + 1
            # Where few train, or one is much faster, what it has sent is confirmed before it holds back.
            if self._taken >= EVERY * len(neighbours) or self._each[origin] >= 2 * EVERY:
                self._taken = 0
                self._each.clear()
                self._post(neighbours, HEARD)

    def _ask_for(self, peer: Peer, origin: str, number: int) -> None:
        """Something is missing before what has come. All of it is sent again, so one question is enough,
        unless it is lost with its connection: it is asked again when twice as much is missing, or other
        messages are."""
        have = self.ledger.have.get(origin, 0)
        known, gap = self._asked.get((peer, origin), (have, 0))
        if known != have or number - have >= 2 * gap:
            self._asked[peer, origin] = have, max(number - have, EVERY)
            self._post([peer], HAVE)

    def _hear_heard(self, message: Message) -> None:
        """What all have on both sides of all edges is kept no longer."""
        neighbours = self.neighbours
        if message.fields.get("there") != self._ranks() or message.sender not in neighbours:
            return  # it is about other sides, for one of the two does not know yet who has come or gone
        with self.node.lock():
            self._told[message.sender] = _have(message)
            sides = [self._told.get(peer, {}) for peer in neighbours]
            for origin, number in self.ledger.have.items():
                self.ledger.settled(origin, min(number, *_of(sides, origin)))

    def _hear_have(self, message: Message) -> None:
        """Both are to know what either knows."""
        theirs = _have(message)
        with self.node.lock():
            missing, lacks = self.ledger.missing(theirs), self.ledger.lacks(theirs)
            waiting = {*self._outbox.get(message.sender, ())}
        items = [WHOLE] if missing is None else [("pulses", *each) for each in missing]
        items = [item for item in items if item not in waiting]
        self._post([message.sender], *items, *([HAVE] if lacks else []))

    def _hear_whole(self, message: Message) -> None:
        theirs, kept = self._whole(message)
        if message.fields.get("began", "") != self.began:
            return  # one of the two has not loaded yet what all go on from
        with self.node.lock():
            lacks = self.ledger.lacks(theirs)
            taken = lacks and self.ledger.take(message.tensors, theirs, kept)
        if taken and self.fanout is not None:
            self.tell()
        elif lacks and not taken:  # it has to hear more of this one before
            self._in_vain(message.sender, theirs)
            self._post([message.sender], HAVE)

    def _in_vain(self, peer: Peer, theirs: Have) -> None:
        """Two that were cut off from each other, but not from others, may both have merged what the other has
        in part: then neither can go on from the counts of the other."""
        now = theirs, dict(self.ledger.have)
        before, times = self._vain.get(peer, (now, 0))
        self._vain[peer] = now, times + 1 if before == now else 0
        if times >= 3:
            raise PolyrhythmError(
                f"{self.node.me} and {peer} did not hear from each other for so long that neither can get "
                "from the other what it lacks: is the network between them too slow for this strategy?"
            )

    def _hear_settle(self, message: Message) -> None:
        """Keeps the question until it can be answered."""
        with self.node.lock():
            self._settle.append(message)
            lacks = self.ledger.lacks(_have(message))
        self._answer_settled()
        if lacks and self.ready:  # it is on its way, or it was lost with a connection
            self._post([message.sender] if self.fanout is None else self.neighbours, HAVE)

    def _answer_settled(self) -> None:
        """Answers those who wait until this one has got all that they have."""
        with self.node.lock():
            settled = [message for message in self._settle if not self.ledger.lacks(_have(message))]
            self._settle = [message for message in self._settle if message not in settled]
            have = dict(self.ledger.have)
        for message in settled:
            self.node.reply(message, have=have)

    def _look_around(self) -> None:
        """One has come or gone: what the others know may differ from now on, and so may a tree."""
        there = set(others(self.node))
        with self.node.lock():
            self._settle = [message for message in self._settle if self.node.members.alive(message)]
            gone, self._there = self._there - there, there
            self._told.clear()
            self._asked.clear()
        if self.ready and all(peer in self.node.members.lost for peer in gone):  # otherwise all is over
            self.tell()

    def tell(self) -> None:
        """Lets the neighbours know what this one has: they send what it lacks, and ask for what they do."""
        self._post(self.neighbours, HAVE)

    # --- how all come to know the same --------------------------------------------------------------

    def catch_up(self) -> None:
        """Takes w0 and k, and how far they are known, from any that has them."""
        node, base = self.node, self.base
        while True:
            late = [node.rank]
            for peer in others(node):
                try:
                    answer = node.request(peer, "state").wait()
                except PeerLost:
                    continue
                if answer["ready"]:
                    copied(answer.tensors[: len(base)], base)
                    with node.lock():
                        self.began = answer["began"]
                        self.rest.numbers = answer["rests"]
                        self.ledger.take(answer.tensors[len(base) :], *self._whole(answer, len(base)))
                        self.ready = True
                    self.tell()  # what has come meanwhile was not taken in
                    return self._answer_settled()
                late.append(peer.rank)
            if node.rank == min(late):  # all have come late: nobody knows anything
                self.ready = True
                return

    def settle(self, have: Have) -> dict[Peer, Have]:
        """Waits until all others have this much; what each of them has."""
        answers: dict[Peer, Have] = {}
        asked = set(others(self.node))
        while asked:
            found, late = self._ask_all(asked, "settle", have=have)
            answers |= {peer: _have(answer) for peer, answer in found.items()}
            asked = late & set(others(self.node))
            if asked:  # a connection broke, perhaps, and something was lost with it
                self._post(sorted(asked), HAVE)
        return answers

    def agree(self) -> None:
        """Waits until all have everything, once nobody sends anything new; and notes what each has."""
        node, ledger = self.node, self.ledger
        self._level()
        node.log(ReplicaDigest(str(node.me), ledger.digest()))
        for peer, answer in self._ask_all(others(node), "digest")[0].items():
            node.log(ReplicaDigest(str(peer), answer["digest"]))

    def _level(self) -> None:
        """Waits until all have everything, once nobody sends anything new."""
        node, ledger = self.node, self.ledger
        while True:
            with node.lock():
                mine = dict(ledger.have)
            theirs = self.settle(mine)
            with node.lock():
                ahead = [peer for peer in theirs if ledger.lacks(theirs[peer])]
            if not ahead:
                return
            self._post(ahead, HAVE)

    def check(self) -> None:
        """All must go on from the same."""
        for origin, began in self._beginnings.items():
            if began != self.began:
                raise UsageError(
                    f"worker {origin.partition('.')[0]} goes on from something else than {self.node.me}: "
                    "either each loads what it has saved itself, all at the same place, or none does"
                )

    def _ask_all(
        self, peers: Iterable[Peer], kind: str, **fields: Any
    ) -> tuple[dict[Peer, Message], set[Peer]]:
        """Asks several at once: what they answer, and who has not, though it is there."""
        asked = {peer: self.node.request(peer, kind, **fields) for peer in sorted(peers)}
        answers: dict[Peer, Message] = {}
        late: set[Peer] = set()
        for peer, reply in asked.items():
            try:
                answers[peer] = reply.wait()
            except PeerLost:
                continue
            except WaitError:
                late.add(peer)
        return answers, late

    def _whole(self, message: Message, start: int = 0) -> tuple[Have, dict[str, Any]]:
        """What a message says that brings all of a ledger, from a place of its tensors on."""
        have, kept = _have(message), message.fields.get("kept")
        try:
            self.ledger.check_whole(message.tensors[start:], have, kept)
        except WireError as error:
            raise WireError(f"{message.sender} sent {message.kind!r}: {error}") from None
        assert isinstance(kept, dict)
        return have, kept


def _of(sides: Iterable[Have], origin: str) -> list[int]:
    """What each side has of an origin; and a large number, so that there is one."""
    return [sys.maxsize, *(side.get(origin, 0) for side in sides)]


def _have(message: Message) -> Have:
    """How far its sender knows each origin, by a message."""
    have = message.fields.get("have")
    if not isinstance(have, dict) or not all(isinstance(each, int) and each >= 0 for each in have.values()):
        raise WireError(f"{message.sender} sent {message.kind!r} that does not say what it has")
    return have
