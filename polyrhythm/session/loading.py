"""What may be loaded in a run, and when: parameters, optimizer states, and states of sessions.

`load_state_dict()` between `prepare` and the first step is refused where that step would overwrite what was
loaded. Later a script may load averaged parameters, evaluate them and load the trained ones again: then
`WriteCheck` compares before the next step.

Loading the values that are there already is fine: libraries such as Accelerate do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.batch_norm.hooks import Hook

_ADVICE = (
    "call load_state_dict() before session.prepare(): all workers start from it; to evaluate other values, "
    "load them into another model"
)
NO_POSITION = (
    "the state that session.load_state_dict() got was saved by an earlier version, without the position in "
    "the data and the random numbers: the data begins with its first epoch"
)


def refuse_parameters(model: nn.Module, begun: Callable[[], bool]) -> None:
    """Until the training has `begun`, loading other parameters into the model, or a part of it, is an
    error."""

    def check(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not begun() and not _same(state.get(prefix + name, parameter), parameter.detach()):
                raise UsageError(f"{prefix}{name}: {_ADVICE}")

    for module in model.modules():
        module.register_load_state_dict_pre_hook(Hook(check))  # type: ignore[no-untyped-call]


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


def check_saved(state: Mapping[str, Any], strategy: Strategy, layout: str, workers: int) -> None:
    """Raises UsageError if the state of a session was saved in another kind of run."""
    if state.get("strategy") != str(strategy):
        raise UsageError(f"this state was saved under {state.get('strategy')}, but this run uses {strategy}")
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
