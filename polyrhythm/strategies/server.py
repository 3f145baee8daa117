"""The parameter server: one server with three independent knobs.

Workers push gradients and pull parameters, in one round trip. Three questions make the strategies that
people know by name:

- `wait_for`: how many pushes does the server collect before it applies their mean? (0: one of every worker)
- `max_staleness`: how many steps may a worker be ahead of the slowest before it has to wait?
- `weight`: how much does a stale update count?

The flat vector is split into near-equal ranges over any number of servers. Each keeps its own version, so
staleness is known per server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.collectives.arithmetic import cut, reduce, split
from polyrhythm.errors import UsageError
from polyrhythm.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.node import Message, Node, Peer
    from polyrhythm.replica import Replica, Shard


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """The design space; `sync` and `async` are points in it."""

    servers: ClassVar[bool] = True
    codecs: ClassVar[bool] = True

    wait_for: int = 1
    max_staleness: float = math.inf
    weight: Literal["1", "1/tau"] = "1"

    def __post_init__(self) -> None:
        if self.wait_for < 0:
            raise UsageError("wait_for must be 0 (every worker) or more")
        if not self.max_staleness >= 0:
            raise UsageError("max_staleness must be 0 or more")

    @property
    def lockstep(self) -> bool:
        return self.wait_for == 0 and self.max_staleness == 0

    def check(self, workers: int, servers: int) -> None:
        if self.wait_for > workers:
            raise UsageError(
                f"{self}: wait_for is {self.wait_for} but there are {workers} workers; use 0 for all"
            )

    # --- a worker -----------------------------------------------------------------------------------

    def start(self, node: Node, replica: Replica) -> None:
        if node.rank == 0:
            for server, start, stop in self._ranges(node, replica):
                node.ask(server, "initialize", *cut(replica.parameters, start, stop)).wait()
        self._pull(node, replica, replica.parameters)

    def step(self, node: Node, replica: Replica) -> None:
        settings, absent = replica.hyper_parameters(), replica.absent
        replies = []
        for server, start, stop in self._ranges(node, replica):
            gradient = cut(replica.gradient, start, stop)
            if self.codec is not None:
                gradient = tuple(self.codec.encode(part) for part in gradient)
            reply = node.ask(
                server, "push", *gradient, into=cut(replica.parameters, start, stop),
                step=replica.steps, version=replica.version[server.rank],
                absent=absent, groups=settings,
            )  # fmt: skip
            replies.append((server, reply))
        for server, reply in replies:
            replica.version[server.rank] = reply.wait()["version"]

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._pull(node, replica, replica.buffer("consensus"), look=True)

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._pull(node, replica, replica.parameters)

    def restore(self, node: Node, replica: Replica) -> None:
        answers = [node.ask(server, "state").wait() for server in node.servers]
        replica.restore([(answer["slices"], list(answer.tensors)) for answer in answers])

    def _pull(
        self, node: Node, replica: Replica, into: Sequence[Tensor], look: bool = False
    ) -> Sequence[Tensor]:
        """Fills `into` with the servers' parameters; to `look` at them is not to train from them."""
        ranges = self._ranges(node, replica)
        replies = [
            (each, node.ask(each, "pull", into=cut(into, start, stop))) for each, start, stop in ranges
        ]
        for server, reply in replies:
            version = reply.wait()["version"]
            if not look:
                replica.version[server.rank] = version
        return into

    def _ranges(self, node: Node, replica: Replica) -> list[tuple[Peer, int, int]]:
        ranges = split(replica.layout.total, len(node.servers))
        return [(server, *range_) for server, range_ in zip(node.servers, ranges, strict=True)]

    # --- a server -----------------------------------------------------------------------------------

    def serve(self, node: Node, shard: Shard) -> None:
        group: list[Message] = []  # pushes not yet applied
        readers: list[Message] = []  # those who wait for parameters
        initialized = False
        while True:
            message = node.receive("initialize", "push", "pull", "state")
            if message is None and not node.workers:
                return
            if message is not None:
                worker = message.sender.rank
                if message.kind == "initialize":
                    for mine, given in zip(shard.parameters, message.tensors, strict=True):
                        mine.copy_(given)
                    initialized = True
                    node.answer(message)
                elif message.kind == "state":
                    slices, tensors = shard.state()
                    node.answer(message, *tensors, slices=slices)
                elif message.kind == "push" and message.sequence > shard.seen.get(worker, 0):
                    shard.seen[worker] = message.sequence
                    group.append(message)
                else:
                    readers.append(message)  # a pull, or a push that was applied before its answer got lost
            workers = [peer.rank for peer in node.workers]
            if group and len(group) >= min(self.wait_for or len(workers), len(workers)):
                self._apply(node, shard, group)
                readers += group
                group = []
            if initialized:
                slowest = min((shard.clocks.get(worker, 0) for worker in workers), default=0)
                waiting = []
                for reader in readers:
                    if shard.clocks.get(reader.sender.rank, 0) - slowest > self.max_staleness:
                        waiting.append(reader)
                    else:
                        node.answer(reader, *shard.parameters, version=shard.version)
                readers = waiting

    def _apply(self, node: Node, shard: Shard, group: Sequence[Message]) -> None:
        """Applies the mean of a group, taken in rank order, each push weighted by its staleness."""
        pushes = sorted(group, key=lambda push: (push.sender, push.sequence))
        gradients, stale = [], []
        for push in pushes:
            staleness = shard.version - push["version"]
            gradient = self._decode(push, shard)
            if self.weight == "1/tau" and staleness > 1:
                gradient = tuple(part / staleness for part in gradient)
            gradients.append(gradient)
            stale.append(staleness)
            shard.clocks[push.sender.rank] = push["step"]
        mean = gradients[0]
        if len(pushes) > 1:
            mean = shard.buffer("mean")
            for part, inputs in zip(mean, zip(*gradients, strict=True), strict=True):
                reduce(inputs, "mean", [part])
        absent = set.intersection(*(set(push["absent"]) for push in pushes))
        shard.apply(mean, sorted(absent), pushes[0]["groups"])
        for push, staleness in zip(pushes, stale, strict=True):
            node.log(
                "apply", version=shard.version, worker=push.sender.rank, sequence=push.sequence,
                step=push["step"], staleness=staleness, bytes=sum(part.nbytes for part in push.tensors),
            )  # fmt: skip

    def _decode(self, push: Message, shard: Shard) -> tuple[Tensor, ...]:
        parts = list(zip(push.tensors, shard.parameters, strict=True))
        if self.codec is None:
            return tuple(part.to(like.device) for part, like in parts)
        return tuple(
            self.codec.decode(part.to(like.device), like.numel(), like.dtype) for part, like in parts
        )


@dataclass(frozen=True)
class Sync(ParameterServer):
    """The server waits for a push of every worker, applies their mean, and answers all (hard synchronous).

    G = mean_i g_i, the gradient of the union of the batches; staleness is always 0. The same bits as
    `allreduce`, unless the script clips: a worker clips its own gradient before it is pushed.

    >>> import polyrhythm as pr
    >>> pr.parse("sync").lockstep
    True
    """

    name: ClassVar[str] = "sync"
    paper: ClassVar[str] = "Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server"

    wait_for: int = 0
    max_staleness: float = 0


@dataclass(frozen=True)
class Async(ParameterServer):
    """The server applies each push as it comes and answers at once; nobody waits (Downpour).

    w <- Opt(w, g_i) for one worker's gradient at a time. Mean staleness is N-1 for any mix of speeds, so the
    learning rate has to shrink as workers are added.

    >>> import polyrhythm as pr
    >>> print(pr.parse("async:weight=1/tau"))
    async:weight=1/tau
    """

    name: ClassVar[str] = "async"
    paper: ClassVar[str] = "Dean et al. 2012, Large Scale Distributed Deep Networks"
