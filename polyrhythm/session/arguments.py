"""Arguments: what a script passes to `prepare`, sorted by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.model.consensus import joined

_NAMED = 3  # parameters that an error names

Evaluated = DataLoader[Any] | Sequence[DataLoader[Any]]  # loaders to evaluate on


class Arguments:
    """The objects that a script passes to `prepare`, in any order, and then its evaluation loaders."""

    def __init__(
        self,
        objects: Sequence[Any],
        evaluate: Evaluated = (),
        again: bool = False,
        example: Any = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """UsageError if one of them is of no use; `again`: in a later call."""
        self.example = example  # of what the model is called with
        self.loss = loss  # for `session.backward`
        self.evaluated = [evaluate] if isinstance(evaluate, DataLoader) else list(evaluate)
        for loader in self.evaluated:
            if not isinstance(loader, DataLoader):
                raise UsageError(
                    f"session.prepare(evaluate=...) takes DataLoaders, not {type(loader).__name__}"
                )
        self._objects = (*objects, *self.evaluated)
        if again and any(map(_trains, self._objects)):
            raise UsageError(
                "session.prepare() was called twice: pass all models, optimizers and schedulers to one call; "
                "a later one takes loaders only; a run trains once, so train each fold or seed in a run of "
                "its own"
            )
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loaders: list[DataLoader[Any]] = []
        self.schedulers: list[LRScheduler] = []
        for thing in objects:
            self._sort(thing)
        owned = {id(each) for optimizer in self.optimizers for each in _parameters(optimizer)}
        # A module without parameters to train, such as a loss, is returned as it is.
        self.models = [
            module
            for module in self.modules
            if any(each.requires_grad or id(each) in owned for each in module.parameters())
        ]

    def _sort(self, thing: Any) -> None:
        kinds: tuple[tuple[type, list[Any]], ...] = (
            (nn.Module, self.modules),
            (torch.optim.Optimizer, self.optimizers),
            (DataLoader, self.loaders),
            (LRScheduler, self.schedulers),
        )
        for kind, those in kinds:
            if isinstance(thing, kind):
                if any(thing is other for other in those):
                    raise UsageError(f"session.prepare() got the same {type(thing).__name__} twice")
                those.append(thing)
                return
        raise UsageError(
            f"session.prepare() takes models, optimizers, loaders and schedulers, not "
            f"{type(thing).__name__}; pass each as an argument of its own"
        )

    def check(self) -> None:
        """Raises UsageError unless each parameter to train has one optimizer."""
        if not self.models or not self.optimizers:
            raise UsageError(
                f"session.prepare() takes models and their optimizers, but got {len(self.models)} models "
                f"and {len(self.optimizers)} optimizers; pass them all to one call"
            )
        if self.loss is not None and (not callable(self.loss) or len(self.models) > 1):
            raise UsageError(
                f"session.prepare(loss=...) takes the loss function of one model, but got {len(self.models)} "
                f"models and a {type(self.loss).__name__}: without loss= call loss.backward() in the script"
            )
        self._check_optimizers()
        self.check_owned()
        for scheduler in self.schedulers:
            if not any(scheduler.optimizer is optimizer for optimizer in self.optimizers):
                raise UsageError(
                    f"{type(scheduler).__name__} was passed to session.prepare() without its optimizer: pass "
                    "both to one call"
                )

    def _check_optimizers(self) -> None:
        """Each parameter of an optimizer belongs to a given model, and to no other optimizer."""
        names = {id(each): name for name, each in joined(self.models).named_parameters()}
        owners: dict[int, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            for number, parameter in enumerate(_parameters(optimizer)):
                if id(parameter) not in names:
                    raise UsageError(
                        f"parameter {number} of {type(optimizer).__name__}, of shape "
                        f"{list(parameter.shape)}, is in none of the models given to session.prepare(): pass "
                        "its model too"
                    )
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise UsageError(
                        f"{names[id(parameter)]} is in two optimizers given to session.prepare(): leave it "
                        "out of one"
                    )

    def check_owned(self) -> None:
        """Raises UsageError if some parameters are to be trained, and no optimizer has them."""
        owned = {id(each) for optimizer in self.optimizers for each in _parameters(optimizer)}
        parameters = joined(self.models).named_parameters()
        left = [
            name
            for name, each in parameters
            if each.requires_grad and id(each) not in owned and not each.is_meta
        ]
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            raise UsageError(
                f"no optimizer given to session.prepare() has {', '.join(left[:_NAMED])}{more}: pass the "
                "optimizer of these parameters to prepare too, or freeze them with requires_grad_(False)"
            )

    def returned(self, replaced: Mapping[Any, Any]) -> Any:
        """The objects in the order in which they were given, some replaced by others; one by itself."""
        found = tuple(replaced.get(thing, thing) for thing in self._objects)
        return found[0] if len(found) == 1 else found


def refuse_groups(optimizer: torch.optim.Optimizer) -> None:
    """Refuses `optimizer.add_param_group()` from here on: nobody would train the new parameters."""

    def refuse(group: dict[str, Any]) -> None:
        raise UsageError(
            "add_param_group() must be called before session.prepare(): give the optimizer all parameters at "
            "the start, freeze those to be trained later with requires_grad_(False), and unfreeze them with "
            "requires_grad_(True)"
        )

    optimizer.add_param_group = refuse  # type: ignore[method-assign, assignment]


def _trains(thing: Any) -> bool:
    """True for optimizers, their schedulers, and models with parameters to train."""
    if isinstance(thing, nn.Module):
        return any(each.requires_grad for each in thing.parameters())
    return isinstance(thing, torch.optim.Optimizer | LRScheduler)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
