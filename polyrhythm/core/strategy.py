"""Strategy: how the workers keep time, as a value.

A strategy is a frozen dataclass whose fields are its whole configuration. Its state and behavior are in the
`Worker` and the `Server` that it makes (see `worker`). Defining a class with a `name` registers it, so a new
strategy is one new file.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from polyrhythm.core.codec import Codec
from polyrhythm.core.compose import refusal
from polyrhythm.core.errors import UsageError
from polyrhythm.core.grammar import Configured
from polyrhythm.core.mesh import Axis
from polyrhythm.core.split import ModelSplit

if TYPE_CHECKING:
    import torch

    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.core.worker import Server, Worker
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class Traits:
    """The properties of a strategy that the rest of the program uses."""

    lockstep: bool = True  # all workers take the same number of steps, together
    survives_loss: bool | None = None  # the others continue when a worker dies; None: if not in lockstep
    uses_servers: bool = False
    sync_period: int | None = 1  # steps between two exchanges; None if not known in advance
    sync_delay: int = 0  # steps from an exchange to the step that uses its result
    identical_optimizers: bool = False  # all optimizers hold identical state after each synchronization
    averages_optimizers: bool = False  # synchronization averages the state of the optimizers
    weighted_by_examples: bool = (
        False  # the mean is weighted by examples, so the session must not scale gradients
    )
    parameters_held_by_peers: bool = False  # workers hold the parameters: none leaves before all are done
    inside_sites: bool = False  # workers are equal after each synchronization, so they can be one site
    between_sites: bool = False  # whole sites can be its workers
    stale_momentum: bool = False  # one momentum takes in gradients of all workers, however stale they are
    optimizer: str = "any"  # or the class in torch.optim that it needs
    sparse_gradients: bool = False  # sparse gradients stay sparse, outside the flat gradient
    steps_in_place: bool = (
        False  # calls only the optimizer's step, so optimizers that compute their own gradients work
    )
    one_host: bool = False  # it works on memory that all workers share
    one_optimizer: bool = False  # with several, workers could wait for each other forever
    closures: bool = False  # workers can evaluate loss and gradient several times per step, as LBFGS does
    rebuilds_parameters: bool = False  # each step computes parameters from the initial ones and a log
    max_lease: int = 8  # batches that a worker takes at a time, at most, outside lockstep
    model_axes: tuple[
        tuple[Axis, int], ...
    ] = ()  # the axes along which one model is divided, and their sizes

    @property
    def survives(self) -> bool:
        """True if the other workers continue when one dies."""
        return not self.lockstep if self.survives_loss is None else self.survives_loss

    @property
    def model_size(self) -> int:
        """How many workers hold one model together."""
        return math.prod(size for _, size in self.model_axes)

    @property
    def settable(self) -> bool:
        """True if the script may load or set a worker's parameters after `prepare`."""
        return not self.uses_servers and not self.rebuilds_parameters


@dataclass(frozen=True)
class Strategy(Configured):
    """How the workers keep time: when they exchange what, and who waits for whom."""

    kind = "strategy"
    registry: ClassVar[dict[str, type[Strategy]]] = {}
    codecs: ClassVar[bool] = False  # it can send through a codec
    exchanges: ClassVar[Literal["gradients", "updates"]] = "gradients"  # updates: changes of parameters

    codec: Codec | None = field(default=None, kw_only=True)

    def __new__(cls, *values: Any, codec: Codec | None = None, **named: Any) -> Self:
        if codec is not None and not isinstance(codec, Codec):
            raise UsageError(
                f"{cls.name}: codec takes a codec, such as parse_codec('topk:0.01'), not {codec!r}"
            )
        if codec is not None and (why := refusal(cls, codec)):
            raise UsageError(why)
        return super().__new__(cls, *values, **named)

    def __str__(self) -> str:
        return super().__str__() + (f"+{self.codec}" if self.codec else "")

    def __matmul__(self, split: ModelSplit) -> Strategy:
        """This strategy on models that are divided: `pr.parse("async") @ pr.Pipeline(2)`."""
        from polyrhythm.core.registry import OPERATORS, load_builtins

        load_builtins()
        return OPERATORS["@"](self, (split,))

    @property
    def traits(self) -> Traits:
        """Its properties that the rest of the program uses."""
        return Traits()

    @property
    def parts(self) -> tuple[Strategy, ...]:
        """The strategies that it is composed of: itself, or one inside sites and one between them."""
        return (self,)

    @property
    def splits(self) -> tuple[ModelSplit, ...]:
        """How each model is divided over several workers; empty if each worker holds a whole one."""
        return ()

    def check(self, plan: Plan) -> None:
        """Raises UsageError, before any process starts, if it cannot work as planned."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Does slow work, such as compiling, once on each host before the workers are started."""
        for part in self.parts:
            if part.codec is not None:
                part.codec.prepare(dtype)

    @abstractmethod
    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        """The stateful half of this strategy on one worker of a group.

        UsageError if it cannot work with the replica's model or optimizer.
        """

    def server(self, node: Node, shard: Shard) -> Server:
        """The stateful half of this strategy on one server."""
        raise UsageError(f"{self.name} has no servers")
