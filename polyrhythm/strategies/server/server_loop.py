"""The desk of a parameter server: the pushes it has collected, who waits for parameters, and its whole day.

What is collected and how it is applied is up to the strategy; the desk sees to it that each push counts once,
that nobody reads who may not, and that those who leave are waited for no longer.

Where pushes are held until their group is applied, several servers must hold the same groups: if each chose
by itself, every worker might be held by another server, and none could push what the others wait for. So the
first server decides, and tells the others by verdicts: these pushes are a group, this one came too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.compress.reducers import reducer_for
from polyrhythm.compress.replies import reply_codec
from polyrhythm.core.errors import WireError
from polyrhythm.core.events import Applied, Dropped, Pulled, Refused
from polyrhythm.core.message import Message
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.model.vectors import copied

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.core.node import Node
    from polyrhythm.model.shard import Shard
    from polyrhythm.strategies.server.parameter_server import ParameterServer

T = TypeVar("T")
Settings = Sequence[dict[str, Any]]  # of each parameter group


@dataclass
class Push:
    """One worker's update, as the server collects it."""

    message: Message
    staleness: int
    update: Sequence[Tensor]  # lent by the worker until it is answered
    nbytes: int

    @property
    def worker(self) -> int:
        return self.message.sender.rank

    @property
    def name(self) -> tuple[int, int, int]:
        """What it is called on every server; sequence numbers differ between them."""
        return self.worker, self.message.incarnation, self["step"]

    def __getitem__(self, key: str) -> Any:
        return self.message[key]


class ServerLoop:
    """One server at work."""

    def __init__(self, strategy: ParameterServer, node: Node, shard: Shard) -> None:
        self.strategy, self.node, self.shard = strategy, node, shard
        self.group: list[Push] = []  # not applied yet
        self.added = False  # the group's updates are in the buffer "sum" already, and no longer lent
        self.readers: list[Message] = []
        self.started = len(node.members.workers)
        self.initialized = False
        self.norms: dict[int, dict[int, float]] = {}  # squares, by version and server
        # Where each push is an update by itself, its worker knows the norm of all of it.
        self.single = strategy.wait_for == 1 and not strategy.together
        self.lends = strategy.lockstep or strategy.pull == "next-version"
        guided = self.lends and not strategy.lockstep and not self.single and len(node.members.servers) > 1
        self.leads, self.follows = guided and node.rank == 0, guided and node.rank > 0
        self.decided = 0  # verdicts given, or carried out
        self.verdicts: dict[int, Message] = {}  # not carried out yet, by number
        self.finals = 0  # how many may take the final parameters home
        self.pending: dict[tuple[int, int, int], Push] = {}  # not decided upon yet, by name
        # The worker pushes in code, and is answered in code: what each has is known here.
        from polyrhythm.compress.compressor import Decompressor

        self.coder = (
            Decompressor(strategy.codec, shard.layout, shard.start, shard.stop) if strategy.codec else None
        )
        if self.coder is not None:
            self.reducer = reducer_for(self.coder.codec)
        self.senders: dict[int, Compressor] = {}
        shard.clocks.update((worker.rank, 0) for worker in node.members.workers)

    def work(self) -> None:
        """Serves until training is over."""
        node, shard = self.node, self.shard
        while not node.members.over:
            message = node.receive("initialize", "push", "pull", "look", "state", "verdict")
            if message is None:
                self._let_go()
            elif message.kind == "push":
                self._take(message)
            elif message.kind == "initialize":
                if not self.initialized:  # by worker 0, and not by one that came in its place
                    copied(message.tensors, shard.parameters)
                self.initialized = True
                node.reply(message)
            elif message.kind == "state":
                slices, tensors = shard.state()
                node.reply(message, *tensors, slices=slices)
            elif message.kind == "verdict":
                self.verdicts[message["number"]] = message
                node.reply(message)
            else:
                if message.kind == "pull":
                    self._clock(message.sender.rank)
                    self.strategy.hear(shard, message)
                elif message["final"] and not self.follows:
                    self._apply()
                    self._decide("final")
                self.readers.append(message)
            if self.follows:
                self._follow()
            elif self.group and len(self.group) >= self._quorum():
                self._apply()
            if self.initialized:
                self._answer()
        self._apply()

    def _quorum(self) -> int:
        if self.single:
            return 1
        present = len(self.node.members.workers)
        return min(self.strategy.quorum(present, self.started), present)

    def _clock(self, worker: int) -> int:
        """How many pushes a worker has made. One that joins starts with the slowest, or all would wait."""
        return self.shard.clocks.setdefault(worker, min(self.shard.clocks.values(), default=0))

    def _take(self, message: Message) -> None:
        """Collects a push, unless it came before or is too stale."""
        shard, worker = self.shard, message.sender.rank
        if message.sequence <= shard.seen.get(worker, 0):
            self.readers.append(message)  # applied already; only its answer got lost
            return
        shard.seen[worker] = message.sequence
        shard.clocks[worker] = self._clock(worker) + 1
        self.strategy.hear(shard, message)
        staleness = shard.version - message["version"]
        push = Push(message, staleness, (), sum(part.nbytes for part in message.tensors))
        if self.follows:
            push.update = self._update(message)
            self.pending[push.name] = push
            return
        if staleness >= self.strategy.discard:
            self._drop(push)
            return
        push.update = self._update(message)
        self.group.append(push)
        if not self.lends and self._quorum() > 1:
            # Added up as they come, for the answer goes out before the group is applied.
            for place, part in zip(shard.buffer("sum"), self._weighed(push, alone=True), strict=True):
                place.copy_(part) if len(self.group) == 1 else place.add_(part)
            self.added = True
            push.update = ()
            self.readers.append(message)

    def _drop(self, push: Push) -> None:
        self._decide("drop", [push])
        self._log(Dropped, push)
        self.readers.append(push.message)

    def _decide(self, what: str, pushes: Sequence[Push] = ()) -> None:
        """Tells the other servers, if they wait for it, what was decided here."""
        if not self.leads:
            return
        self.decided += 1
        names = [list(push.name) for push in pushes]
        # Asked, and not just sent, so that it is repeated until it has arrived.
        for server in self._others():
            self.node.request(server, "verdict", number=self.decided, what=what, pushes=names)

    def _others(self) -> list[Peer]:
        return [server for server in self.node.members.servers if server != self.node.me]

    def _follow(self) -> None:
        """Carries out verdicts once all their pushes are here; what the dead did not send is no loss."""
        while (verdict := self.verdicts.get(self.decided + 1)) is not None:
            names = [(worker, incarnation, step) for worker, incarnation, step in verdict["pushes"]]
            if any(self._comes(name[0], name[1]) for name in names if name not in self.pending):
                return
            self.decided += 1
            del self.verdicts[self.decided]
            pushes = [self.pending.pop(name) for name in names if name in self.pending]
            for push in pushes:
                push.staleness = self.shard.version - push["version"]
                if verdict["what"] == "drop":
                    self._drop(push)
            if verdict["what"] == "group":
                self.group = pushes
                self._apply()
                if not pushes:  # in step with the other servers nevertheless
                    self._clipped(())
                    self.shard.version += 1
            elif verdict["what"] == "final":
                self.finals += 1
                # Of the dead, who did not live to send it to the first server too.
                alive = self.node.members.alive
                for push in [push for push in self.pending.values() if not alive(push.message)]:
                    self._log(Dropped, self.pending.pop(push.name))

    def _comes(self, worker: int, incarnation: int) -> bool:
        """Whether something of this life of a worker may still come."""
        sequence = incarnation << INCARNATION_SHIFT
        return self.node.members.alive(Message(Peer("worker", worker), "push", sequence))

    def _weighed(self, push: Push, alone: bool) -> Sequence[Tensor]:
        """One update as it is collected: weighted by its staleness, then transformed."""
        strategy, factor = self.strategy, 1.0
        if strategy.weight == "1/tau":
            factor = 1 / max(1, push.staleness)
        elif strategy.weight == "exp":
            factor = math.exp(-strategy.damping * push.staleness)
        if self.single and push["norm"] > strategy.clip:
            factor *= _shrink(strategy.clip, push["norm"])
        if factor != 1:
            push.update = self._scaled(push.update, factor, alone)
        return strategy.transform(self.shard, push)

    def _apply(self) -> None:
        """Applies the group, if there is one: reduced in rank order, unless it is added up already."""
        strategy, shard = self.strategy, self.shard
        group, self.group = self.group, []
        if not group:
            return
        if len(group) > 1:
            group.sort(key=lambda push: (push.worker, push.message.sequence))
        self._decide("group", group)
        if self.added:
            update: Sequence[Tensor] = shard.buffer("sum")
            if strategy.reduce == "mean":
                for part in update:
                    part.div_(len(group))
        else:
            updates = [self._weighed(push, alone=len(group) == 1) for push in group]
            update = updates[0]
            if len(group) > 1:
                update = shard.buffer("sum")
                for place, parts in zip(update, zip(*updates, strict=True), strict=True):
                    reduce(parts, strategy.reduce, [place])
            self.readers += [push.message for push in turned(group, self.node.rank)]
        self.added = False
        if self.coder is not None:
            self.reducer.decide(update, self.coder)
        update = self._clipped(update)
        absent = group[0]["absent"]
        for push in group[1:]:
            absent = [index for index in absent if index in push["absent"]]
        strategy.update(shard, update, absent, group[0]["groups"])
        for push in group:
            self._log(Applied, push)

    def _log(self, event: type[Applied | Dropped], push: Push) -> None:
        number, step = push.message.sequence, push["step"]
        self.node.log(event(self.shard.version, push.worker, number, step, push.staleness, push.nbytes))

    def _answer(self) -> None:
        """Answers those who may read: nobody more than `max_staleness` steps ahead of the slowest."""
        node, shard = self.node, self.shard
        slowest = min(shard.clocks.values(), default=0)
        waiting = []
        for reader in self.readers:
            worker = reader.sender.rank
            if not node.members.alive(reader):
                continue
            if reader.kind == "look" and reader["final"] and self.follows and not self.finals:
                waiting.append(reader)
            elif reader.kind == "look":
                self.finals -= self.follows and reader["final"]
                node.reply(reader, *shard.parameters, version=shard.version)
            elif reader.kind == "push" and not reader["fetch"]:
                node.reply(reader)
            elif self._clock(worker) - slowest > self.strategy.max_staleness:
                waiting.append(reader)
            else:
                if reader.kind == "pull":
                    node.log(Pulled(worker, shard.version))
                more = self.strategy.tell(shard, reader)
                view = self.strategy.view(shard, reader)
                if self.strategy.answers_in_code:
                    version, view = self._in_code(reader, view)
                    node.reply(reader, *view, version=version, **more)
                else:
                    node.reply(reader, *view, version=shard.version, **more)
        self.readers = waiting

    def _in_code(self, reader: Message, view: Sequence[Tensor]) -> tuple[int, Sequence[Tensor]]:
        """What changes what this worker has into what it shall see, nearly; and which version that is.

        The worker adds what the code stands for to what it has, as is done here: so both always know it, bit
        for bit, and what a code leaves out is in the next difference. An answer that got lost is given again,
        and one that a worker has had, if a request comes late and twice, changes nothing.
        """
        shard, worker = self.shard, reader.sender.rank
        known, answers = shard.buffer(known_to(worker)), shard.notes.setdefault("answers", {})
        last, version, given = answers.get(worker, (-1, 0, ()))
        if reader.sequence < last:
            return version, ()  # nobody waits for it
        if reader.sequence == last:
            return version, known if given is None else given
        if reader.kind == "pull" and "coded" not in reader.fields:  # it begins, or begins anew
            copied(view, known)
            self.senders.pop(worker, None)
            answers[worker] = reader.sequence, shard.version, None
            return shard.version, known
        change, sender = shard.buffer("change"), self._sender(worker)
        for place, now, then in zip(change, view, known, strict=True):
            place.copy_(now).sub_(then)
        where = f"{self.node.me} at version {shard.version}"
        shard.layout.check_finite(change, where, shard.start, shard.stop)
        codes = sender.encode_all(change)
        sender.add(codes, known)
        # What travels as it is lies in a buffer that the next answer, to somebody else, overwrites.
        kept = [
            code if segment.coded else code.clone()
            for code, segment in zip(codes, sender.segments, strict=True)
        ]
        answers[worker] = reader.sequence, shard.version, kept
        return shard.version, codes

    def _sender(self, worker: int) -> Compressor:
        codec, shard = self.strategy.codec, self.shard
        assert codec is not None
        from polyrhythm.compress.compressor import Compressor
        from polyrhythm.compress.state import SenderState

        if worker not in self.senders:
            state = SenderState(
                shard.layout, start=shard.start, stop=shard.stop, name=f"to {worker}", seed=self.node.seed,
                worker=worker, workers=len(self.node.members.workers),
            )  # fmt: skip
            self.senders[worker] = Compressor(
                reply_codec(codec), state, start=shard.start, stop=shard.stop, feedback=False
            )
        return self.senders[worker]

    def _let_go(self) -> None:
        """Somebody came or left. What the dead have lent is copied, what they waited for forgotten."""
        present = {worker.rank for worker in self.node.members.workers}
        for worker in [worker for worker in self.shard.clocks if worker not in present]:
            del self.shard.clocks[worker]
            self.strategy.forget(self.shard, worker)
            self.shard.buffers.pop(known_to(worker), None)
            self.shard.notes.get("answers", {}).pop(worker, None)
            self.senders.pop(worker, None)
        self.initialized |= 0 not in present  # then every server starts from the model that it built itself
        self.readers = [reader for reader in self.readers if self.node.members.alive(reader)]
        for push in (*self.group, *self.pending.values()):
            if not self.node.members.alive(push.message):
                push.update = tuple(part.clone() for part in push.update)

    def _clipped(self, update: Sequence[Tensor]) -> Sequence[Tensor]:
        """The update of a group with its norm, over all servers, at most `clip`."""
        if self.single or self.strategy.clip == math.inf:
            return update
        node, version = self.node, self.shard.version
        squares = self.norms.setdefault(version, {})
        squares[node.rank] = norm(update) ** 2
        for server in self._others():
            node.request(server, "norm", version=version, square=squares[node.rank])
        while any(server.rank not in squares for server in node.members.servers):
            message = node.receive("norm")
            if message is None:
                update = tuple(part.clone() for part in update)  # its worker may be the one that left
                self._let_go()
            else:
                node.reply(message)
                self.norms.setdefault(message["version"], {})[message.sender.rank] = message["square"]
        del self.norms[version]
        total = math.sqrt(sum(squares[rank] for rank in sorted(squares)))
        if total <= self.strategy.clip or not update:
            return update
        return self._scaled(update, _shrink(self.strategy.clip, total), alone=True)

    def _scaled(self, update: Sequence[Tensor], factor: float, alone: bool) -> Sequence[Tensor]:
        """An update times a factor; in memory that is used again, if it is the only one now."""
        import torch

        if not alone:
            return tuple(part * factor for part in update)
        places = self.shard.buffer("scaled")
        return tuple(torch.mul(part, factor, out=place) for part, place in zip(update, places, strict=True))

    def _update(self, push: Message) -> tuple[Tensor, ...]:
        update, codec = self._decoded(push), self.strategy.codec
        if codec is not None and codec.feedback and push["absent"]:
            # What was not sent before comes also when its worker has no gradient for it.
            push.fields["absent"] = self.shard.silent(update, push["absent"])
        return update

    def _decoded(self, push: Message) -> tuple[Tensor, ...]:
        if self.coder is None or not push.fields.get("coded", True):
            parts = zip(push.tensors, self.shard.parameters, strict=True)
            return tuple(part.to(like.device) for part, like in parts)
        import torch

        update = tuple(torch.zeros_like(part) for part in self.shard.parameters)
        try:
            self.coder.add(push.tensors, update)
        except WireError as error:  # it counts as nothing, and this server lives on
            worker, why = push.sender.rank, f"{push.sender} sent a push that cannot be read: {error}"
            self.node.log(Refused(worker, push.sequence, why))
            return tuple(part.zero_() for part in update)
        return update


def known_to(worker: int) -> str:
    """The buffer with what a worker has, where it is answered in code."""
    return f"known to {worker}"


def turned(items: list[T], rank: int) -> list[T]:
    """Begins elsewhere on every node: if all sent to the first first, they would queue at its link."""
    first = rank % len(items)
    return items[first:] + items[:first]


def norm(vectors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all of them together."""
    import torch

    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in vectors))


def _shrink(most: float, length: float) -> float:
    return most / (length + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
