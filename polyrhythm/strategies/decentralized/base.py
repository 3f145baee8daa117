"""Workers that exchange with each other, without a server.

Each worker replies to requests while its script computes. Only the script's own thread sends requests, so no
reply waits for another. A replacement first copies the parameters of another worker. Until it has them, it
replies only to other replacements that copy: with nothing, so that none waits for one that waits.

No worker holds the one model: it is the mean of all replicas, so none leaves before the last has finished.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.core.errors import PeerLost, UsageError, WireError
from polyrhythm.core.node import others
from polyrhythm.core.peer import Peer
from polyrhythm.core.published import Key, Publication, Published
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import State, Worker
from polyrhythm.model.vectors import cloned, copied, cut

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.group import Group
    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


# Elements of a replica that are read at a time: 1/256 of the model, within limits: each is a round trip.
SMALLEST_SLICE, LARGEST_SLICE = 1 << 17, 1 << 19


@dataclass(frozen=True)
class Decentralized(Strategy):
    """Workers that exchange with each other, and continue when some die."""

    @property
    def traits(self) -> Traits:
        return Traits(parameters_held_by_peers=True, survives_loss=True)


class DecentralizedWorker(Worker):
    """One of the workers: how it starts, which parameters others may read, and the mean of all."""

    kind: ClassVar[str] = "fetch"  # of requests for this worker's publications

    def __init__(self, strategy: Strategy, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.published = Published(node, self.kind, self.returned)
        self._has_parameters = not node.incarnation  # False while a replacement copies them

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of messages that `on_message` takes."""
        return "read", "adopt", *self.published.kinds

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """The ranks of the workers that exchange with each other, this one among them."""

    def start(self) -> None:
        node = self.node
        if not node.incarnation:
            self.group.broadcast(*self.replica.parameters)
        else:
            # Before it copies: two replacements that start at the same time may ask each other.
            node.subscribe(self.on_adopt, "adopt")
            if not self.adopt(self.replica.parameters):
                raise PeerLost(
                    f"{node.me} is a replacement, and no worker is left to copy the parameters from"
                )
            with node.lock():
                self._has_parameters = True
        self.begin()
        node.subscribe(self.on_message, *self.kinds)

    def begin(self) -> None:
        """Runs once the initial parameters are here, before this worker replies to requests."""

    def on_message(self, message: Message | None) -> None:
        """Handles a message of another worker while the script computes; None if one joined or left."""
        if message is not None and message.kind == "adopt":
            return self.on_adopt(message)
        if message is None or message.kind != "read":
            return self.published.on_message(message)
        start, stop, total = message["start"], message["stop"], self.replica.layout.total
        if not 0 <= start <= stop <= total:
            raise WireError(f"{message.sender} requested elements {start} to {stop}, but there are {total}")
        with self.node.lock():
            parameters = self.read_parameters(start, stop)
        self.node.reply(message, *parameters)

    def on_adopt(self, message: Message | None) -> None:
        """Gives a replacement all parameters, or nothing while this worker is copying them itself."""
        if message is None:
            return
        with self.node.lock():
            parameters = self.read_parameters(0, self.replica.layout.total) if self._has_parameters else None
        if parameters is None:
            self.node.reply(message, nothing=True)
        else:
            self.node.reply(message, *parameters)

    def read_parameters(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """A copy of a range of this worker's parameters. They change inside `node.lock()` only."""
        return tuple(part.clone() for part in cut(self.replica.parameters, start, stop))

    def returned(self, publication: Publication) -> None:
        """Called inside `node.lock()` when a publication cannot arrive because its reader died."""

    def adopt(self, into: Sequence[Tensor]) -> bool:
        """Takes the parameters of the first worker that has some; False if there is none."""
        for peer in others(self.node):
            try:
                reply = self.node.request(peer, "adopt", into=into).wait()
            except PeerLost:
                continue
            if "nothing" not in reply.fields:  # otherwise it is copying them itself
                return True
        return False

    # --- the mean of all ----------------------------------------------------------------------------

    def consensus(self, final: bool = False) -> Sequence[Tensor]:
        self.published.trim()
        if not final and self.together:
            mean = copied(self.replica.parameters, self.replica.consensus_vectors())
            try:
                self.group.all_reduce(*mean, op="mean")
                return mean
            except PeerLost:
                self.replica.abandon_consensus()
        return self.fetch_mean(self.replica.consensus_vectors())

    @property
    def together(self) -> bool:
        """True if all workers are there, and at the same place of the script."""
        return self.strategy.traits.lockstep and not self.node.incarnation and not self.node.members.lost

    def fetch_mean(self, into: Sequence[Tensor]) -> Sequence[Tensor]:
        """The mean of all replicas as they are now, summed in rank order."""
        import torch

        node, total = self.node, self.replica.layout.total
        size = max(SMALLEST_SLICE, min(total // 256, LARGEST_SLICE))
        for start in range(0, total, size):
            stop = min(start + size, total)
            with node.lock():
                replicas = {node.me: self.read_parameters(start, stop)}
            requests = []
            for peer in others(node):
                buffers = tuple(torch.empty_like(part) for part in replicas[node.me])
                requests.append(
                    (peer, buffers, node.request(peer, "read", into=buffers, start=start, stop=stop))
                )
            for peer, buffers, reply in requests:
                try:
                    reply.wait()
                except PeerLost:
                    continue
                replicas[peer] = buffers
            for index, place in enumerate(cut(into, start, stop)):
                reduce([replicas[peer][index] for peer in sorted(replicas)], "mean", [place])
        return into

    # --- saved state --------------------------------------------------------------------------------

    @property
    def position(self) -> list[int]:
        """The position of this worker among those that exchange, and their number."""
        return [self.ranks.index(self.node.rank), len(self.ranks)]

    def state_dict(self) -> State:
        # Workers differ, and a run starts with the parameters of the first.
        return {"place": self.position, "parameters": cloned(self.replica.parameters)}

    def load_state_dict(self, state: State) -> None:
        if not state:
            raise UsageError(
                f"this state has none of the values that {self.strategy.name} saves, so a run cannot resume "
                "from it; leave out session.load_state_dict() to start from the saved model"
            )
        if self.replica.steps:
            raise UsageError("session.load_state_dict() must be called before the first step")
        if state["place"] != self.position:
            (saved, of), (position, workers) = state["place"], self.position
            raise UsageError(
                f"this state was saved at position {saved} of {of}, and this worker is at {position} of "
                f"{workers}: resume with as many workers as before, each with the state that it saved"
            )
        with self.node.lock():
            copied(state["parameters"], self.replica.parameters)


class Cohort:
    """The workers that share an epoch and step together."""

    def __init__(self, node: Node, ranks: Sequence[int], number: int) -> None:
        self.ranks, self.number = ranks, number
        self.gone: set[Peer] = set()  # they died; their replacements belong to the next cohort
        self._members, self._lost = node.members, dict(node.members.lost)

    def key(self, round_: int) -> Key:
        return Key(self.number, round_)

    def forget_the_dead(self) -> None:
        self.gone |= {peer for peer, last in self._members.lost.items() if last > self._lost.get(peer, -1)}


class CohortWorker(DecentralizedWorker):
    """One of the workers of a cohort. Its rounds are counted within the cohort."""

    def __init__(self, strategy: Strategy, node: Node, replica: Replica, group: Group) -> None:
        super().__init__(strategy, node, replica, group)
        self.cohort = Cohort(node, [peer.rank for peer in node.members.workers], 0)

    @property
    def ranks(self) -> Sequence[int]:
        return self.cohort.ranks

    def begin(self) -> None:
        if self.node.incarnation:
            # Alone until the next cohort, with nothing for those that stepped with the worker that died.
            self.cohort = Cohort(self.node, [self.node.rank], self.node.cohort + 1)
            self.published.begin(self.cohort.key(0))

    def on_message(self, message: Message | None) -> None:
        if message is None:
            with self.node.lock():
                self.cohort.forget_the_dead()
        super().on_message(message)

    def on_membership(self, ranks: Sequence[int], number: int) -> None:
        with self.node.lock():
            before, self.cohort = self.cohort, Cohort(self.node, ranks, number)
            # Publications of the last cohort may still be on their way.
            self.published.forget(before.key(0))
            self.published.begin(self.cohort.key(0))

    def resume(self, round_: int, origin: str) -> None:
        """Continues with a round of the run that was saved."""
        self.published.begin(self.cohort.key(round_), origin)

    def catch_up(self) -> None:
        """Takes over the latest parameters: a replacement has waited for its first epoch since it started."""
        latest = self.replica.scratch() if self.node.incarnation and not self.replica.steps else ()
        if latest and self.adopt(latest):
            with self.node.lock():
                copied(latest, self.replica.parameters)
