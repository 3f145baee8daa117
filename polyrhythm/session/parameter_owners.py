"""ParameterOwners: which worker trains each parameter, where models are divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from polyrhythm.core.errors import UsageError
from polyrhythm.model.layout import needs_closure
from polyrhythm.parallel.partition import holder
from polyrhythm.session.divided_optimizer import Member
from polyrhythm.session.model_division import ModelDivision


class ParameterOwners:
    """The owners of the parameters of all models. An optimizer may have parameters of any of them."""

    def __init__(
        self, models: nn.Module, divisions: Sequence[ModelDivision], optimizers: Sequence[Optimizer]
    ) -> None:
        self._models, how = models, divisions[0].how
        self._of: dict[int, tuple[ModelDivision, str]] = {}
        for division in divisions:
            for name, parameter in division.model.named_parameters():
                if self._of.setdefault(id(parameter), (division, name))[0] is not division:
                    raise UsageError(
                        f"{name} is in two models, and {how} divides each by itself: make them one model, or "
                        "give each its own parameter"
                    )
        self._whole = all(division.tensors is None for division in divisions)
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if needs_closure(optimizer):
                raise UsageError(
                    f"{kind} sees whole models, and {how} divides them: use an optimizer such as SGD or "
                    "Adam, or allreduce without @"
                )
            for place in range(divisions[0].grid.places):
                if not any(group["params"] for group in self.groups(optimizer, place)):
                    which = f" by {kind} {optimizers.index(optimizer)}" if len(optimizers) > 1 else ""
                    raise UsageError(
                        f"worker {place} of a model under {how} would have no parameter to train{which}: "
                        f"{how.advice}"
                    )

    def members(self, optimizer: Optimizer, place: int) -> list[list[Member]]:
        """The parameters of an optimizer by group, as the script has made them."""

        def member(parameter: Any) -> Member:
            division, name = self._of[id(parameter)]
            return Member(name, division.owner(name, place) == place, division.tensors)

        return [[member(each) for each in group["params"]] for group in optimizer.param_groups]

    def groups(self, optimizer: Optimizer, place: int) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer with the parameters that a place owns."""
        return [
            {
                **group,
                "params": [
                    each for each, member in zip(group["params"], members, strict=True) if member.here
                ],
            }
            for group, members in zip(optimizer.param_groups, self.members(optimizer, place), strict=True)
        ]

    def keep(self, optimizer: Optimizer, place: int) -> None:
        """Leaves the parameters that a place owns in an optimizer, with their states."""
        optimizer.param_groups[:] = self.groups(optimizer, place)
        kept = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter in [each for each in optimizer.state if id(each) not in kept]:
            del optimizer.state[parameter]

    def on_server(self, optimizer: Optimizer, place: int) -> tuple[nn.Module, Optimizer]:
        """The parameters of one place by name, and a copy of the optimizer for them."""
        copy: Optimizer = object.__new__(type(optimizer))
        copy.__dict__.update(optimizer.__dict__)
        copy.__dict__.pop("step", None)  # a scheduler's, which steps the optimizer that it was made for
        copy.param_groups, copy.state = self.groups(optimizer, place), optimizer.state.copy()
        if self._whole:
            return self._models, copy
        parts: dict[int, nn.Parameter] = {}
        for parameter in self._models.parameters():
            division, name = self._of[id(parameter)]
            parts[id(parameter)] = parameter
            if division.tensors is not None and name in division.tensors.shardings:
                rank = division.grid.rank(place)
                parts[id(parameter)] = part = division.tensors.of(name, parameter, rank)
                copy.state[part] = division.tensors.state_of(name, rank)
        for group in copy.param_groups:
            group["params"] = [parts[id(each)] for each in group["params"]]
        return holder({name: parts[id(each)] for name, each in self._models.named_parameters()}), copy
