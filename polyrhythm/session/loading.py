"""What may be loaded in a run, and when: parameters, optimizer states, and states of sessions.

`load_state_dict()` between `prepare` and the first step is refused where that step would overwrite what was
loaded; later, unless the old values are there again before the next step.

Loading the values that are there already is fine: libraries such as Accelerate do it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.hooks import Hook

_ADVICE = (
    "call load_state_dict() before session.prepare(): all workers start from it; to evaluate other values, "
    "load them into another model"
)
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
NO_POSITION = (
    "the state that session.load_state_dict() got was saved by an earlier version, without the position in "
    "the data and the random numbers: the data begins with its first epoch"
)


class LoadedParameters:
    """What a script has loaded since the last step, under strategies that would overwrite it.

    Before the first step loading is an error. Later the script may load averaged parameters, evaluate them
    and load the trained ones again. They are compared before the next step, also those that are not trained.
    """

    def __init__(self, models: Sequence[nn.Module], begun: Callable[[], bool]) -> None:
        self._begun = begun
        self._before: dict[nn.Parameter, tuple[str, int]] = {}  # its name, and a checksum from before
        for model in models:
            for module in model.modules():
                module.register_load_state_dict_pre_hook(Hook(self._loads))  # type: ignore[no-untyped-call]

    def _loads(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta and not _same(state.get(prefix + name, parameter), parameter.detach()):
                if not self._begun():
                    raise UsageError(f"{prefix}{name}: {_ADVICE}")
                if parameter not in self._before:
                    self._before[parameter] = f"{prefix}{name}", checksum(parameter)

    def changed(self) -> str | None:
        """The name of a parameter that has other values than before it was loaded."""
        return next((name for each, (name, before) in self._before.items() if checksum(each) != before), None)

    def check(self) -> None:
        """Raises UsageError if a parameter was loaded and does not have its old values again."""
        if not self._before:
            return
        if name := self.changed():
            raise UsageError(
                f"the script loaded other values into {name}, and the next step would overwrite them: after "
                "evaluating other values, load the trained ones again, or load them into another model"
            )
        self._before.clear()


def checksum(tensor: Tensor) -> int:
    """A checksum of the bits of a tensor, computed where it is."""
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    return int(flat.view(WORDS.get(flat.itemsize, torch.int64)).sum())


def refuse_state(optimizer: torch.optim.Optimizer) -> None:
    """From here on loading another state into the optimizer is an error. Hyper-parameters may be loaded."""

    def check(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        mine = {
            index: optimizer.state[each] for index, each in enumerate(parameters) if each in optimizer.state
        }
        one, other = (pytree.tree_flatten(each) for each in (mine, dict(state["state"])))
        if one[1] != other[1] or not all(_same(a, b) for a, b in zip(one[0], other[0], strict=True)):
            raise UsageError(f"the state of {type(optimizer).__name__}: {_ADVICE}")

    optimizer.register_load_state_dict_pre_hook(check)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # A tensor of another shape has an error of its own.
        return one.shape != other.shape or torch.equal(one.detach().to(other), other)
    return bool(one == other)


def check_saved(state: Mapping[str, Any], strategy: Strategy) -> None:
    """Raises UsageError if the state of a session was saved under another strategy."""
    if state.get("strategy") != str(strategy):
        raise UsageError(f"this state was saved under {state.get('strategy')}, but this run uses {strategy}")


def check_model(state: Mapping[str, Any], layout: str, workers: int) -> None:
    """Raises UsageError if the state of a session was saved in another kind of run."""
    if state["layout"] != layout:
        raise UsageError("this state was saved with a different model or different parameter groups")
    if lost := ", ".join(state.get("lost", [])):
        raise UsageError(
            f"this state was saved after {lost} had died, and its part of the run is missing: load model and "
            "optimizer before session.prepare() and leave out session.load_state_dict(); then any number of "
            "workers can continue"
        )
    if (saved := state["workers"]) != workers:
        raise UsageError(
            f"this state was saved by {saved} workers, but this run has {workers}: use --workers {saved}"
        )
