"""KerasOptimizer: a Keras optimizer that a session can step, on a worker or on a server.

A Keras optimizer keeps its state (momentum, Adam's moments) in Keras variables of its own, and changes Keras
variables of the model. Here each variable of the model is a parameter group of a torch optimizer, and the
optimizer's variables that belong to it are its state, by position. They share their memory: where the session
has moved a parameter or a state, into a flat vector or into a server's range, the Keras variable follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from polyrhythm.core.errors import UsageError

STEP = "step"  # the name of the number of updates in the state of each parameter


class _Slot(NamedTuple):
    """A variable of the optimizer that belongs to a variable of the model, such as its momentum."""

    name: str
    variable: Any
    initializer: Any

    def reset(self) -> None:
        made = keras.initializers.get(self.initializer)
        self.variable.assign(made(self.variable.shape, dtype=self.variable.dtype))


class KerasOptimizer(torch.optim.Optimizer):
    """A built Keras optimizer as one of torch. `step()` applies what is in `.grad` of the parameters."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.keras, self.variables = optimizer, list(variables)
        self._apply: Callable[..., None] = optimizer.apply  # its own: the script's is replaced later
        self._slots, rest = _slots_of(optimizer, self.variables)
        # What it keeps once for all variables, such as a product of momenta.
        self._once = {f"once_{number}": each for number, each in enumerate(rest) if each.value.numel() == 1}
        self._first = {name: each.value.detach().clone() for name, each in self._once.items()}
        self.whole = len(self._once) == len(rest)  # all of its state is here
        self.updates = int(optimizer._iterations)
        # One group per variable: on a server that has some of them, its number says which.
        super().__init__([{"params": [each.value]} for each in self.variables], {"lr": self.current_rate()})
        for group, slots in zip(self.param_groups, self._slots, strict=True):
            state = self.state[group["params"][0]]
            state.update({slot.name: slot.variable.value.data for slot in slots})
            self._note(state)

    def current_rate(self) -> float:
        """The learning rate of the Keras optimizer, which a callback may have changed."""
        return float(self.keras.learning_rate)

    def set_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients, chosen, states, rate = [], [], [], 0.0
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    states.append(self._bind(number, parameter))
                    gradients.append(parameter.grad)
                    chosen.append(self.variables[number])
                    rate = group["lr"]
        if chosen:
            self._load(states[0])
            with self._rate(rate):
                self._apply(gradients, chosen)
            self.updates += 1
            for state in states:
                self._note(state)
        return loss

    def show(self) -> None:
        """Writes the state, which may have been fetched from servers, into the Keras optimizer."""
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._load(self._bind(number, parameter))

    def _bind(self, number: int, parameter: Tensor) -> dict[str, Any]:
        """Lets the Keras variables of one parameter use the memory of the parameter and of its state."""
        _move(self.variables[number], parameter.data)
        state: dict[str, Any] = self.state[parameter]
        for slot in self._slots[number]:
            held = state.get(slot.name)
            if held is None:  # a strategy has reset the optimizer
                slot.reset()
                state[slot.name] = slot.variable.value.data
            else:
                _move(slot.variable, held)
        return state

    def _load(self, state: dict[str, Any]) -> None:
        """What the optimizer keeps once for all variables is that of this state; of a new one as at first."""
        if state.get(STEP, 0) != self.updates:
            self.updates = int(state.get(STEP, 0))
            self.keras._iterations.assign(self.updates)
        for name, variable in self._once.items():
            variable.assign(state.get(name, self._first[name]))

    def _note(self, state: dict[str, Any]) -> None:
        state[STEP] = self.updates
        for name, variable in self._once.items():
            state[name] = variable.value.detach().clone()

    @contextmanager
    def _rate(self, rate: float) -> Iterator[None]:
        """A context in which the Keras optimizer has this rate: that of the run, not by its own count."""
        own = self.keras._learning_rate
        if isinstance(own, keras.Variable):
            if float(own) != rate:
                own.assign(rate)
            yield
            return
        self.keras._learning_rate = keras.ops.convert_to_tensor(rate, dtype=keras.backend.floatx())
        try:
            yield
        finally:
            self.keras._learning_rate = own


class KerasSchedule(LRScheduler):
    """A LearningRateSchedule of Keras as a scheduler of torch, which the session advances with the run."""

    def __init__(self, optimizer: KerasOptimizer, schedule: Callable[[int], Any]) -> None:
        self._schedule, self._start = schedule, optimizer.updates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        rate = float(self._schedule(self._start + self.last_epoch))
        return [rate] * len(self.optimizer.param_groups)


def schedule_of(optimizer: KerasOptimizer) -> KerasSchedule | None:
    """The schedule that the Keras optimizer was made with, if it has one."""
    own = optimizer.keras._learning_rate
    if isinstance(own, keras.optimizers.schedules.LearningRateSchedule):
        return KerasSchedule(optimizer, own)
    return None


def _move(variable: Any, data: Tensor) -> None:
    """Lets a Keras variable use this memory."""
    if variable.value.data_ptr() != data.data_ptr() or variable.value.shape != data.shape:
        variable.value.data = data


def _slots_of(optimizer: Any, variables: Sequence[Any]) -> tuple[list[list[_Slot]], list[Any]]:
    """The optimizer's variables by variable of the model, and those that belong to none.

    Names do not tell which belongs to which. A twin of the optimizer does, while it is built: both make the
    same variables in the same order.
    """
    places = {id(each): number for number, each in enumerate(variables)}
    twin = type(optimizer).from_config(optimizer.get_config())
    plain = twin.add_variable_from_reference
    made: list[tuple[Any, int, str, Any]] = []

    def record(
        reference_variable: Any, name: str | None = None, initializer: Any = "zeros", **more: Any
    ) -> Any:
        variable = plain(reference_variable, name=name, initializer=initializer, **more)
        made.append((variable, places[id(reference_variable)], name or "var", initializer))
        return variable

    twin.__dict__["add_variable_from_reference"] = record
    twin.build(variables)
    theirs, mine = twin.variables, optimizer.variables
    if [each.shape for each in theirs] != [each.shape for each in mine]:
        raise UsageError(
            f"the optimizer {type(optimizer).__name__} was built for other variables than the model trains "
            "now: call compile() again after changing what is trainable"
        )
    same = {id(one): other for one, other in zip(theirs, mine, strict=True)}
    slots: list[list[_Slot]] = [[] for _ in variables]
    for variable, place, name, initializer in made:
        taken = {slot.name for slot in slots[place]}
        unique = name if name not in taken else f"{name}_{len(taken)}"
        slots[place].append(_Slot(unique, same[id(variable)], initializer))
    known = {id(slot.variable) for each in slots for slot in each}
    known |= {id(optimizer._iterations), id(optimizer._learning_rate)}
    return slots, [each for each in mine if id(each) not in known]
