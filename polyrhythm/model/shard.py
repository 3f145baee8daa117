"""Shard: a server's range of the flat vectors, with the user's own optimizer working on it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.model.layout import (
    ELEMENTWISE,
    Empty,
    Layout,
    Span,
    State,
    check_optimizer,
    private,
    spans_of,
)
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.vectors import copied


@dataclass(frozen=True)
class _Slice:
    """A shard's part of one parameter: elements `low` to `high` of it, at `begin` to `end` of a vector."""

    index: int
    group: int
    part: int
    begin: int
    end: int
    low: int
    high: int


@dataclass
class _Unit:
    """One tensor that the optimizer works on: slices that lie end to end."""

    slices: list[_Slice]
    parameter: nn.Parameter
    part: int
    begin: int
    end: int
    place: Tensor  # where its data must lie


def _along(value: Any, parameter: Tensor) -> bool:
    """True if a value of an optimizer's state has a number for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == parameter.numel()


def _moved(entry: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """An entry of an optimizer's state with all that has a number for each element on this device."""
    return {
        key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
        for key, value in entry.items()
    }


class Shard:
    """A server's range of the flat vectors, with the user's own optimizer working on it.

    A parameter that lies wholly in the range keeps its shape. One that is cut becomes a flat slice, which
    makes no difference to an element-wise optimizer; for other optimizers no parameter is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        index: int,
        count: int,
        empty: Empty = private,
        runner: OptimizerRunner | None = None,
    ) -> None:
        check_optimizer(optimizer)
        self.layout = Layout(model, optimizer)
        self.layout.check_servers(count)
        self.optimizer, self._runner = optimizer, runner or OptimizerRunner()
        self.start, self.stop = self.layout.ranges(count)[index]
        counts = [0] * len(self.layout.kinds)
        mine = list(self.layout.groups(self.start, self.stop))
        for _, piece, low, high in mine:
            counts[piece.part] += high - low
        kinds = zip(counts, self.layout.kinds, strict=True)
        self.parameters = tuple(empty(count, dtype, device) for count, (dtype, device) in kinds)
        offsets = [0] * len(counts)
        for number, piece, low, high in mine:
            part = self.layout.parameters[number].detach().reshape(-1)[low:high]
            self.parameters[piece.part].narrow(0, offsets[piece.part], high - low).copy_(part)
            offsets[piece.part] += high - low
        self.version = 0  # updates applied so far
        self._spans: dict[frozenset[int], list[tuple[int, int, int, int]]] = {}
        self._settings: Sequence[dict[str, Any]] = ()  # the hyper-parameters of the last update
        self._slices: list[_Slice] = []
        self._units: list[_Unit] = []
        self._absent: frozenset[int] | None = None  # the parameters without a gradient in the last update
        self._take_over()

    @property
    def total(self) -> int:
        return self.stop - self.start

    def _take_over(self) -> None:
        """Gives the optimizer this range's slices instead of the model's parameters, state included."""
        offsets = [0] * len(self.parameters)
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for index, piece, low, high in self.layout.groups(self.start, self.stop):
            begin = offsets[piece.part]
            end = offsets[piece.part] = begin + high - low
            slice_ = _Slice(index, piece.group, piece.part, begin, end, low, high)
            self._slices.append(slice_)
            shape = piece.shape if high - low == piece.shape.numel() else torch.Size([high - low])
            unit = self._unit([slice_], shape)
            self._units.append(unit)
            old = self.layout.parameters[index]
            if old in state:
                self.optimizer.state[unit.parameter] = {
                    key: value.reshape(-1)[low:high].reshape(shape).clone()
                    if isinstance(value, Tensor) and value.shape == piece.shape and value.dim()
                    else copy.deepcopy(value)
                    for key, value in state[old].items()
                }
        self._hand_over()
        for parameter in self.layout.parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _unit(self, slices: list[_Slice], shape: torch.Size) -> _Unit:
        first, last = slices[0], slices[-1]
        place = self.parameters[first.part][first.begin : last.end].view(shape)
        return _Unit(slices, nn.Parameter(place), first.part, first.begin, last.end, place)

    def _hand_over(self) -> None:
        """Gives the optimizer the present units to work on."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [unit.parameter for unit in self._units if unit.slices[0].group == number]

    def _arrange(self, absent: frozenset[int]) -> None:
        """Gives the optimizer as few tensors as possible, because each costs it about 0.02 ms.

        An element-wise optimizer may see parameters that lie end to end as one tensor, if all of them have a
        gradient or none has. The first update decides which are joined; when other gradients are missing,
        each parameter becomes a tensor by itself again. Short floats are never joined: their rounding depends
        on where in a tensor they are.
        """
        if self._absent is None and type(self.optimizer) in ELEMENTWISE:
            self._join(absent)
        elif len(self._units) < len(self._slices):
            self._separate({each: self._entry(unit, each) for unit in self._units for each in unit.slices})
        self._absent = absent

    def _join(self, absent: frozenset[int]) -> None:
        runs: list[list[_Unit]] = []
        for unit in self._units:
            if runs and self._fits(runs[-1], unit, absent):
                runs[-1].append(unit)
            else:
                runs.append([unit])
        self._units = [run[0] if len(run) == 1 else self._joined(run) for run in runs]
        self._hand_over()

    def _fits(self, run: list[_Unit], unit: _Unit, absent: frozenset[int]) -> bool:
        """True if a unit can continue a run of others."""
        last, slice_ = run[-1], unit.slices[0]
        one, two = (self.optimizer.state.get(each.parameter, {}) for each in (last, unit))
        return (
            (last.part, last.end, last.slices[0].group) == (unit.part, unit.begin, slice_.group)
            and (last.slices[0].index in absent) == (slice_.index in absent)
            and unit.parameter.dtype in (torch.float32, torch.float64)
            and one.keys() == two.keys()
            and all(_along(two[key], unit.parameter) or bool(one[key] == two[key]) for key in two)
        )

    def _joined(self, run: list[_Unit]) -> _Unit:
        slices = [slice_ for unit in run for slice_ in unit.slices]
        whole = self._unit(slices, torch.Size([run[-1].end - run[0].begin]))
        states = [self.optimizer.state.pop(unit.parameter, {}) for unit in run]
        if states[0]:
            self.optimizer.state[whole.parameter] = {
                key: torch.cat([state[key].reshape(-1) for state in states])
                if _along(value, run[0].parameter)
                else value
                for key, value in states[0].items()
            }
        return whole

    def _separate(self, state: dict[_Slice, dict[str, Any]]) -> None:
        """Makes each slice a tensor by itself, with this state in the optimizer, its tensors flat."""
        self.optimizer.state.clear()
        self._units = []
        for slice_ in self._slices:
            shape = self.layout.pieces[slice_.index].shape
            whole = slice_.high - slice_.low == shape.numel()
            unit = self._unit([slice_], shape if whole else torch.Size([slice_.high - slice_.low]))
            self._units.append(unit)
            if state.get(slice_):
                self.optimizer.state[unit.parameter] = {
                    key: value.clone().view_as(unit.parameter)
                    if _along(value, unit.parameter)
                    else copy.deepcopy(value)
                    for key, value in state[slice_].items()
                }
        self._hand_over()

    def _entry(self, unit: _Unit, slice_: _Slice) -> dict[str, Any]:
        """The optimizer's state for one slice of a unit, its tensors flat."""
        start, stop = slice_.begin - unit.begin, slice_.end - unit.begin
        return {
            key: value.detach().reshape(-1)[start:stop] if _along(value, unit.parameter) else value
            for key, value in self.optimizer.state.get(unit.parameter, {}).items()
        }

    def state(self) -> State:
        """The optimizer's state for this range, for `Replica.restore`."""
        slices, tensors = [], []
        for unit in self._units:
            for slice_ in unit.slices:
                entry = self._entry(unit, slice_)
                plain = {name: value for name, value in entry.items() if not isinstance(value, Tensor)}
                held = {name: value for name, value in entry.items() if isinstance(value, Tensor)}
                count = slice_.high - slice_.low
                names = [
                    (name, None if value.dim() > 0 and value.numel() == count else list(value.shape))
                    for name, value in held.items()
                ]
                slices.append((slice_.index, slice_.low, slice_.high, plain, names))
                tensors += [value.detach().reshape(-1) for value in held.values()]
        return slices, tensors

    def state_dict(self) -> dict[str, Any]:
        """The parameters, the version and the optimizer's state of each slice; not copied."""
        entries = {each: self._entry(unit, each) for unit in self._units for each in unit.slices}
        return {
            "version": self.version,
            "parameters": list(self.parameters),
            "optimizer": [entries[slice_] for slice_ in self._slices],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned for the same range of the same model."""
        self.version = state["version"]
        copied(state["parameters"], self.parameters)
        entries = dict(zip(self._slices, state["optimizer"], strict=True))
        device = {slice_: self.parameters[slice_.part].device for slice_ in self._slices}
        self._separate({each: _moved(entry, device[each]) for each, entry in entries.items()})
        self._settings, self._absent = (), None  # the next update has its own

    def zeros(self, exact: bool = False) -> tuple[Tensor, ...]:
        """New vectors of the size of this range, zero; `exact`: in at least 32 bits."""
        short = (torch.float16, torch.bfloat16) if exact else ()
        return tuple(
            torch.zeros_like(part, dtype=torch.float32 if part.dtype in short else part.dtype)
            for part in self.parameters
        )

    def spans(self, groups: Sequence[dict[str, Any]], absent: Iterable[int] = ()) -> list[Span]:
        """This range by parameter group, with the settings of each, without the absent parameters."""
        missing = frozenset(absent)
        if missing not in self._spans:
            slices = ((each.index, each.group, each.part, each.begin, each.end) for each in self._slices)
            self._spans = {missing: spans_of(slices, missing)}  # usually the next update has the same
        return [Span(groups[group], group, *rest) for group, *rest in self._spans[missing]]

    def silent(self, update: Sequence[Tensor], absent: Sequence[int]) -> list[int]:
        """The absent parameters for which an update is zero."""
        named = frozenset(absent)
        updated = {
            each.index
            for each in self._slices
            if each.index in named and bool(update[each.part][each.begin : each.end].any())
        }
        return [index for index in absent if index not in updated]

    def momentum(self, into: Sequence[Tensor]) -> bool:
        """Copies the momentum buffers of the user's SGD for this range; False if it has none yet."""
        known = False
        for unit in self._units:
            value = self.optimizer.state.get(unit.parameter, {}).get("momentum_buffer")
            if value is not None:
                into[unit.part][unit.begin : unit.end].copy_(value.reshape(-1))
                known = True
        return known

    def shift(self, direction: Sequence[Tensor], factor: float = 1.0) -> None:
        """One update without the optimizer: adds the direction times a factor."""
        for part, change in zip(self.parameters, direction, strict=True):
            part.add_(change, alpha=factor)
        self.version += 1

    def apply(
        self, gradient: Sequence[Tensor], absent: Sequence[int] = (), groups: Sequence[dict[str, Any]] = ()
    ) -> None:
        """One update by the user's optimizer, with these hyper-parameters of its groups."""
        if groups != self._settings:
            self._settings = groups
            for group, settings in zip(self.optimizer.param_groups, groups, strict=False):
                for key, value in settings.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        missing = frozenset(absent)
        if missing != self._absent:
            self._arrange(missing)
        for unit in self._units:
            if unit.slices[0].index not in missing:
                part = gradient[unit.part]
                if part.shape != unit.place.shape:  # else it is the whole vector
                    part = part[unit.begin : unit.end].view(unit.place.shape)
                unit.parameter.grad = part
        self._runner.run(self.optimizer, self.optimizer.step)
        for unit in self._units:
            unit.parameter.grad = None  # the gradient is lent: it may not outlive the reply
            if unit.parameter.data_ptr() != unit.place.data_ptr():  # the optimizer has replaced it
                unit.parameter.data = unit.place.copy_(unit.parameter.data)
        self.version += 1
