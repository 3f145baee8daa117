"""Broadcast: everybody tells everybody, in pulses of one size, and nobody waits for anybody."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polyrhythm.codecs import selection
from polyrhythm.codecs.threshold import LARGEST, SMALLEST
from polyrhythm.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError
from polyrhythm.strategies.desk import copied
from polyrhythm.strategies.ledger import Have, Ledger
from polyrhythm.strategies.peers import Peers, others

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Message, Node, Peer
    from polyrhythm.replica import Replica

MOST = 1 << 30  # pulses of a parameter, in all
EVERY = 8  # messages that come from each neighbour, on average, before they are confirmed
LEAST = 1 << 20  # bytes, of more than FEW messages, that may be on their way unconfirmed in any case
FEW = 4 * EVERY
PATIENCE = 16  # steps in a row in which nothing is sent, at most

Item = tuple[str, str, int]  # to be sent: "pulses" of an origin and their number, or another kind of message
HAVE: Item = ("have", "", 0)  # what this one has, for another who may have other messages
HEARD: Item = ("heard", "", 0)  # what all on this side have, for another to keep it no longer
WHOLE: Item = ("whole", "", 0)  # all counts


@dataclass(frozen=True)
class Broadcast(Peers):
    """Each worker sends what has grown to ±tau, as pulses, to all others, and waits for nobody (Strom).

    u = the step of the worker's own optimizer; r <- r + u; where |r_j| >= tau: sends (j, ±m), r_j <- r_j -+ m
    tau. Everybody, the sender too, applies every message: w = w0 + tau k, where k counts the pulses of all.
    Counts are whole numbers, so it does not matter in which order messages come: workers that have got the
    same ones have the same bits. What is used as tau is the power of two next to it, for then r loses nothing
    by rounding.

    - `pulses=many` sends all whole multiples of tau, so |r| stays below tau. With `one`, as in the paper, r
      falls behind for as long as steps are larger than tau.
    - `reduce=sum`: N workers take N steps, so the learning rate acts as if it were N times as large; `mean`
      divides each step by the number of workers.
    - `topology=tree`: a message goes to up to `fanout` + 1 neighbours in a tree, and they pass it on.
    - `warmup`: so many steps only the `first` workers train, and the others follow.

    The paper has plain SGD. Momentum is part of u: it is taken of each worker's own gradients, before they
    become pulses, and what waits in r comes late on top of it. At the end r is not sent.

    Messages are numbered, and kept until all have confirmed them. Whoever has missed some, since another died
    before it had sent to all, gets them from others; one that comes late takes k from another. While more is
    unconfirmed than k has bytes, divided by the number of workers, the network is behind: then what would be
    sent stays in r, for up to 16 steps, and goes in one message.

    >>> import polyrhythm as pr
    >>> pr.parse("broadcast:0.001,topology=tree").unit == 2**-10
    True
    """

    name: ClassVar[str] = "broadcast"
    main: ClassVar[str | None] = "tau"
    paper: ClassVar[str] = "Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing"
    kinds: ClassVar[tuple[str, ...]] = (
        "pulses", "have", "heard", "whole", "state", "begin", "settle", "digest",
    )  # fmt: skip

    tau: float = 1e-3
    pulses: Literal["one", "many"] = "many"
    reduce: Literal["sum", "mean"] = "sum"
    topology: Literal["mesh", "tree"] = "mesh"
    fanout: int = 2
    warmup: int = 0
    first: int = 1

    def __post_init__(self) -> None:
        if not SMALLEST <= self.tau <= LARGEST:
            raise UsageError("tau must be more than 0, as in 0.001 (and from 2^-100 to 2^100)")
        if self.fanout < 1:
            raise UsageError("fanout must be 1 or more: that many others pass a message on")
        if self.warmup < 0:
            raise UsageError("warmup must be 0 or more steps")
        if self.first < 1:
            raise UsageError("first must be 1 or more: somebody has to train")

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def unit(self) -> float:
        """The size of a pulse: the power of two next to tau."""
        return float(2.0 ** round(math.log2(self.tau)))

    # --- how it begins ------------------------------------------------------------------------------

    def start(self, node: Node, replica: Replica) -> None:
        import torch

        for dtype, _ in replica.layout.kinds:
            selection.warm_counts(torch.float32 if dtype.itemsize < 4 else dtype)
        if not node.life:
            node.broadcast(*replica.parameters)
        copied(replica.parameters, replica.buffer("base", exact=True))
        kinds = zip(replica.layout.kinds, replica.layout.counts, strict=True)
        counts = [torch.zeros(count, dtype=torch.int32, device=device) for (_, device), count in kinds]
        replica.notes.update(
            ledger=Ledger(counts, self.unit), origin=f"{node.rank}.{node.life}", sent=0,
            ready=not node.life,  # one that comes late has nothing to tell before it has asked
            done=False, there=set(others(node)), outbox={}, talking=set(), begin=[], settle=[],
            asked={}, taken=0, each={}, told={}, held=0,
        )  # fmt: skip
        _refuse_loading(replica)
        node.listen(partial(self.hear, node, replica), *self.kinds)
        if node.life:
            self._catch_up(node, replica)
        self._wait_for_the_first(node, replica)
        self._place(node, replica, replica.parameters)

    def _catch_up(self, node: Node, replica: Replica) -> None:
        """Takes w0 and k, and how far they are known, from any that has them."""
        ledger, base = _ledger(replica), replica.buffer("base", exact=True)
        while True:
            late = [node.rank]
            for peer in others(node):
                try:
                    answer = node.ask(peer, "state").wait()
                except PeerLost:
                    continue
                if answer["ready"]:
                    copied(answer.tensors[: len(base)], base)
                    with node.exclusive():
                        ledger.take(answer.tensors[len(base) :], *_whole(ledger, answer, len(base)))
                        replica.notes["ready"] = True
                    self._tell(node, replica)  # what has come meanwhile was not taken in
                    return self._answer_settled(node, replica)
                late.append(peer.rank)
            if node.rank == min(late):  # all have come late: nobody knows anything
                replica.notes["ready"] = True
                return

    def _wait_for_the_first(self, node: Node, replica: Replica) -> None:
        """Waits, if others are to train for some steps before this one does."""
        while self.warmup and node.rank >= self.first:
            before = [peer for peer in others(node) if peer < node.me]
            if not before:
                return
            try:
                if node.ask(before[0], "begin").wait()["now"]:
                    return
            except PeerLost:  # the next one is the first then
                continue

    def _let_begin(self, node: Node, replica: Replica, asked: Iterable[Message]) -> None:
        now = replica.notes["done"] or replica.steps >= self.warmup
        for message in asked:
            node.answer(message, now=now)

    # --- a step -------------------------------------------------------------------------------------

    def step(self, node: Node, replica: Replica) -> None:
        codes = self._emit(node, replica, self._update(node, replica))
        neighbours, notes = self.neighbours(node), replica.notes
        with node.exclusive():
            if codes:
                notes["sent"] += 1
                _ledger(replica).add(notes["origin"], notes["sent"], codes)
                if not neighbours:
                    _ledger(replica).settled(notes["origin"], notes["sent"])
            asked, notes["begin"] = notes["begin"], []
        self._place(node, replica, replica.parameters)
        if codes:
            self._post(node, replica, neighbours, ("pulses", notes["origin"], notes["sent"]))
        self._let_begin(node, replica, asked)

    def _update(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """u: where the optimizer's step leads from the present parameters."""
        import torch

        update = replica.buffer("update", exact=True)
        copied(replica.parameters, update)
        replica.apply()
        for place, after in zip(update, replica.parameters, strict=True):
            torch.sub(after, place, out=place)
            if self.reduce == "mean":
                place.div_(self._training(node, replica))
        replica.layout.check_finite(update, f"{node.me}, step {replica.steps}")
        return update

    def _training(self, node: Node, replica: Replica) -> int:
        """How many workers train."""
        count = len(_all(node))
        first = node.rank < self.first and not node.life  # one that comes late finds the others training
        return min(count, self.first) if first and replica.steps <= self.warmup else count

    def _emit(self, node: Node, replica: Replica, update: Sequence[Tensor]) -> list[Tensor]:
        """r <- r + u, and the pulses that are taken out of it; none if there are none."""
        if self._behind(node, replica):
            for residual, part in zip(replica.owed, update, strict=True):
                residual.add_(part)
            return []
        pairs = zip(replica.owed, update, strict=True)
        found = [selection.pulses(*pair, self.unit, many=self.pulses == "many") for pair in pairs]
        return [code for code, _ in found] if any(count for _, count in found) else []

    def _behind(self, node: Node, replica: Replica) -> bool:
        """Whether so much is on its way that it is better to send later, in fewer messages."""
        notes, ledger = replica.notes, _ledger(replica)
        with node.exclusive():
            count, size = ledger.kept(notes["origin"])
        room = sum(vector.nbytes for vector in ledger.counts) // len(_all(node))
        behind = count > FEW and size > max(LEAST, room) and notes["held"] < PATIENCE
        notes["held"] = notes["held"] + 1 if behind else 0
        return behind

    def _place(self, node: Node, replica: Replica, into: Sequence[Tensor]) -> Sequence[Tensor]:
        """w = w0 + tau k."""
        most, base, counts = 0, replica.buffer("base", exact=True), _ledger(replica).counts
        with node.exclusive():
            for start, count, place in zip(base, counts, into, strict=True):
                most = max(most, selection.place(start, count, self.unit, place))
        if most >= MOST:
            raise PolyrhythmError(
                f"{node.me}: a parameter is {most} pulses from where it began: training has diverged, or tau "
                f"({self.unit:.3g}) is too small"
            )
        return into

    # --- what is sent -------------------------------------------------------------------------------

    def neighbours(self, node: Node) -> list[Peer]:
        """Whom a worker sends to: all, or its neighbours in a tree of those that are there."""
        there = _all(node)
        if self.topology == "mesh":
            return [peer for peer in there if peer != node.me]
        mine, wide = there.index(node.me), self.fanout
        places = [(mine - 1) // wide] if mine else []
        places += range(wide * mine + 1, min(wide * mine + wide + 1, len(there)))
        return [there[place] for place in places]

    def _post(self, node: Node, replica: Replica, to: Iterable[Peer], *items: Item) -> None:
        """Has items sent, in order, beside whatever goes on: neither a step nor an ear may wait for it."""
        outbox, talking = replica.notes["outbox"], replica.notes["talking"]
        for peer in to:
            with node.exclusive():
                waiting = outbox.setdefault(peer, deque())
                waiting.extend(item for item in items if item[0] == "pulses" or item not in waiting)
                silent = peer not in talking
                talking.add(peer)
            if silent:
                node.spawn(self._talk, node, replica, peer)

    def _talk(self, node: Node, replica: Replica, peer: Peer) -> None:
        """Sends all that waits for a peer."""
        ledger, notes = _ledger(replica), replica.notes
        while True:
            with node.exclusive():
                if not notes["outbox"][peer]:
                    notes["talking"].discard(peer)
                    return
                kind, origin, number = notes["outbox"][peer].popleft()
                tensors: Sequence[Tensor] | None = ()
                fields: dict[str, Any] = {"have": dict(ledger.have)}
                if kind == "pulses":
                    tensors, fields = ledger.message(origin, number), {"origin": origin, "number": number}
                elif kind == "whole":
                    tensors, fields = ledger.whole()
                elif kind == "heard":
                    fields = {"have": self._side(node, replica, peer), "there": _ranks(node)}
            if tensors is None:  # it is kept no longer: the peer has to know that there was something
                self._post(node, replica, [peer], HAVE)
                continue
            try:
                node.send(peer, kind, *tensors, **fields)
            except WaitError:  # it is gone
                continue

    def _tell(self, node: Node, replica: Replica) -> None:
        """Lets the neighbours know what this one has: they send what it lacks, and ask for what they do."""
        self._post(node, replica, self.neighbours(node), HAVE)

    # --- what is heard ------------------------------------------------------------------------------

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        notes = replica.notes
        if message is None:
            return self._look_around(node, replica)
        if message.kind in ("begin", "settle"):
            return self._keep(node, replica, message)
        if message.kind == "digest":
            node.answer(message, digest=_ledger(replica).digest())
        elif message.kind == "state":
            with node.exclusive():
                tensors, fields = _ledger(replica).whole()
            base = replica.buffer("base", exact=True)
            if notes["ready"]:
                node.answer(message, *base, *tensors, ready=True, **fields)
            else:
                node.answer(message, ready=False)
        elif notes["ready"]:
            getattr(self, f"_hear_{message.kind}")(node, replica, message)
            if notes["settle"]:
                self._answer_settled(node, replica)

    def _hear_pulses(self, node: Node, replica: Replica, message: Message) -> None:
        origin, number = message.fields.get("origin"), message.fields.get("number")
        if not isinstance(origin, str) or not isinstance(number, int):
            raise WireError(f"{message.sender} sent pulses without an origin and a number")
        try:
            with node.exclusive():
                what = _ledger(replica).add(origin, number, message.tensors)
        except WireError as error:
            raise WireError(f"{message.sender} sent pulses of {origin}: {error}") from None
        if what == "gap":
            self._ask_for(node, replica, message.sender, origin, number)
        elif what == "new":
            neighbours = self.neighbours(node)
            if self.topology == "tree":
                onward = [peer for peer in neighbours if peer != message.sender]
                self._post(node, replica, onward, ("pulses", origin, number))
            replica.notes["taken"] += 1
            each = replica.notes["each"]
            each[origin] = each.get(origin, 0) + 1
            # Where few train, or one is much faster, what it has sent is confirmed before it holds back.
            if replica.notes["taken"] >= EVERY * len(neighbours) or each[origin] >= 2 * EVERY:
                replica.notes["taken"] = 0
                each.clear()
                self._post(node, replica, neighbours, HEARD)

    def _ask_for(self, node: Node, replica: Replica, peer: Peer, origin: str, number: int) -> None:
        """Something is missing before what has come: all of it is sent again, so one question is enough;
        unless that is lost with its connection, so it is asked again when twice as much is missing."""
        asked, have = replica.notes["asked"], _ledger(replica).have.get(origin, 0)
        known, gap = asked.get((peer, origin), (have, 0))
        if known != have or number - have >= 2 * gap:
            asked[peer, origin] = have, max(number - have, EVERY)
            self._post(node, replica, [peer], HAVE)

    def _side(self, node: Node, replica: Replica, peer: Peer) -> Have:
        """What all have on this worker's side of the edge to a neighbour; in a mesh it is there alone."""
        have, told = dict(_ledger(replica).have), replica.notes["told"]
        if self.topology == "tree":
            others = [told.get(each, {}) for each in self.neighbours(node) if each != peer]
            return {origin: min(number, *_of(others, origin)) for origin, number in have.items()}
        return have

    def _hear_heard(self, node: Node, replica: Replica, message: Message) -> None:
        """What all have on both sides of all edges is kept no longer."""
        neighbours, told = self.neighbours(node), replica.notes["told"]
        if message.fields.get("there") != _ranks(node) or message.sender not in neighbours:
            return  # it is about other sides, for one of the two does not know yet who has come or gone
        with node.exclusive():
            told[message.sender] = _have(message)
            sides = [told.get(peer, {}) for peer in neighbours]
            for origin, number in _ledger(replica).have.items():
                _ledger(replica).settled(origin, min(number, *_of(sides, origin)))

    def _hear_have(self, node: Node, replica: Replica, message: Message) -> None:
        """Both are to know what either knows."""
        theirs = _have(message)
        with node.exclusive():
            missing, lacks = _ledger(replica).missing(theirs), _ledger(replica).lacks(theirs)
            waiting = {*replica.notes["outbox"].get(message.sender, ())}
        items = [WHOLE] if missing is None else [("pulses", *each) for each in missing]
        items = [item for item in items if item not in waiting]
        if lacks:
            items.append(HAVE)
        self._post(node, replica, [message.sender], *items)

    def _hear_whole(self, node: Node, replica: Replica, message: Message) -> None:
        ledger = _ledger(replica)
        theirs, kept = _whole(ledger, message)
        with node.exclusive():
            lacks = ledger.lacks(theirs)
            taken = lacks and ledger.take(message.tensors, theirs, kept)
        if taken and self.topology == "tree":
            self._tell(node, replica)
        elif lacks and not taken:  # it has to hear more of this one before
            self._post(node, replica, [message.sender], HAVE)

    def _look_around(self, node: Node, replica: Replica) -> None:
        """One has come or gone: what the others know may differ from now on, and so may a tree."""
        notes, there = replica.notes, set(others(node))
        with node.exclusive():
            for kind in ("begin", "settle"):
                notes[kind] = [message for message in notes[kind] if node.alive(message)]
            gone, notes["there"] = notes["there"] - there, there
            notes["told"].clear()
            notes["asked"].clear()
        if notes["ready"] and all(peer in node.lost for peer in gone):  # otherwise all is over
            self._tell(node, replica)

    def _keep(self, node: Node, replica: Replica, message: Message) -> None:
        """Keeps a question until it can be answered."""
        with node.exclusive():
            replica.notes[message.kind].append(message)
            asked: list[Message] = []
            if replica.notes["done"] or replica.steps >= self.warmup:
                asked, replica.notes["begin"] = replica.notes["begin"], []
            lacks = message.kind == "settle" and _ledger(replica).lacks(_have(message))
        self._let_begin(node, replica, asked)
        self._answer_settled(node, replica)
        if lacks and replica.notes["ready"]:  # it is on its way, or it was lost with a connection
            mesh = self.topology == "mesh"
            self._post(node, replica, [message.sender] if mesh else self.neighbours(node), HAVE)

    def _answer_settled(self, node: Node, replica: Replica) -> None:
        """Answers those who wait until this one has got all that they have."""
        ledger, notes = _ledger(replica), replica.notes
        with node.exclusive():
            settled = [message for message in notes["settle"] if not ledger.lacks(_have(message))]
            notes["settle"] = [message for message in notes["settle"] if message not in settled]
            have = dict(ledger.have)
        for message in settled:
            node.answer(message, have=have)

    # --- how it ends --------------------------------------------------------------------------------

    def finish(self, node: Node, replica: Replica) -> None:
        import torch

        notes = replica.notes
        with node.exclusive():
            notes["done"] = True
            asked, notes["begin"] = notes["begin"], []
        self._let_begin(node, replica, asked)
        waits = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in replica.owed))
        node.log("residual", messages=notes["sent"], tau=self.unit, norm=waits)
        self._settle(node, replica, {notes["origin"]: notes["sent"]})

    def _settle(self, node: Node, replica: Replica, have: Have) -> dict[Peer, Have]:
        """Waits until all others have this much; what each of them has."""
        answers: dict[Peer, Have] = {}
        asked = set(others(node))
        while asked:
            found, late = _ask_all(node, asked, "settle", have=have)
            answers |= {peer: _have(answer) for peer, answer in found.items()}
            asked = late & set(others(node))
            if asked:  # a connection broke, perhaps, and something was lost with it
                self._post(node, replica, sorted(asked), HAVE)
        return answers

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """Nobody trains any longer: once all have everything, all have the same."""
        ledger = _ledger(replica)
        while True:
            with node.exclusive():
                mine = dict(ledger.have)
            theirs = self._settle(node, replica, mine)
            with node.exclusive():
                ahead = [peer for peer in theirs if ledger.lacks(theirs[peer])]
            if not ahead:
                break
            self._post(node, replica, ahead, HAVE)
        node.log("replica", peer=str(node.me), digest=ledger.digest())
        for peer, answer in _ask_all(node, others(node), "digest")[0].items():
            node.log("replica", peer=str(peer), digest=answer["digest"])
        return self.consensus(node, replica)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """What this worker knows now. The others may know more, but none knows anything else."""
        return self._place(node, replica, replica.buffer("consensus"))


def _ledger(replica: Replica) -> Ledger:
    ledger = replica.notes["ledger"]
    assert isinstance(ledger, Ledger)
    return ledger


def _all(node: Node) -> list[Peer]:
    """All workers, this one too: one that has come late may not be among those it was told of."""
    return sorted({node.me, *node.workers})


def _ask_all(
    node: Node, peers: Iterable[Peer], kind: str, **fields: Any
) -> tuple[dict[Peer, Message], set[Peer]]:
    """Asks several at once: what they answer, and who has not, though it is there."""
    asked = {peer: node.ask(peer, kind, **fields) for peer in sorted(peers)}
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


def _ranks(node: Node) -> list[int]:
    return [peer.rank for peer in _all(node)]


def _of(sides: Iterable[Have], origin: str) -> list[int]:
    """What each side has of an origin; and a large number, so that there is one."""
    return [sys.maxsize, *(side.get(origin, 0) for side in sides)]


def _have(message: Message) -> Have:
    """How far its sender knows each origin, by a message."""
    have = message.fields.get("have")
    if not isinstance(have, dict) or not all(isinstance(each, int) and each >= 0 for each in have.values()):
        raise WireError(f"{message.sender} sent {message.kind!r} that does not say what it has")
    return have


def _whole(ledger: Ledger, message: Message, start: int = 0) -> tuple[Have, Have]:
    """What a message says that brings all of a ledger, from a place of its tensors on."""
    have, kept = _have(message), message.fields.get("kept")
    try:
        ledger.check_whole(message.tensors[start:], have, kept)
    except WireError as error:
        raise WireError(f"{message.sender} sent {message.kind!r}: {error}") from None
    assert isinstance(kept, dict)
    return have, kept


def _refuse_loading(replica: Replica) -> None:
    """What is loaded into one replica would be lost at its next step, which makes it anew from the pulses."""

    def refuse(what: object, *_: object) -> None:
        if what is replica.model:
            raise UsageError("load_state_dict() comes before session.prepare(): all replicas start from it")

    replica.model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
