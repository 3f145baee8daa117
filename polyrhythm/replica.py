"""Replica: a worker's model and optimizer as flat vectors.

The model's own tensors become views into the flat vectors (see `layout`). Everything a strategy remembers on
a worker between steps lives here; what it remembers on a server is in `shard`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from polyrhythm.errors import NotFinite
from polyrhythm.layout import Empty, Layout, Span, State, check_optimizer, hyper_parameters, private, spans_of

if TYPE_CHECKING:
    from polyrhythm.node import Peer, Reply


class Replica:
    """A worker's model and optimizer as flat vectors.

    `parameters` and `gradient` are tuples with one flat vector per dtype and device. `present` tells for
    each parameter tensor whether it has a gradient, for PyTorch skips those that have none.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, empty: Empty = private) -> None:
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.layout = Layout(model, optimizer)
        self.steps = 0
        self.samples = 0  # examples trained on so far; borrowed ones do not count
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
        self._held: Tensor | None = None

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

    def spans(self, *, whole: bool = False) -> list[Span]:
        """The flat vectors by parameter group, without the parameters that have no gradient now, or whole."""
        slices = (
            (index, piece.group, piece.part, piece.start, piece.stop)
            for index, piece in enumerate(self.layout.pieces)
        )
        groups = self.optimizer.param_groups
        spans = spans_of(slices, frozenset() if whole else frozenset(self.absent))
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

    # --- the optimizer's state ----------------------------------------------------------------------

    def moment_names(self) -> list[str]:
        """What the optimizer keeps for each element, by name, such as exp_avg; nothing before it steps."""
        return sorted(
            {
                name
                for parameter in self.layout.parameters
                for name, value in self.optimizer.state.get(parameter, {}).items()
                if _along(value, parameter) and name != "step"  # which looks alike if that is one number
            }
        )

    def moments(self, names: Sequence[str]) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the optimizer keeps under these names, as flat vectors, and which parameters it has it for.

        Its own tensors become views into them, on which it works in place; where it has made new ones, these
        are taken in. Parameters that it keeps nothing for are zero.
        """
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.layout.parameters]
        if self._held is None:
            self._held = self._empty(len(states), torch.float32, torch.device("cpu"))
        for index, (parameter, state) in enumerate(zip(self.layout.parameters, states, strict=True)):
            self._held[index] = float(any(_along(state.get(name), parameter) for name in names))
        for name in names:
            vectors = self._moment(name, states)
            for parameter, piece, state in zip(
                self.layout.parameters, self.layout.pieces, states, strict=True
            ):
                view, value = self.layout.view(vectors, piece), state.get(name)
                if not _along(value, parameter):
                    view.zero_()
                elif value.data_ptr() != view.data_ptr():
                    state[name] = view.copy_(value)
        return tuple(vector for name in names for vector in self.buffers[_of_optimizer(name)]), self._held

    def _moment(self, name: str, states: Sequence[dict[str, Any]]) -> tuple[Tensor, ...]:
        """The flat vectors for one name; they have the dtypes that the optimizer has chosen."""
        key = _of_optimizer(name)
        if key not in self.buffers:
            dtypes = [dtype for dtype, _ in self.layout.kinds]
            for piece, state in zip(self.layout.pieces, states, strict=True):
                if isinstance(state.get(name), Tensor):
                    dtypes[piece.part] = state[name].dtype
            self.buffers[key] = tuple(
                self._empty(count, dtype, device)
                for count, dtype, (_, device) in zip(
                    self.layout.counts, dtypes, self.layout.kinds, strict=True
                )
            )
        return self.buffers[key]

    def adopt_moments(self, names: Sequence[str]) -> None:
        """Where others have a state and this optimizer has none, it goes on with theirs."""
        states, held = self.optimizer.state, ([] if self._held is None else self._held.tolist())
        neighbour: dict[str, Any] = next(
            (states[each] for each in self.layout.parameters if states.get(each)), {}
        )
        rest = {name: value for name, value in neighbour.items() if name not in names}
        for parameter, piece, present in zip(self.layout.parameters, self.layout.pieces, held, strict=True):
            if present > 0:
                state = states[parameter] = states.get(parameter) or copy.deepcopy(rest)
                for name in names:
                    if not _along(state.get(name), parameter):
                        state[name] = self.layout.view(self.buffers[_of_optimizer(name)], piece)

    def forget_moments(self) -> None:
        """The optimizer goes on as a new one would begin."""
        optimizer = self.optimizer
        taken = inspect.signature(type(optimizer)).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
        optimizer.state.clear()
        # Some, such as Adagrad, begin with a state; one of the user's own may be made differently.
        with contextlib.suppress(TypeError):
            groups = [dict(group) for group in optimizer.param_groups]
            optimizer.state.update(type(optimizer)(groups, **settings).state)

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


def _along(value: Any, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of an optimizer's state has a number for each element of its parameter."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def _of_optimizer(name: str) -> str:
    return f"{name} of the optimizer"
