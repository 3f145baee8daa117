"""Replica and Shard: a model and its optimizer as flat vectors.

The trainable parameters are laid end to end, parameter group by parameter group, in one flat buffer per
dtype and device; the model's own tensors become views into it. A worker's `Replica` holds the whole
vector, a server's `Shard` one range of it. Everything a strategy remembers between steps lives here.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.collectives.arithmetic import cut, split
from polyrhythm.errors import NotFinite, UsageError

if TYPE_CHECKING:
    from polyrhythm.node import Peer, Reply

Empty = Callable[[int, torch.dtype, torch.device], Tensor]


def _empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device)


@dataclass(frozen=True)
class Piece:
    """One parameter's place in the flat vectors."""

    name: str
    shape: torch.Size
    group: int
    part: int  # which flat vector
    start: int  # where in it

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class Span(NamedTuple):
    """A stretch of the flat vectors whose parameters share the settings of one group."""

    settings: dict[str, Any]
    group: int
    part: int
    start: int
    stop: int

    def of(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[self.part][self.start : self.stop]


def _spans(
    slices: Iterable[tuple[int, int, int, int, int]], absent: frozenset[int]
) -> list[tuple[int, int, int, int]]:
    """Joins slices (parameter index, group, part, start, stop) that lie side by side, but for the absent."""
    spans: list[tuple[int, int, int, int]] = []
    for index, group, part, start, stop in slices:
        if index in absent:
            continue
        if spans and spans[-1][:2] == (group, part) and spans[-1][3] == start:
            spans[-1] = (group, part, spans[-1][2], stop)
        else:
            spans.append((group, part, start, stop))
    return spans


class Layout:
    """Where each parameter of a model lies. Two nodes can train together if their layouts' hashes agree."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kinds: dict[tuple[torch.dtype, torch.device], int] = {}
        counts: list[int] = []
        self.pieces: list[Piece] = []
        self.parameters: list[Tensor] = []
        for group, settings in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(settings["params"]):
                name = names.get(id(parameter), f"group {group} parameter {number}")
                if not parameter.is_floating_point():
                    raise UsageError(
                        f"parameter {name} is {parameter.dtype}; only floating-point ones can train"
                    )
                part = kinds.setdefault((parameter.dtype, parameter.device), len(kinds))
                if part == len(counts):
                    counts.append(0)
                self.pieces.append(Piece(name, parameter.shape, group, part, counts[part]))
                self.parameters.append(parameter)
                counts[part] += parameter.numel()
        self.kinds = list(kinds)
        self.counts = counts
        self.total = sum(counts)
        if not self.total:
            raise UsageError("the model has no parameters to train; give the optimizer model.parameters()")
        text = repr([(p.name, tuple(p.shape), p.group, str(self.kinds[p.part][0])) for p in self.pieces])
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:16]

    def vectors(self, empty: Empty = _empty) -> tuple[Tensor, ...]:
        """New flat vectors of this layout, one per dtype and device, uninitialised."""
        return tuple(
            empty(count, dtype, device)
            for (dtype, device), count in zip(self.kinds, self.counts, strict=True)
        )

    def check_servers(self, count: int) -> None:
        """Refuses more servers than there are parameters to share out."""
        if count > self.total:
            raise UsageError(f"{count} servers for {self.total} parameters: use at most one per parameter")

    def view(self, vectors: Sequence[Tensor], piece: Piece) -> Tensor:
        """The part of `vectors` that is this parameter, in its own shape."""
        return vectors[piece.part][piece.start : piece.stop].view(piece.shape)

    def groups(self, start: int, stop: int) -> Iterator[tuple[int, Piece, int, int]]:
        """(index, piece, low, high): the pieces in a range of the whole, from low to high of each."""
        offsets = [sum(self.counts[:part]) for part in range(len(self.counts))]
        for index, piece in enumerate(self.pieces):
            first = offsets[piece.part] + piece.start
            low = max(0, start - first)
            high = min(piece.stop - piece.start, stop - first)
            if low < high:
                yield index, piece, low, high


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that no strategy can step in for."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam needs sparse gradients, and flat vectors are dense; use Adam or SGD")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} calls a closure several times per step; use an optimizer such as SGD or Adam"
        )


class Replica:
    """A worker's model and optimizer as flat vectors.

    `parameters` and `gradient` are tuples with one flat vector per dtype and device. `present` tells for
    each parameter tensor whether it has a gradient, for PyTorch skips those that have none.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, empty: Empty = _empty) -> None:
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.layout = Layout(model, optimizer)
        self.steps = 0
        self.version: dict[int, int] = {}
        self.buffers: dict[str, tuple[Tensor, ...]] = {}
        self.notes: dict[str, Any] = {}  # what else a strategy remembers
        self.outstanding: list[tuple[Peer, Reply]] = []  # answers that a strategy has not waited for yet
        self.parameters = self.layout.vectors(empty)
        self.gradient = self.layout.vectors(empty)
        self.present = empty(len(self.layout.pieces), torch.float32, torch.device("cpu"))
        self.present.zero_()
        for vector in self.gradient:
            vector.zero_()
        self._empty = empty
        self._views = [self.layout.view(self.gradient, piece) for piece in self.layout.pieces]
        for parameter, piece in zip(self.layout.parameters, self.layout.pieces, strict=True):
            place = self.layout.view(self.parameters, piece)
            place.copy_(parameter.detach())
            parameter.data = place
        self._optimizer_step = optimizer.step
        self._has: list[bool] = [False] * len(self._views)
        self._sums: list[Tensor] = []
        self._scale, self._before = 1.0, tuple[Tensor, ...]()
        self.touched = False  # a backward pass has reached the parameters
        for parameter in self.layout.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._touch)  # type: ignore[no-untyped-call]
        self._shown: nn.Module | None = None

    # --- the gradient -------------------------------------------------------------------------------

    def _touch(self, _: Tensor) -> None:
        self.touched = True

    def scale(self, factor: float) -> None:
        """From here on a new gradient counts this much: a fair share of the examples counts 1."""
        self._scale = factor

    def before_backward(self) -> None:
        """Keeps what was accumulated so far, if what is added now has to be scaled."""
        if self._scale != 1:
            self.gather()
            self._before = tuple(vector.clone() for vector in self.gradient)

    def before_anything(self) -> None:
        """Nothing was accumulated before what `.grad` holds now."""
        self._before = tuple(torch.zeros_like(vector) for vector in self.gradient) if self._scale != 1 else ()

    def after_backward(self) -> None:
        """Brings the new gradient into the flat vector, scaled, and sums it up: NaN stays in a sum."""
        self.gather()
        self.touched = False
        if self._scale != 1:
            for vector, before in zip(self.gradient, self._before, strict=True):
                vector.sub_(before).mul_(self._scale).add_(before) if self._scale else vector.copy_(before)
        self._sums = [vector.sum() for vector in self.gradient]

    def gather(self) -> bool:
        """Brings what backward left in `.grad` into the flat gradient; False if nothing has a gradient."""
        places, found = [], []
        for index, (parameter, view) in enumerate(zip(self.layout.parameters, self._views, strict=True)):
            gradient = parameter.grad
            has = gradient is not None
            if gradient is None:
                if self._has[index]:
                    view.zero_()
            elif gradient is not view:
                places.append(view)
                found.append(gradient.to_dense() if gradient.is_sparse else gradient)
                parameter.grad = view
            if has != self._has[index]:
                self._has[index] = has
                self.present[index] = float(has)
        if places:
            torch._foreach_copy_(places, found)
        return any(self._has)

    def bind(self) -> None:
        """Shows the flat gradient in `.grad` again, after others may have added to it."""
        for index, present in enumerate(self.present.tolist()):
            has = present > 0
            if has != self._has[index]:
                self._has[index] = has
                self.layout.parameters[index].grad = self._views[index] if has else None

    def check_finite(self, worker: object) -> None:
        """Raises `NotFinite` if this worker's gradient was not finite; the step must not be taken."""
        if not all(math.isfinite(float(total)) for total in self._sums):
            # The sum of large finite numbers may overflow too: look at each before saying so.
            if all(bool(torch.isfinite(vector).all()) for vector in self.gradient):
                return
            raise NotFinite(
                f"{worker}: the gradient at step {self.steps} is not finite (the loss is NaN or infinite): "
                f"lower the learning rate, clip gradients, or look at the data of that step"
            )

    @property
    def absent(self) -> list[int]:
        """The indexes of the parameter tensors that have no gradient now."""
        return [index for index, has in enumerate(self._has) if not has]

    # --- the step -----------------------------------------------------------------------------------

    def apply(self) -> None:
        """Runs the user's own optimizer on the gradient."""
        self._optimizer_step()

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Each parameter group's settings as plain values: they travel with every push."""
        return [hyper_parameters(group) for group in self.optimizer.param_groups]

    def spans(self) -> list[Span]:
        """The flat vectors by parameter group, without the parameters that have no gradient now."""
        slices = (
            (index, piece.group, piece.part, piece.start, piece.stop)
            for index, piece in enumerate(self.layout.pieces)
        )
        groups = self.optimizer.param_groups
        spans = _spans(slices, frozenset(self.absent))
        return [Span(groups[group], group, *rest) for group, *rest in spans]

    def restore(self, states: Sequence[State]) -> None:
        """Puts the state of an optimizer that works elsewhere, in slices, back into the user's own."""
        whole: dict[int, dict[str, Any]] = {}
        for slices, tensors in states:
            queue = iter(tensors)
            for index, low, high, plain, names in slices:
                parameter = self.layout.parameters[index]
                entry = whole.setdefault(index, {})
                entry.update(plain)
                for name, sliced in names:
                    value = next(queue)
                    if not sliced:
                        entry[name] = value.clone().reshape(())
                        continue
                    place = entry.setdefault(name, torch.empty_like(parameter, dtype=value.dtype))
                    place.view(-1)[low:high].copy_(value)
        for index, entry in whole.items():
            self.optimizer.state[self.layout.parameters[index]] = entry

    # --- what it remembers --------------------------------------------------------------------------

    def buffer(self, name: str) -> tuple[Tensor, ...]:
        """Persistent flat vectors of the layout by name, zero at first: a residual, a momentum, a copy."""
        if name not in self.buffers:
            self.buffers[name] = self.layout.vectors(self._empty)
            for vector in self.buffers[name]:
                vector.zero_()
        return self.buffers[name]

    def shown(self, vectors: Sequence[Tensor]) -> nn.Module:
        """The model with these parameters, as a copy that training does not touch; reused by later calls."""
        if self._shown is None:
            self._shown = copy.deepcopy(self.model)
        own, shown = dict(self.model.named_parameters()), dict(self._shown.named_parameters())
        index = {id(parameter): number for number, parameter in enumerate(self.layout.parameters)}
        with torch.no_grad():
            for name, parameter in own.items():
                number = index.get(id(parameter))
                source = (
                    parameter if number is None else self.layout.view(vectors, self.layout.pieces[number])
                )
                shown[name].copy_(source)
            for mine, copied in zip(self.model.buffers(), self._shown.buffers(), strict=True):
                copied.copy_(mine)
        self._shown.train(self.model.training)
        return self._shown


# A shard's optimizer state: for each slice (parameter index, low, high, plain values, [name, sliced?] of its
# tensors), and the tensors of all slices in this order.
State = tuple[list[tuple[int, int, int, dict[str, Any], list[tuple[str, bool]]]], list[Tensor]]


# Optimizers that do to an element what they would do to it in any other tensor.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
}  # fmt: skip


@dataclass(frozen=True)
class _Slice:
    """What a shard has of one parameter: from `low` to `high` of it, at `begin` to `end` of its vector."""

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


def _along(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has a number for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == parameter.numel()


class Shard:
    """A server's range of the flat vector, with the user's own optimizer working on it.

    A parameter that lies wholly in the range keeps its shape; one that is cut becomes a flat slice, which
    is the same to every element-wise optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        index: int,
        count: int,
        empty: Empty = _empty,
    ) -> None:
        check_optimizer(optimizer)
        self.layout = Layout(model, optimizer)
        self.layout.check_servers(count)
        self.optimizer = optimizer
        self.start, self.stop = split(self.layout.total, count)[index]
        whole = self.layout.vectors()
        for parameter, piece in zip(self.layout.parameters, self.layout.pieces, strict=True):
            self.layout.view(whole, piece).copy_(parameter.detach())
        mine = cut(whole, self.start, self.stop)
        self.parameters = tuple(empty(part.numel(), part.dtype, part.device) for part in mine)
        for place, part in zip(self.parameters, mine, strict=True):
            place.copy_(part)
        self.version = 0
        self.clocks: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.notes: dict[str, Any] = {}  # what else a strategy remembers
        self._spans: dict[frozenset[int], list[tuple[int, int, int, int]]] = {}
        self._settings: Sequence[dict[str, Any]] = ()  # the hyper-parameters that came with the last push
        self.buffers: dict[str, tuple[Tensor, ...]] = {}
        self._slices: list[_Slice] = []
        self._units: list[_Unit] = []
        self._absent: frozenset[int] | None = None  # which parameters the last push had no gradient for
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
        flat = self.parameters[first.part][first.begin : last.end]
        return _Unit(slices, nn.Parameter(flat.view(shape)), first.part, first.begin, last.end)

    def _hand_over(self) -> None:
        """Gives the optimizer the present units to work on."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = [unit.parameter for unit in self._units if unit.slices[0].group == number]

    def _arrange(self, absent: frozenset[int]) -> None:
        """Lets the optimizer work on as few tensors as it can, for each costs it a good part of 0.03 ms.

        To an optimizer that treats each element alike it is the same whether parameters lie end to end in one
        tensor. It is not if some of them have no gradient: the first push decides which are left out, and if
        that changes each goes on by itself. Nor is it for short floats, whose rounding depends on where in a
        tensor they are.
        """
        if self._absent is not None:
            self._part()
        elif type(self.optimizer) in ELEMENTWISE:
            self._join(absent)
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
        """Whether a unit can continue a run of others."""
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

    def _part(self) -> None:
        """Undoes `_join`: each parameter goes on by itself, with its part of the state."""
        state = {slice_: self._entry(unit, slice_) for unit in self._units for slice_ in unit.slices}
        self.optimizer.state.clear()
        self._units = []
        for slice_ in self._slices:
            shape = self.layout.pieces[slice_.index].shape
            whole = slice_.high - slice_.low == shape.numel()
            unit = self._unit([slice_], shape if whole else torch.Size([slice_.high - slice_.low]))
            self._units.append(unit)
            if state[slice_]:
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
                names = [(name, value.dim() > 0 and value.numel() == count) for name, value in held.items()]
                slices.append((slice_.index, slice_.low, slice_.high, plain, names))
                tensors += [value.detach().reshape(-1) for value in held.values()]
        return slices, tensors

    def buffer(self, name: str, exact: bool = False) -> tuple[Tensor, ...]:
        """Persistent vectors as long as this range by name, zero at first; `exact`: at least 32 bits."""
        if name not in self.buffers:
            short = (torch.float16, torch.bfloat16) if exact else ()
            self.buffers[name] = tuple(
                torch.zeros_like(part, dtype=torch.float32 if part.dtype in short else part.dtype)
                for part in self.parameters
            )
        return self.buffers[name]

    def spans(self, groups: Sequence[dict[str, Any]], absent: Iterable[int] = ()) -> list[Span]:
        """This range by parameter group, with these settings, without the absent parameters."""
        missing = frozenset(absent)
        if missing not in self._spans:
            slices = ((each.index, each.group, each.part, each.begin, each.end) for each in self._slices)
            self._spans = {missing: _spans(slices, missing)}  # as a rule the next push has the same
        return [Span(groups[group], group, *rest) for group, *rest in self._spans[missing]]

    def momentum(self) -> tuple[Tensor, ...] | None:
        """The momentum that the user's SGD keeps for this range; None if it has none yet."""
        gathered = self.buffer("momentum of the optimizer")
        known = False
        for unit in self._units:
            value = self.optimizer.state.get(unit.parameter, {}).get("momentum_buffer")
            if value is not None:
                gathered[unit.part][unit.begin : unit.end].copy_(value.reshape(-1))
                known = True
        return gathered if known else None

    def shift(self, direction: Sequence[Tensor], factor: float = 1.0) -> None:
        """One update of this range without the optimizer."""
        for part, change in zip(self.parameters, direction, strict=True):
            part.add_(change, alpha=factor)
        self.version += 1

    def apply(
        self, gradient: Sequence[Tensor], absent: Sequence[int] = (), groups: Sequence[dict[str, Any]] = ()
    ) -> None:
        """One update of this range by the user's optimizer, with the pusher's hyper-parameters."""
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
                unit.parameter.grad = gradient[unit.part][unit.begin : unit.end].view_as(unit.parameter)
        self.optimizer.step()
        for unit in self._units:
            unit.parameter.grad = None  # the gradient is lent: it may not outlive the answer
        self.version += 1


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings without its parameters, as values that any wire can carry."""
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[key] = value.item()
        elif isinstance(value, int | float | str | bool | tuple | list | type(None)) and key != "params":
            plain[key] = value
    return plain
