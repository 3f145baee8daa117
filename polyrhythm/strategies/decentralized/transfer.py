"""What a worker hands to one other at a time, and keeps until that has it.

The other asks for it, before or after it is there. Its connection may break when the answer is on its way:
then it asks again, and is given the same. So what one has given up another gets, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.strategies.decentralized.base import Peers

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Task
    from polyrhythm.core.message import Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


LARGE = 1 << 20  # bytes: more than a connection takes at once, so that a slow peer would hold up the others


@dataclass
class Transfer:
    """Vectors for another, and a few words about them."""

    vectors: Sequence[Tensor]
    words: dict[str, Any] = field(default_factory=dict)
    answered: bool = False
    task: Task | None = None  # that answers

    def reply(self, node: Node, message: Message) -> None:
        """Gives it to one that has asked, beside this thread if that may take long."""
        self.answered = True
        if sum(vector.nbytes for vector in self.vectors) > LARGE:
            self.task = node.spawn(_answer, node, message, self)
        else:
            _answer(node, message, self)

    def settle(self) -> None:
        """Waits until nobody writes to the memory of the one it was for: that may be another's soon."""
        if self.task is not None:
            with contextlib.suppress(PolyrhythmError):
                self.task.join()


def _answer(node: Node, message: Message, gift: Transfer) -> None:
    node.reply(message, *gift.vectors, **gift.words)


@dataclass
class Transfers:
    """All that a worker has handed out and that has not arrived yet, by whom it is for and by name."""

    given: dict[tuple[Peer, str], Transfer] = field(default_factory=dict)
    spare: list[Sequence[Tensor]] = field(default_factory=list)

    def room(self, replica: Replica, times: int = 1) -> Sequence[Tensor]:
        """Vectors to fill: so many times those of the layout."""
        import torch

        if self.spare:
            return self.spare.pop()
        return [torch.empty_like(part) for _ in range(times) for part in replica.parameters]

    def arrived(self, peer: Peer, name: str) -> None:
        """The other has it."""
        gift = self.given.pop((peer, name), None)
        if gift is not None:
            self.spare.append(gift.vectors)

    def left(self, gone: Collection[Peer]) -> dict[tuple[Peer, str], Transfer]:
        """Gives up what was for workers that are gone."""
        return {key: self.given.pop(key) for key in list(self.given) if key[0] in gone}


@dataclass
class Group:
    """Who steps together, and who waits for what is not there yet."""

    ranks: Sequence[int]
    number: int = 0
    waiting: dict[tuple[Peer, str], Message] = field(default_factory=dict)
    seen: set[Peer] = field(default_factory=set)
    gone: set[Peer] = field(default_factory=set)  # they died; who came in their place is not in this group
    began: int = 0  # where its rounds began: not at 0, if it goes on with what was saved

    def name(self, turn: int) -> str:
        """What is handed over in a round, from each to each."""
        return f"{self.number}/{turn}"

    def check(self, message: Message) -> None:
        """What another asks for must be of rounds that began where this worker's did."""
        if _group(message["name"]) == self.number and message["began"] != self.began:
            raise UsageError(
                f"{message.sender} goes on from {message['began']} and another worker from {self.began}: "
                "either each loads what it has saved itself, all at the same place, or none does"
            )

    def look(self, node: Node) -> None:
        """Who was there and is not is gone. Of one that has just come this worker may not have heard yet."""
        there = set(node.members.workers)
        self.gone |= self.seen - there
        self.seen |= there


class Fetched(NamedTuple):
    """Something that was asked for."""

    sender: Peer
    name: str
    reply: Reply


@dataclass(frozen=True)
class Handing(Peers):
    """Workers that step together, in rounds in which each hands something to one other, or to a few."""

    kinds: ClassVar[tuple[str, ...]] = ("fetch", "got")

    def begin(self, node: Node, replica: Replica) -> None:
        # One that comes late is alone at first, and has nothing for those that were in step with the dead.
        ranks = [node.rank] if node.incarnation else [peer.rank for peer in node.members.workers]
        number = node.cohort + 1 if node.incarnation else 0
        replica.notes["group"] = Group(ranks, number, seen=set(node.members.workers))

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        """Each has parameters of its own: they are saved here too, for a run begins with worker 0's."""
        ranks = group_of(replica).ranks
        own = [part.clone() for part in replica.parameters]
        return {"place": ranks.index(node.rank), "places": len(ranks), "parameters": own}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        group = group_of(replica)
        place, places = group.ranks.index(node.rank), len(group.ranks)
        if not kept:
            raise UsageError(
                f"this state has nothing of what {self.name} saves: a run cannot go on with it; leave "
                "session.load_state_dict() out, and it begins anew with the model that was saved"
            )
        if replica.steps:
            raise UsageError("session.load_state_dict() comes before the first step: others count on it")
        if (kept["place"], kept["places"]) != (place, places):
            raise UsageError(
                f"this state was saved by the worker at place {kept['place']} of {kept['places']}, and this "
                f"one is at place {place} of {places}: a run goes on with as many workers as it had when it "
                "was saved, each with its own state"
            )
        with node.lock():
            for mine, saved in zip(replica.parameters, kept["parameters"], strict=True):
                mine.copy_(saved)

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        """From here on rounds are the new group's. Who waits for one of the old that never came is told."""
        with node.lock():
            before = group_of(replica)
            late = {key: each for key, each in before.waiting.items() if _group(key[1]) < number}
            early = {key: each for key, each in before.waiting.items() if key not in late}
            replica.notes["group"] = Group(ranks, number, early, set(node.members.workers))
            for peer, name in list(gifts_of(replica).given):
                if _group(name) < before.number:  # the old group's may still be on their way
                    gifts_of(replica).arrived(peer, name)
        for message in late.values():
            if node.members.alive(message):
                node.reply(message, nothing=True)
        # One that is not there has just come, or has died since the group was made: who answers is alive.
        for peer in sorted({Peer("worker", rank) for rank in ranks} - {node.me, *node.members.workers}):
            try:
                node.request(peer, "look", start=0, stop=0).wait()
            except PeerLost:
                with node.lock():
                    group_of(replica).gone.add(peer)
        self.catch_up(node, replica)

    def hand(
        self, node: Node, replica: Replica, to: int, turn: int, vectors: Sequence[Tensor], **words: Any
    ) -> bool:
        """Lets another worker have these vectors, in this round; False if it is gone."""
        with node.lock():
            group = group_of(replica)
            key = Peer("worker", to), group.name(turn)
            for each in group.waiting.values():
                group.check(each)
            if key[0] in group.gone:
                return False
            gift = gifts_of(replica).given[key] = Transfer(vectors, words)
            message = group.waiting.pop(key, None)
        if message is not None:
            gift.reply(node, message)
        return True

    def fetch(
        self, node: Node, replica: Replica, sender: int, turn: int, into: Sequence[Tensor]
    ) -> Fetched | None:
        """Asks for what another worker hands to this one in a round; None if it is gone."""
        group = group_of(replica)
        peer, name = Peer("worker", sender), group.name(turn)
        if peer in group.gone:
            return None
        return Fetched(peer, name, node.request(peer, "fetch", into=into, name=name, began=group.began))

    def wait(self, fetched: Fetched) -> Message | None:
        """Until it is here; None if it never will be."""
        with contextlib.suppress(PeerLost):
            message = fetched.reply.wait()
            return None if "nothing" in message.fields else message
        return None

    def got(self, node: Node, fetched: Fetched) -> None:
        """Tells the other that it need not keep it any longer."""
        with contextlib.suppress(PeerLost):
            node.send(fetched.sender, "got", name=fetched.name)

    def returned(self, replica: Replica, gift: Transfer) -> None:
        """The one that this was for is gone, and never got it. Called inside `lock()`."""

    def hear(self, node: Node, replica: Replica, message: Message | None) -> None:
        if message is None:
            self._mourn(node, replica)
        elif message.kind == "fetch":
            self._fetched(node, replica, message)
        elif message.kind == "got":
            with node.lock():
                gifts_of(replica).arrived(message.sender, message["name"])
        else:
            super().hear(node, replica, message)

    def _fetched(self, node: Node, replica: Replica, message: Message) -> None:
        key = message.sender, message["name"]
        with node.lock():
            group, gift = group_of(replica), gifts_of(replica).given.get(key)
            if replica.steps:  # before, it may not have loaded what it goes on with
                group.check(message)
            waits = gift is None and _group(key[1]) >= group.number
            if waits:
                group.waiting[key] = message
        if gift is not None:
            gift.reply(node, message)
        elif not waits:
            node.reply(message, nothing=True)

    def _mourn(self, node: Node, replica: Replica) -> None:
        with node.lock():
            group = group_of(replica)
            group.look(node)
            for key in [key for key, message in group.waiting.items() if not node.members.alive(message)]:
                del group.waiting[key]
            left = gifts_of(replica).left(group.gone)
            for (_, name), gift in left.items():
                if not gift.answered and _group(name) == group.number:
                    self.returned(replica, gift)
        for gift in left.values():
            gift.settle()


def gifts_of(replica: Replica) -> Transfers:
    gifts: Transfers = replica.notes.setdefault("gifts", Transfers())
    return gifts


def group_of(replica: Replica) -> Group:
    group: Group = replica.notes["group"]
    return group


def _group(name: str) -> int:
    return int(name.partition("/")[0])
