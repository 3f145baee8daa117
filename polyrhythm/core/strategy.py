"""Strategy and Codec, and `parse`, which makes one of its name (see `grammar`).

A strategy is a frozen dataclass whose fields are its whole configuration. Defining a class with a `name`
registers it, so a new strategy is one new file in `polyrhythm/strategies` and nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.grammar import Configured

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class Strategy(Configured):
    """How the workers keep time: when they exchange what, and who waits for whom."""

    kind = "strategy"
    registry: ClassVar[dict[str, type[Strategy]]] = {}
    servers: ClassVar[bool] = False
    codecs: ClassVar[bool] = False
    optimizers: ClassVar[str] = "any"  # or the name of the class in torch.optim that it needs
    sends: ClassVar[Literal["gradients", "ways"]] = "gradients"  # or how far a worker has come since
    remembers: ClassVar[tuple[str, ...]] = ()  # the replica's buffers that are saved, besides a codec's
    stays: ClassVar[bool] = False  # the workers hold the parameters among themselves: none leaves before all
    sparse: ClassVar[bool] = False  # sparse gradients stay as they are, and are not in the flat gradient
    in_place: ClassVar[bool] = False  # the optimizer's own step is all: it may make its own gradients
    lease: ClassVar[int] = 8  # batches that a worker takes at a time, at most, where each has its own pace
    one_host: ClassVar[bool] = False  # it works on memory that all workers share
    inside: ClassVar[bool] = False  # at each of its beats the workers are equal, wherever all began: a site,
    between: ClassVar[bool] = False  # and it can have whole sites for its workers

    codec: Codec | None = field(default=None, kw_only=True)

    def __new__(cls, *values: Any, codec: Codec | None = None, **named: Any) -> Self:
        if codec is not None and not isinstance(codec, Codec):
            raise UsageError(
                f"{cls.name}: codec takes a codec, as parse_codec('topk:0.01') is, not {codec!r}"
            )
        if codec is not None and not cls.codecs:
            raise UsageError(f"{cls.name} takes no codec")
        if codec is not None and codec.gradients_only and cls.sends != "gradients":
            raise UsageError(f"{codec} is for gradients, and {cls.name} sends how far each worker has come")
        return super().__new__(cls, *values, **named)

    def __str__(self) -> str:
        return super().__str__() + (f"+{self.codec}" if self.codec else "")

    @property
    def lockstep(self) -> bool:
        """Whether all workers take the same number of steps, together."""
        return True

    @property
    def survives(self) -> bool:
        """Whether the others can go on when a worker dies."""
        return not self.lockstep

    @property
    def overlaps(self) -> bool:
        """Whether it wants the gradient in parts while `backward()` goes on."""
        return False

    @property
    def watches_forward(self) -> bool:
        """Whether it wants to know when the script is about to read the parameters for a step."""
        return False

    @property
    def weighs(self) -> bool:
        """Whether it weighs workers by their examples: then gradients count by them among `peers` only."""
        return False

    @property
    def levels(self) -> tuple[Strategy, ...]:
        """The strategies that it is made of: itself, or one inside sites and one between them."""
        return (self,)

    @property
    def beat(self) -> int | None:
        """Every so many steps workers exchange what they exchange; None if that is not known before."""
        return 1

    @property
    def same_state(self) -> bool:
        """Whether at a beat the optimizers of all workers have the same state, as far as it made it."""
        return False

    def check_inside(self, within: Strategy) -> None:
        """Raises UsageError if it cannot be between sites inside which there is this one."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Whatever takes long, before the first step: compiling, for numbers of this kind. It is done once on
        each host, before the workers are started, if it is known by then which strategy it will be."""
        for level in self.levels:
            if level.codec is not None:
                level.codec.prepare(dtype)

    def check(self, workers: int, servers: int) -> None:
        """Raises UsageError, before any process starts, if it cannot work with so many nodes."""

    def check_sites(self, sites: Mapping[str, Sequence[int]]) -> None:
        """Raises UsageError, before any process starts, if it cannot work with these sites: who is where."""

    def peers(self, node: Node) -> Node:
        """With whom a worker has its gradient in common: all, as a rule."""
        return node

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if it cannot work with the optimizer's parameter groups."""

    def start(self, node: Node, replica: Replica) -> None:
        """Runs on every worker before its first step: all start equal to worker 0."""
        node.broadcast(*replica.parameters)

    def enter(self, node: Node, replica: Replica) -> None:
        """The last of the start: by now others get answers to all that they may ask, so it may wait long."""

    def before_forward(self, node: Node, replica: Replica) -> None:
        """A forward pass that gradients may be wanted of is about to begin; for those that watch it."""

    def part(self, node: Node, replica: Replica, gradient: Sequence[Tensor], last: bool) -> None:
        """A part of the gradient is complete, and backward goes on: it must not wait.

        For those with `overlaps`: called before `ready`, for the same parts in the same order on all workers.
        """

    def ready(self, node: Node, replica: Replica) -> None:
        """Backward has completed a gradient; for those that agree on it before the user's own clipping."""

    @abstractmethod
    def step(self, node: Node, replica: Replica) -> None:
        """Runs on every worker in place of `optimizer.step()`."""

    def regroup(self, node: Node, replica: Replica, ranks: Sequence[int], number: int) -> None:
        """Other workers than before share the epoch that begins: this is their `number`-th group.

        For those in lockstep that survive; called by all in the group before the first step of the epoch.
        """

    def finish(self, node: Node, replica: Replica) -> None:
        """Runs on every worker after its last step."""

    def serve(self, node: Node, shard: Shard) -> None:
        """A server's whole life: returns when the run is over."""
        raise UsageError(f"{self.name} has no servers")

    def consensus(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """The parameters the run has agreed on so far, as flat vectors; called by all workers."""
        return replica.parameters

    def restore(self, node: Node, replica: Replica) -> None:
        """Brings the optimizer's state to this worker, where it is kept elsewhere; before `state_dict()`."""

    def keep(self, node: Node, replica: Replica) -> dict[str, Any]:
        """What else is saved of a worker, besides `remembers`: plain values and tensors of its own."""
        return {}

    def resume(self, node: Node, replica: Replica, kept: dict[str, Any]) -> None:
        """Goes on with what was saved: `remembers` is in its place, and this is what `keep` gave."""

    def collect(self, node: Node, replica: Replica) -> Sequence[Tensor]:
        """The final parameters, as flat vectors; called by the last worker, after all have finished."""
        return replica.parameters
