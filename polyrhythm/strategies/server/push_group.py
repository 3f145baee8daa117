"""PushGroup: the pushes that a server collects and applies as one update."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from polyrhythm.collectives.arithmetic import reduce
from polyrhythm.model.vectors import copied
from polyrhythm.strategies.server.updates import PushedUpdate

if TYPE_CHECKING:
    from polyrhythm.core.worker import State
    from polyrhythm.model.shard import Shard
    from polyrhythm.model.vectors import Vectors
    from polyrhythm.strategies.server.parameter_server import ParameterServer


class PushGroup:
    """Collects updates: each is weighted by its staleness, transformed, and reduced with the others."""

    def __init__(
        self, strategy: ParameterServer, shard: Shard, transform: Callable[[PushedUpdate], Vectors]
    ) -> None:
        self.strategy, self.shard, self.transform = strategy, shard, transform
        self.pushes: list[PushedUpdate] = []
        self.summed = False  # the updates are in `_sum`, and no longer lent

    def __len__(self) -> int:
        return len(self.pushes)

    def add(self, push: PushedUpdate) -> None:
        """Holds a push, whose update is lent, until the group is reduced."""
        self.pushes.append(push)

    def add_at_once(self, push: PushedUpdate) -> None:
        """Adds an update to the sum, so that its worker can have its reply before the group is applied."""
        self.pushes.append(push)
        for place, part in zip(self._sum, self._weighted(push, alone=True), strict=True):
            place.copy_(part) if len(self.pushes) == 1 else place.add_(part)
        self.summed, push.update = True, ()

    def sort(self) -> None:
        """Puts the pushes in rank order, so that the sum does not depend on the order of arrival."""
        if len(self.pushes) > 1:
            self.pushes.sort(key=lambda push: (push.worker, push.message.sequence))

    def reduced(self) -> Vectors:
        """The mean or the sum of the updates, in rank order unless they were added at once."""
        count, how = len(self.pushes), self.strategy.reduce
        if self.summed:
            if how == "mean":
                for part in self._sum:
                    part.div_(count)
            return self._sum
        updates = [self._weighted(push, alone=count == 1) for push in self.pushes]
        if count == 1:
            return updates[0]
        for place, parts in zip(self._sum, zip(*updates, strict=True), strict=True):
            reduce(parts, how, [place])
        return self._sum

    def absent(self) -> list[int]:
        """The parameters without a gradient in all pushes."""
        first, *others = self.pushes
        return [index for index in first.absent if all(index in push.absent for push in others)]

    def clear(self) -> None:
        self.pushes, self.summed = [], False

    def clipped(self, update: Vectors, norm: float) -> Vectors:
        """An update of this norm, scaled down to the norm `clip` if it is larger."""
        if norm <= self.strategy.clip or not update:
            return update
        return self._scaled(update, self._shrink(norm), alone=True)

    def _weighted(self, push: PushedUpdate, alone: bool) -> Vectors:
        strategy, factor = self.strategy, 1.0
        if strategy.weight == "1/tau":
            factor = 1 / max(1, push.staleness)
        elif strategy.weight == "exp":
            factor = math.exp(-strategy.damping * push.staleness)
        if strategy.single and push.norm > strategy.clip:
            factor *= self._shrink(push.norm)
        if factor != 1:
            push.update = self._scaled(push.update, factor, alone)
        return self.transform(push)

    def _shrink(self, norm: float) -> float:
        return self.strategy.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does

    def _scaled(self, update: Vectors, factor: float, alone: bool) -> Vectors:
        """An update times a factor; in memory that is reused, if it is the only one now."""
        import torch

        if not alone:
            return tuple(part * factor for part in update)
        parts = zip(update, self._scratch, strict=True)
        return tuple(torch.mul(part, factor, out=place) for part, place in parts)

    @cached_property
    def _sum(self) -> Vectors:
        return self.shard.zeros()

    @cached_property
    def _scratch(self) -> Vectors:
        return self.shard.zeros()

    def state_dict(self) -> State:
        """A group that is summed up. Held pushes are not saved: their workers wait for a reply."""
        pushes = [push.state_dict() for push in self.pushes] if self.summed else []
        return {"pushes": pushes, "sum": list(self._sum) if self.summed else []}

    def load_state_dict(self, state: State) -> None:
        self.pushes = [PushedUpdate.restored(push) for push in state["pushes"]]
        self.summed = bool(self.pushes)
        if self.summed:
            copied(state["sum"], self._sum)
