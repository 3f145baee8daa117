"""A strategy on models that are divided over several workers each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polyrhythm.compress.transforms.base import needs_norm
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import OPERATORS
from polyrhythm.core.split import ModelSplit
from polyrhythm.core.strategy import Strategy, Traits
from polyrhythm.core.worker import Server, Worker
from polyrhythm.strategies.server.parameter_server import ParameterServer

if TYPE_CHECKING:
    from polyrhythm.core.group import Group
    from polyrhythm.core.node import Node
    from polyrhythm.core.plan import Plan
    from polyrhythm.model.replica import Replica
    from polyrhythm.model.shard import Shard


@dataclass(frozen=True)
class OnSplitModels(Strategy):
    """A strategy whose workers are groups of processes, each of which hold one model together.

    `ssp:3@pipeline:2`: two processes hold one model, and are one worker of `ssp:3`. Each process has the
    replica of its part of the model, and its own worker of the strategy, which exchanges with those that
    hold the same part of other models and does not know that there are other parts.

    >>> import polyrhythm as pr
    >>> print(pr.parse("pipeline:4"))
    allreduce@pipeline:4
    """

    on: Strategy
    how: tuple[ModelSplit, ...]

    def __post_init__(self) -> None:
        most, times = Counter(each.axis for each in self.how).most_common(1)[0]
        if times > 1:
            raise UsageError(f"the model is divided twice on the axis {most}; each can be used once")

        if any(each.asynchronous for each in self.how) and (
            not self.on.traits.lockstep or self.on.traits.uses_servers
        ):
            raise UsageError(
                f"{self} would count staleness twice: an asynchronous pipeline goes with strategies in which "
                "workers step together and hold the parameters, such as allreduce and local:8"
            )

        if any(each.asynchronous for each in self.how) and any(
            each.codec is not None and needs_norm(each.codec) for each in self.on.parts
        ):
            raise UsageError(
                f"{self} would clip by the norm of a gradient whose stages are of different batches: leave "
                "out clip, or use schedule=1f1b"
            )
        for each in self.on.parts:
            if isinstance(each, ParameterServer) and each.clip < math.inf and not each.single:
                raise UsageError(
                    f"{self} would clip each part of the model by a norm of its own: leave out clip and call "
                    "clip_grad_norm_ in the script, which uses the norm of the whole model"
                )

    def __str__(self) -> str:
        return "@".join(map(str, (self.on, *self.how)))

    def __matmul__(self, split: ModelSplit) -> Strategy:
        return OnSplitModels(self.on, (*self.how, split))

    @property
    def parts(self) -> tuple[Strategy, ...]:
        return self.on.parts

    @property
    def splits(self) -> tuple[ModelSplit, ...]:
        return self.how

    @property
    def traits(self) -> Traits:
        axes = tuple((each.axis, each.size) for each in self.how)
        return replace(self.on.traits, model_axes=axes)

    def check(self, plan: Plan) -> None:
        self.on.check(plan)

    def worker(self, node: Node, replica: Replica, group: Group) -> Worker:
        return self.on.worker(node, replica, group)

    def server(self, node: Node, shard: Shard) -> Server:
        return self.on.server(node, shard)


OPERATORS["@"] = OnSplitModels
