"""The parameter server: one server with a few independent knobs.

Workers push updates and pull parameters, in one round trip. The strategies that people know by name are
points in one space (see `points`), and corrections of stale updates are small transforms of one push
(see `corrections`, `momentum`, `elastic`):

    on PULL(i):  wait until i may read; answer VIEW(i)
    on PUSH(i):  drop it if it was seen before, or if it is too stale
                 collect TRANSFORM(update); once there are enough: w <- UPDATE(w, reduce(group)), version += 1

The flat vector is split into near-equal ranges over any number of servers. Each keeps its own version, so
what a worker pulls may be torn, its version is a vector, and staleness is known per server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from polyrhythm.collectives.arithmetic import cut, reduce, split
from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Message, Node, Peer, Reply
    from polyrhythm.replica import Replica, Shard

Settings = Sequence[dict[str, Any]]
T = TypeVar("T")


@dataclass
class Push:
    """One worker's update, as the server collects it."""

    message: Message
    staleness: int
    update: Sequence[Tensor]
    nbytes: int

    @property
    def worker(self) -> int:
        return self.message.sender.rank

    def __getitem__(self, key: str) -> Any:
        return self.message[key]


@dataclass
class Desk:
    """What a server has on its table: pushes that are not applied yet, and who waits for parameters."""

    group: list[Push] = field(default_factory=list)
    added: bool = False  # the group's updates are in the buffer "sum" already, and no longer lent
    readers: list[Message] = field(default_factory=list)
    started: int = 0  # workers at the start of the run
    initialized: bool = False


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """The design space. Its knobs are those of every strategy with servers.

    - `wait_for`: how many pushes does the server collect before it applies them? (0: one of every worker)
    - `max_staleness`: how many steps may a worker be ahead of the slowest before it has to wait?
      With 0 nobody is ahead, so the pushes of one step are withheld and applied as one.
    - `weight`: how much does an update of staleness tau count? 1, 1/tau (at most 1) or exp(-damping tau)
    - `discard`: an update this stale is dropped, and its worker goes on from the present parameters
    - `pull`: does a push that is not applied yet get its answer at once, or with the next version?
    - `reduce`: is a group applied as its mean or as its sum?
    - `clip`: the largest norm, over all servers, of the gradient that is applied
    - `prefetch`: the answer to a push is waited for after the next batch; it costs a step of staleness
    """

    servers: ClassVar[bool] = True
    codecs: ClassVar[bool] = True

    wait_for: int = 1
    max_staleness: float = math.inf
    weight: Literal["1", "1/tau", "exp"] = "1"
    damping: float = 0.1
    discard: float = math.inf
    pull: Literal["at-once", "next-version"] = "at-once"
    reduce: Literal["mean", "sum"] = "mean"
    clip: float = math.inf
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.wait_for < 0:
            raise UsageError("wait_for must be 0 (every worker) or more")
        if not self.max_staleness >= 0:
            raise UsageError("max_staleness must be 0 or more")
        if not 0 <= self.damping < math.inf:
            raise UsageError("damping must be 0 or more")
        if not self.discard >= 1:
            raise UsageError("discard must be 1 or more: a fresh update has staleness 0")
        if not self.clip > 0:
            raise UsageError("clip must be above 0")

    @property
    def _together(self) -> bool:
        """Whether a group is one push of every worker."""
        return self.wait_for == 0 or (self.wait_for == 1 and self.max_staleness == 0)

    @property
    def lockstep(self) -> bool:
        return self._together and self.max_staleness == 0

    def check(self, workers: int, servers: int) -> None:
        if self.wait_for > workers:
            raise UsageError(
                f"{self}: wait_for is {self.wait_for} but there are {workers} workers; use 0 for all"
            )
        if self.clip < math.inf and self.discard < math.inf and self.wait_for != 1 and servers > 1:
            raise UsageError(
                f"{self}: servers that drop different pushes have no common norm; leave out clip, or use 1 server"
            )

    # --- a worker -----------------------------------------------------------------------------------

    def start(self, node: Node, replica: Replica) -> None:
        if node.rank == 0:
            for server, start, stop in self._ranges(node, replica):
                node.ask(server, "initialize", *cut(replica.parameters, start, stop)).wait()
        self._pull(node, replica)

    def step(self, node: Node, replica: Replica) -> None:
        self._push(node, replica, *self.outgoing(replica))

    def outgoing(self, replica: Replica) -> tuple[Sequence[Tensor], Settings]:
        """What a worker pushes, and the settings of its parameter groups."""
        return replica.gradient, replica.hyper_parameters()

    def finish(self, node: Node, replica: Replica) -> None:
        self._take_ahead(replica)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._look(node, replica, replica.buffer("consensus"))

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._look(node, replica, replica.parameters, final=True)

    def restore(self, node: Node, replica: Replica) -> None:
        _wait(replica.outstanding)
        answers = [node.ask(server, "state").wait() for server in node.servers]
        replica.restore([(answer["slices"], list(answer.tensors)) for answer in answers])

    def _push(
        self,
        node: Node,
        replica: Replica,
        update: Sequence[Tensor],
        settings: Settings = (),
        *,
        into: Sequence[Tensor] | None = None,
        fetch: bool = True,
        absent: Sequence[int] | None = None,
    ) -> None:
        """Pushes an update, and unless it is told not to, fetches the parameters that result."""
        versions = dict(replica.version)  # of the parameters that the update was computed on
        into = replica.parameters if into is None else into
        if self.prefetch:
            self._take_ahead(replica)
            update, into = _copied(update, replica.buffer("pushed")), replica.buffer("ahead")
        fields = {
            "step": replica.steps, "fetch": fetch, "groups": list(settings),
            "absent": replica.absent if absent is None else list(absent),
            "norm": _norm(update) if self.clip < math.inf else 0.0,
        }  # fmt: skip
        replies = []
        for server, start, stop in self._ranges(node, replica):
            parts = cut(update, start, stop)
            if self.codec is not None:
                parts = tuple(self.codec.encode(part) for part in parts)
            places = cut(into, start, stop) if fetch else ()
            reply = node.ask(server, "push", *parts, into=places, version=versions[server.rank], **fields)
            replies.append((server, reply))
        if self.prefetch and fetch:
            replica.outstanding = replies
        else:
            for server, reply in replies:
                answer = reply.wait()
                if fetch:
                    replica.version[server.rank] = answer["version"]

    def _take_ahead(self, replica: Replica) -> None:
        """Moves the parameters that came while the last batch was computed into their place."""
        for server, reply in replica.outstanding:
            replica.version[server.rank] = reply.wait()["version"]
        if replica.outstanding:
            replica.outstanding = []
            _copied(replica.buffer("ahead"), replica.parameters)

    def _pull(self, node: Node, replica: Replica) -> None:
        """Takes the servers' parameters, to train from them."""
        replies = [
            (server, node.ask(server, "pull", into=cut(replica.parameters, start, stop)))
            for server, start, stop in self._ranges(node, replica)
        ]
        for server, reply in replies:
            replica.version[server.rank] = reply.wait()["version"]

    def _look(
        self, node: Node, replica: Replica, into: Sequence[Tensor], final: bool = False
    ) -> Sequence[Tensor]:
        """Fills `into` with the servers' parameters, only to look at them."""
        _wait(replica.outstanding)
        ranges = self._ranges(node, replica)
        _wait([(each, node.ask(each, "look", into=cut(into, a, b), final=final)) for each, a, b in ranges])
        return into

    def _ranges(self, node: Node, replica: Replica) -> list[tuple[Peer, int, int]]:
        ranges = split(replica.layout.total, len(node.servers))
        pairs = [(server, *range_) for server, range_ in zip(node.servers, ranges, strict=True)]
        return _turned(pairs, node.rank)

    # --- a server -----------------------------------------------------------------------------------

    def serve(self, node: Node, shard: Shard) -> None:
        desk = Desk(started=len(node.workers))
        shard.clocks.update((worker.rank, 0) for worker in node.workers)
        while not node.over:
            message = node.receive("initialize", "push", "pull", "look", "state")
            if message is None:
                self._let_go(node, shard, desk)
            elif message.kind == "push":
                self._take(node, shard, desk, message)
            elif message.kind == "initialize":
                if not desk.initialized:  # by worker 0, and not by one that came in its place
                    _copied(message.tensors, shard.parameters)
                desk.initialized = True
                node.answer(message)
            elif message.kind == "state":
                slices, tensors = shard.state()
                node.answer(message, *tensors, slices=slices)
            else:
                if message.kind == "pull":
                    self._join(shard, message.sender.rank)
                elif message["final"]:
                    self._apply(node, shard, desk)
                desk.readers.append(message)
            if desk.group and len(desk.group) >= min(self.quorum(node, desk), len(node.workers)):
                self._apply(node, shard, desk)
            if desk.initialized:
                self._answer(node, shard, desk)
        self._apply(node, shard, desk)

    def quorum(self, node: Node, desk: Desk) -> int:
        """How many pushes make a group."""
        return len(node.workers) if self._together else self.wait_for

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        """What is collected of an update. It may not be changed in place: it is lent."""
        return push.update

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        """Applies what was collected; here by the user's optimizer, with the pushers' settings."""
        shard.apply(update, absent, groups)

    def view(self, shard: Shard, reader: Message) -> Sequence[Tensor]:
        """What a worker that pulls, or has pushed, gets to see."""
        return shard.parameters

    def forget(self, shard: Shard, worker: int) -> None:
        """A worker has left: what was kept for it is of no use any longer."""

    def _take(self, node: Node, shard: Shard, desk: Desk, message: Message) -> None:
        """Collects a push, unless it came before or is too stale."""
        worker = message.sender.rank
        if message.sequence <= shard.seen.get(worker, 0):
            desk.readers.append(message)  # applied already; only its answer got lost
            return
        shard.seen[worker] = message.sequence
        shard.clocks[worker] = self._join(shard, worker) + 1
        staleness = shard.version - message["version"]
        nbytes = sum(part.nbytes for part in message.tensors)
        if staleness >= self.discard:
            node.log(
                "drop", version=shard.version, worker=worker, sequence=message.sequence,
                step=message["step"], staleness=staleness, bytes=nbytes,
            )  # fmt: skip
            desk.readers.append(message)
            return
        push = Push(message, staleness, self._decode(message, shard), nbytes)
        desk.group.append(push)
        together = self._together or self.pull == "next-version"
        if not together and min(self.quorum(node, desk), len(node.workers)) > 1:
            # Added up as they come, for the answer goes out before the group is applied.
            total = shard.buffer("sum")
            for place, part in zip(total, self._weighed(shard, push), strict=True):
                place.copy_(part) if len(desk.group) == 1 else place.add_(part)
            desk.added = True
            push.update = ()
            desk.readers.append(message)

    def _join(self, shard: Shard, worker: int) -> int:
        """The clock of a worker. One that joins starts with the slowest, or all would wait for it."""
        return shard.clocks.setdefault(worker, min(shard.clocks.values(), default=0))

    def _weighed(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        """One update as it is collected: weighted by its staleness, then transformed."""
        factor = 1.0
        if self.weight == "1/tau":
            factor = 1 / max(1, push.staleness)
        elif self.weight == "exp":
            factor = math.exp(-self.damping * push.staleness)
        if self._single and push["norm"] > self.clip:
            factor *= self.clip / (push["norm"] + 1e-6)  # as in torch.nn.utils.clip_grad_norm_
        if factor != 1:
            push.update = tuple(part * factor for part in push.update)
        return self.transform(shard, push)

    @property
    def _single(self) -> bool:
        """Whether each push is an update by itself, so that its worker knows the norm of all of it."""
        return self.wait_for == 1 and not self._together

    def _apply(self, node: Node, shard: Shard, desk: Desk) -> None:
        """Applies the group, if there is one: reduced in rank order, unless it is added up already."""
        group, desk.group = desk.group, []
        if not group:
            return
        group.sort(key=lambda push: (push.worker, push.message.sequence))
        if desk.added:
            update: Sequence[Tensor] = shard.buffer("sum")
            if self.reduce == "mean":
                for part in update:
                    part.div_(len(group))
        else:
            updates = [self._weighed(shard, push) for push in group]
            update = updates[0]
            if len(group) > 1:
                update = shard.buffer("sum")
                for place, parts in zip(update, zip(*updates, strict=True), strict=True):
                    reduce(parts, self.reduce, [place])
            desk.readers += [push.message for push in _turned(group, node.rank)]
        desk.added = False
        if self.clip < math.inf and not self._single:
            update = self._clipped(node, shard, update)
        absent = set.intersection(*(set(push["absent"]) for push in group))
        before = shard.version
        self.update(shard, update, sorted(absent), group[0]["groups"])
        assert shard.version == before + 1, "an update must bump the version once"
        for push in group:
            node.log(
                "apply", version=shard.version, worker=push.worker, sequence=push.message.sequence,
                step=push["step"], staleness=push.staleness, bytes=push.nbytes,
            )  # fmt: skip

    def _answer(self, node: Node, shard: Shard, desk: Desk) -> None:
        """Answers those who may read: nobody more than `max_staleness` steps ahead of the slowest."""
        slowest = min(shard.clocks.values(), default=0)
        waiting = []
        for reader in desk.readers:
            if not node.alive(reader):
                continue
            if reader.kind == "look":
                node.answer(reader, *shard.parameters, version=shard.version)
            elif reader.kind == "push" and not reader["fetch"]:
                node.answer(reader)
            elif self._join(shard, reader.sender.rank) - slowest > self.max_staleness:
                waiting.append(reader)
            else:
                if reader.kind == "pull":
                    node.log("pull", worker=reader.sender.rank, version=shard.version)
                node.answer(reader, *self.view(shard, reader), version=shard.version)
        desk.readers = waiting

    def _let_go(self, node: Node, shard: Shard, desk: Desk) -> None:
        """Somebody came or left. What the dead have lent is copied, what they waited for forgotten."""
        present = {worker.rank for worker in node.workers}
        for worker in [worker for worker in shard.clocks if worker not in present]:
            del shard.clocks[worker]
            self.forget(shard, worker)
        desk.initialized |= 0 not in present  # then every server starts from the model that it built itself
        desk.readers = [reader for reader in desk.readers if node.alive(reader)]
        for push in desk.group:
            if not node.alive(push.message):
                push.update = tuple(part.clone() for part in push.update)

    def _clipped(self, node: Node, shard: Shard, update: Sequence[Tensor]) -> Sequence[Tensor]:
        """The update of a group with its norm, over all servers, at most `clip`."""
        others = {server for server in node.servers if server != node.me}
        norms: dict[int, dict[int, float]] = shard.notes.setdefault("norms", {})
        mine = norms.setdefault(shard.version, {})
        mine[node.rank] = _norm(update) ** 2
        for server in others:
            node.send(server, "norm", version=shard.version, square=mine[node.rank])
        while any(server.rank not in mine for server in node.servers):
            message = node.receive("norm")
            if message is not None:
                norms.setdefault(message["version"], {})[message.sender.rank] = message["square"]
        del norms[shard.version]
        norm = math.sqrt(sum(mine[rank] for rank in sorted(mine)))
        if norm <= self.clip:
            return update
        return tuple(part * (self.clip / (norm + 1e-6)) for part in update)

    def _decode(self, push: Message, shard: Shard) -> tuple[Tensor, ...]:
        parts = list(zip(push.tensors, shard.parameters, strict=True))
        if self.codec is None:
            return tuple(part.to(like.device) for part, like in parts)
        return tuple(
            self.codec.decode(part.to(like.device), like.numel(), like.dtype) for part, like in parts
        )


def _turned(items: list[T], rank: int) -> list[T]:
    """Begins elsewhere on every node: if all sent to the first first, they would queue at its link."""
    first = rank % len(items)
    return items[first:] + items[:first]


def _copied(source: Sequence[Tensor], target: Sequence[Tensor]) -> Sequence[Tensor]:
    for place, part in zip(target, source, strict=True):
        place.copy_(part)
    return target


def _wait(replies: Sequence[tuple[Peer, Reply]]) -> None:
    for _, reply in replies:
        reply.wait()


def _norm(vectors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in vectors))
