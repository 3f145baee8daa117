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
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.compress.replies import reply_codec
from polyrhythm.compress.transforms.base import needs_norm
from polyrhythm.core.errors import UsageError
from polyrhythm.core.legacy import Legacy
from polyrhythm.model.vectors import copied, cut
from polyrhythm.strategies.legacy_ops import check_way, rates_of_residuals, rescale, sender_of
from polyrhythm.strategies.server.server_loop import Push, ServerLoop, Settings, norm, turned

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.compress.compressor import Compressor, Decompressor
    from polyrhythm.core.message import Field, Message, Reply
    from polyrhythm.core.node import Node
    from polyrhythm.core.peer import Peer
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class ParameterServer(Legacy):
    """The design space. Of its knobs each strategy has those that make sense with it: its `free` ones.

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
    free: ClassVar[tuple[str, ...]] = ()

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
        for knob in fields(ParameterServer):
            mine = type(self).__dataclass_fields__[knob.name].default
            if knob.name not in ("codec", self.main, *self.free) and getattr(self, knob.name) != mine:
                raise UsageError(
                    f"{knob.name} cannot be set here; {self.name} has: {', '.join(self.choices())}"
                )
        for name in ("max_staleness", "discard"):
            value = getattr(self, name)
            if value != math.inf and not (value >= 0 and value == int(value)):
                raise UsageError(f"{name} must be a whole number, 0 or more, or inf")
        if self.wait_for < 0:
            raise UsageError("wait_for must be 0 (every worker) or more")
        if self.damping != 0.1 and self.weight != "exp":
            raise UsageError("damping is for weight=exp")
        if not 0 <= self.damping < math.inf:
            raise UsageError("damping must be 0 or more")
        if not self.discard >= 1:
            raise UsageError("discard must be 1 or more: a fresh update has staleness 0")
        if not self.clip > 0:
            raise UsageError("clip must be above 0")
        if self.pull == "next-version" and 0 < self.max_staleness < math.inf and self.wait_for != 1:
            # Those who are ahead would wait for the slowest, and the slowest for them to fill its group.
            raise UsageError("pull=next-version and a max_staleness would wait for each other; leave one out")

    @classmethod
    def choices(cls) -> list[str]:
        """The names of the fields that can be set."""
        knobs = {knob.name for knob in fields(ParameterServer)}
        return [
            each.name for each in fields(cls) if each.name not in knobs or each.name in (cls.main, *cls.free)
        ]

    @property
    def together(self) -> bool:
        """Whether a group is one push of every worker."""
        return self.wait_for == 0 or (self.wait_for == 1 and self.max_staleness == 0)

    @property
    def lockstep(self) -> bool:
        return self.together and self.max_staleness == 0

    def check_counts(self, workers: int, servers: int) -> None:
        if self.wait_for > workers:
            raise UsageError(
                f"{self}: wait_for is {self.wait_for} but there are {workers} workers; use at most {workers}"
            )
        torn = not self.lockstep and self.wait_for != 1 and self.pull == "at-once"
        if self.clip < math.inf and torn and servers > 1:
            raise UsageError(
                f"{self}: each server makes its own groups, so an update has no norm over all of them; "
                "leave out clip, add pull=next-version, or use one server"
            )

    # --- a worker -----------------------------------------------------------------------------------

    @property
    def feedback(self) -> bool:
        """Whether what was not sent of an update is kept, and sent later."""
        return self.codec is not None and self.codec.feedback

    @property
    def answers_in_code(self) -> bool:
        """Whether the servers answer with the code of what has changed, and not with parameters."""
        return self.codec is not None and self.codec.pull == "coded"

    def start(self, node: Node, replica: Replica) -> None:
        if node.rank == 0:
            for server, start, stop in self._ranges(node, replica):
                node.request(server, "initialize", *cut(replica.parameters, start, stop)).wait()
        self._pull(node, replica, anew=True)

    def step(self, node: Node, replica: Replica) -> None:
        if self.codec is not None:
            rescale(replica, self.codec)
        self._push(node, replica, *self.outgoing(replica))

    def outgoing(self, replica: Replica) -> tuple[Sequence[Tensor], Settings]:
        """What a worker pushes, and the settings of its parameter groups."""
        return replica.gradient, replica.settings()

    def finish(self, node: Node, replica: Replica) -> None:
        self._take_ahead(node, replica)
        if self.feedback and not self.lockstep and replica.leaves_early:
            self._flush(node, replica)

    def _flush(self, node: Node, replica: Replica) -> None:
        """A worker that leaves, while others go on, pushes all that was not sent yet, as it is."""
        rest = replica.buffer("rest")
        for _, start, stop in self._ranges(node, replica):
            self._sender(node, replica, start, stop).flush(cut(rest, start, stop))
        settings = replica.settings()
        if "rates of residuals" in replica.notes:  # since the last step a schedule may have changed them
            for group, rate in zip(settings, rates_of_residuals(replica), strict=True):
                group["lr"] = rate
        self._push(node, replica, rest, settings, fetch=False, coded=False)

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._look(node, replica)

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        return self._look(node, replica, final=True)

    def restore(self, node: Node, replica: Replica) -> None:
        _wait(replica.outstanding)
        answers = [node.request(server, "state").wait() for server in node.members.servers]
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
        versions: dict[int, int] | None = None,
        coded: bool = True,
        seen: Sequence[Tensor] = (),
        **more: Field,
    ) -> list[Message]:
        """Pushes an update, and unless it is told not to, fetches the parameters that result.

        `versions` are those of the parameters that it was computed on, if not of the present ones. `seen` is
        overwritten with what the servers get to see of it; `more` goes with it. Returns the answers, as far
        as they were waited for.
        """
        versions = dict(replica.version) if versions is None else versions
        into = replica.parameters if into is None else into
        if self.prefetch:
            self._take_ahead(node, replica)
            update, into = copied(update, replica.buffer("pushed")), replica.buffer("ahead")
        ranges = self._ranges(node, replica)
        if self.codec is None or not coded:
            pieces: list[Sequence[Tensor]] = [cut(update, start, stop) for _, start, stop in ranges]
        else:
            pieces = self._coded(node, replica, update)
            if self.clip < math.inf:
                seen = replica.buffer("seen", exact=True)
            if seen:
                self._decoded(node, replica, pieces, seen)
        fields: dict[str, Field] = {
            "step": replica.steps, "fetch": fetch, "groups": list(settings),
            "absent": replica.gradients.absent if absent is None else list(absent),
            "norm": norm(seen or update) if self.clip < math.inf else 0.0, **more,
        }  # fmt: skip
        if not coded:
            fields["coded"] = False
        replies = []
        for (server, start, stop), parts in zip(ranges, pieces, strict=True):
            places = cut(into, start, stop) if fetch and not self.answers_in_code else ()
            reply = node.request(server, "push", *parts, into=places, version=versions[server.rank], **fields)
            replies.append((server, reply))
        if self.prefetch and fetch:
            replica.outstanding = replies
            return []
        if fetch:
            return self._take(node, replica, replies, into)
        return [reply.wait() for _, reply in replies]

    def _coded(self, node: Node, replica: Replica, update: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """An update in codes, for each server the tensors that it gets."""
        if self.exchanges == "updates":
            check_way(node, replica, self.codec)
        ranges = [
            (self._sender(node, replica, start, stop), cut(update, start, stop))
            for _, start, stop in self._ranges(node, replica)
        ]
        whole: float | None = None
        if self.codec is not None and needs_norm(self.codec):  # of what all servers get
            whole = math.hypot(*(sender.norm(part) for sender, part in ranges))
        return [sender.encode_all(part, whole) for sender, part in ranges]

    def _sender(self, node: Node, replica: Replica, start: int, stop: int) -> Compressor:
        assert self.codec is not None
        return sender_of(node, replica, self.codec, start=start, stop=stop, feedback=self.feedback)

    def _decoded(
        self, node: Node, replica: Replica, pieces: Sequence[Sequence[Tensor]], seen: Sequence[Tensor]
    ) -> None:
        """What the servers will see of an update in codes."""
        for part in seen:
            part.zero_()
        for (_, start, stop), given in zip(self._ranges(node, replica), pieces, strict=True):
            self._sender(node, replica, start, stop).add(given, cut(seen, start, stop))

    def _take(
        self,
        node: Node,
        replica: Replica,
        replies: Sequence[tuple[Peer, Reply]],
        into: Sequence[Tensor],
    ) -> list[Message]:
        """Waits for the servers' answers; those in code change what they know that this worker has."""
        answers = []
        for server, reply in replies:
            answer = reply.wait()
            answers.append(answer)
            replica.version[server.rank] = answer["version"]
            if self.answers_in_code:
                start, stop = replica.layout.ranges(len(node.members.servers))[server.rank]
                coder = self._reader(replica, start, stop)
                coder.add(answer.tensors, cut(replica.buffer("known"), start, stop))
        if self.answers_in_code:
            copied(replica.buffer("known"), into)
        return answers

    def _reader(self, replica: Replica, start: int, stop: int) -> Decompressor:
        from polyrhythm.compress.compressor import Decompressor

        assert self.codec is not None
        readers = replica.readers
        if (start, stop) not in readers:
            readers[start, stop] = Decompressor(reply_codec(self.codec), replica.layout, start, stop)
        return readers[start, stop]

    def _take_ahead(self, node: Node, replica: Replica) -> None:
        """Moves the parameters that came while the last batch was computed into their place."""
        if replica.outstanding:
            replies, replica.outstanding = replica.outstanding, []
            self._take(node, replica, replies, replica.buffer("ahead"))
            copied(replica.buffer("ahead"), replica.parameters)

    def _pull(
        self, node: Node, replica: Replica, anew: bool = False, into: Sequence[Tensor] | None = None
    ) -> None:
        """Takes the servers' parameters, to train from them; `anew`: whatever it had before."""
        into = replica.parameters if into is None else into
        coded = self.answers_in_code and not anew
        fields: dict[str, Field] = {"coded": True} if coded else {}
        replies = []
        for server, start, stop in self._ranges(node, replica):
            places = () if coded else cut(into, start, stop)
            replies.append((server, node.request(server, "pull", into=places, **fields)))
        if coded:
            self._take(node, replica, replies, into)
            return
        for server, reply in replies:
            replica.version[server.rank] = reply.wait()["version"]
        if self.answers_in_code:
            copied(into, replica.buffer("known"))

    def _look(self, node: Node, replica: Replica, final: bool = False) -> Sequence[Tensor]:
        """The servers' parameters, only to look at them."""
        _wait(replica.outstanding)
        into, ranges = replica.buffer("consensus"), self._ranges(node, replica)
        _wait(
            [(each, node.request(each, "look", into=cut(into, a, b), final=final)) for each, a, b in ranges]
        )
        return into

    def _ranges(self, node: Node, replica: Replica) -> list[tuple[Peer, int, int]]:
        ranges = replica.layout.ranges(len(node.members.servers))
        pairs = [(server, *range_) for server, range_ in zip(node.members.servers, ranges, strict=True)]
        return turned(pairs, node.rank)

    # --- a server -----------------------------------------------------------------------------------

    def serve(self, node: Node, shard: Shard) -> None:
        ServerLoop(self, node, shard).work()

    def quorum(self, workers: int, started: int) -> int:
        """How many pushes make a group, with so many workers now and so many at the start."""
        return workers if self.together else self.wait_for

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        """What is collected of an update. It may not be changed in place: it is lent."""
        return push.update

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        """Applies what was collected; here by the user's optimizer, with the pushers' settings."""
        shard.apply(update, absent, groups)

    def view(self, shard: Shard, reader: Message) -> Sequence[Tensor]:
        """What a worker that pulls, or has pushed, gets to see."""
        return shard.parameters

    def hear(self, shard: Shard, message: Message) -> None:
        """A worker pulls or pushes: what else it says can be kept here."""

    def tell(self, shard: Shard, reader: Message) -> dict[str, Field]:
        """What else a worker gets to know with its parameters."""
        return {}

    def forget(self, shard: Shard, worker: int) -> None:
        """A worker has left: what was kept for it is of no use any longer."""


def _wait(replies: Sequence[tuple[Peer, Reply]]) -> None:
    for _, reply in replies:
        reply.wait()
