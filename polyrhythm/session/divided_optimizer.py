"""DividedOptimizer: the optimizer of divided models, of which each worker has a part of the state.

To the script it has one state: `state_dict()` gathers that of all workers, with the numbers that parameters
have in one process, and `load_state_dict()` takes this worker's part of such a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.tensor_shards import TensorShards
from polyrhythm.session.place_exchange import Found, PlaceExchange

State = dict[str, Any]


class Member(NamedTuple):
    """A parameter in a group of an optimizer, as the script has made it."""

    name: str  # in its model
    here: bool  # this worker trains it
    shards: TensorShards | None  # of its model

    def joined(self, parts: Mapping[int, Tensor]) -> Tensor:
        """A whole state from those of some places, by place."""
        return parts[min(parts)] if self.shards is None else self.shards.joined(self.name, parts)

    def own_part(self, value: Any) -> Any:
        return value if self.shards is None else self.shards.own_part(self.name, value)


class DividedOptimizer:
    """Hooks on an optimizer. `groups`: the parameters of each of its groups, those of other workers too."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[Member]],
        exchange: PlaceExchange,
        before_saving: Callable[[], None],
    ) -> None:
        self._name, self._exchange = type(optimizer).__name__, exchange
        self._members = [member for group in groups for member in group]
        self._own = [number for number, member in enumerate(self._members) if member.here]
        starts = [sum(map(len, groups[:index])) for index in range(len(groups))]
        self._numbers = [
            list(range(start, start + len(group))) for start, group in zip(starts, groups, strict=True)
        ]
        optimizer.register_state_dict_pre_hook(lambda _: before_saving())
        optimizer.register_state_dict_post_hook(self._whole)
        optimizer.register_load_state_dict_pre_hook(self._part)

    def _whole(self, _: torch.optim.Optimizer, state: State) -> State:
        """The state of all workers from that of this one."""
        places = self._exchange.gather(self._found(state["state"]))
        parts: dict[str, dict[int, Tensor]] = {}
        whole: dict[int, State] = {}
        for place, found in enumerate(places):
            for name, tensor in found.tensors.items():
                parts.setdefault(name, {})[place] = tensor
            for name, value in found.plain.items():
                _put(whole, name, value)
        for name, tensors in parts.items():
            _put(whole, name, self._members[int(name.split()[0])].joined(tensors))
        groups = zip(state["param_groups"], self._numbers, strict=True)
        return {
            **state,
            "state": dict(sorted(whole.items())),
            "param_groups": [{**group, "params": numbers} for group, numbers in groups],
        }

    def _found(self, states: Mapping[int, State]) -> Found:
        """The state of this worker, by the number of the parameter and a name."""
        tensors: dict[str, Tensor] = {}
        plain: State = {}
        for here, number in enumerate(self._own):
            for key, value in states.get(here, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{number} {key}"] = value.detach().clone()
                elif value is None or isinstance(value, str | int | float):
                    plain[f"{number} {key}"] = value
                else:
                    raise UsageError(
                        f"the state of {self._name} has a {type(value).__name__}, which the workers of a "
                        "divided model cannot exchange: save session.consensus().state_dict() only"
                    )
        return Found(tensors, plain)

    def _part(self, _: torch.optim.Optimizer, state: State) -> State | None:
        """This worker's part of a state of all workers."""
        groups: list[State] = state["param_groups"]
        if [len(group["params"]) for group in groups] != [len(each) for each in self._numbers]:
            return None  # PyTorch's error says that it is of another optimizer
        saved = [number for group in groups for number in group["params"]]
        own = {saved[number]: self._members[number] for number in self._own}
        states = {
            number: {key: own[number].own_part(value) for key, value in each.items()}
            for number, each in state["state"].items()
            if number in own
        }
        parts = [{**group, "params": [each for each in group["params"] if each in own]} for group in groups]
        return {**state, "state": states, "param_groups": parts}


def _put(whole: dict[int, State], name: str, value: Any) -> None:
    number, key = name.split(" ", 1)
    whole.setdefault(int(number), {})[key] = value
