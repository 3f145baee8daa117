"""Elastic averaging: workers explore on their own, on a spring that ties them to a centre."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from polyrhythm.core.errors import UsageError
from polyrhythm.strategies.server.parameter_server import ParameterServer

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.core.message import Message
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard
    from polyrhythm.strategies.server.server_loop import Push, Settings


@dataclass(frozen=True)
class Elastic(ParameterServer):
    """Workers train alone; every `period` steps each and the server's centre pull each other closer (EASGD).

    d = alpha (x_i - c), x_i <- x_i - d, c <- c + d: what one loses the other gains. In between x_i takes
    steps of the script's own optimizer. alpha is 0.9/N if not given. With `max_staleness=0` all exchange
    together, with the same c: synchronous EASGD. The result is c. With a codec the worker pulls c first, and
    d, which it computes, goes through the codec: both take what its code stands for. What that leaves out is
    in x_i - c still, and so in the next d.

    >>> import polyrhythm as pr
    >>> pr.parse("easgd:10,alpha=0.1").period
    10
    """

    name: ClassVar[str] = "easgd"
    main: ClassVar[str | None] = "period"
    exchanges: ClassVar[Literal["gradients", "updates"]] = "updates"
    paper: ClassVar[str] = "Zhang, Choromanska, LeCun 2015, Deep Learning with Elastic Averaging SGD"

    free: ClassVar[tuple[str, ...]] = ("max_staleness",)

    period: int = 4
    alpha: float | None = None
    reduce: Literal["mean", "sum"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise UsageError("period must be 1 or more")
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise UsageError("alpha must be 0 or more")

    def step(self, node: Node, replica: Replica) -> None:
        if replica.steps % self.period == 0:
            self._exchange(node, replica)  # before the step, whose gradient is that of the old x_i
        replica.apply()

    def restore(self, node: Node, replica: Replica) -> None:
        """The optimizer works here."""

    def _exchange(self, node: Node, replica: Replica) -> None:
        if self.codec is not None:
            return self._exchange_in_code(node, replica)
        difference = replica.buffer("difference")
        self._push(node, replica, replica.parameters, into=difference)
        for part, change in zip(replica.parameters, difference, strict=True):
            part.sub_(change)

    @property
    def feedback(self) -> bool:
        return False

    def _exchange_in_code(self, node: Node, replica: Replica) -> None:
        centre, difference = replica.buffer("centre"), replica.buffer("difference")
        self._pull(node, replica, into=centre)
        for place, mine, theirs in zip(difference, replica.parameters, centre, strict=True):
            place.copy_(mine).sub_(theirs).mul_(self._alpha(node))
        told = replica.buffer("told", exact=True)
        self._push(node, replica, difference, fetch=False, seen=told)
        for part, change in zip(replica.parameters, told, strict=True):
            part.sub_(change)

    def _alpha(self, node: Node) -> float:
        return 0.9 / len(node.members.workers) if self.alpha is None else self.alpha

    def serve(self, node: Node, shard: Shard) -> None:
        shard.notes["alpha"] = self._alpha(node)
        super().serve(node, shard)

    def transform(self, shard: Shard, push: Push) -> Sequence[Tensor]:
        if self.codec is not None:
            return push.update
        # Computed once, here, and sent back: what the worker subtracts is bit for bit what the centre adds.
        difference = shard.buffer(f"difference of {push.worker}")
        for place, theirs, centre in zip(difference, push.update, shard.parameters, strict=True):
            place.copy_(theirs).sub_(centre).mul_(shard.notes["alpha"])
        return difference

    def update(self, shard: Shard, update: Sequence[Tensor], absent: Sequence[int], groups: Settings) -> None:
        shard.shift(update)

    def view(self, shard: Shard, reader: Message) -> Sequence[Tensor]:
        if reader.kind == "pull" or self.codec is not None:
            return shard.parameters
        return shard.buffer(f"difference of {reader.sender.rank}")

    def forget(self, shard: Shard, worker: int) -> None:
        shard.buffers.pop(f"difference of {worker}", None)
