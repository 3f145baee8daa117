"""OptimizerState: an optimizer's per-element state as flat vectors, so that it can be averaged."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from polyrhythm.model.layout import Empty, Layout

# State that PyTorch's optimizers keep once per parameter, as a 0-dimensional tensor.
ONCE = ("step", "mu_product", "eta", "mu")


class OptimizerState:
    """The per-element state of a worker's optimizer: momentum_buffer, exp_avg and the like.

    Once requested, they are flat vectors, and the optimizer works on views of them.
    """

    def __init__(
        self,
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        empty: Empty,
    ) -> None:
        self._layout, self._optimizer, self._empty = layout, optimizer, empty
        self._buffers: dict[str, tuple[Tensor, ...]] = {}  # by the optimizer's name for it
        self._held: Tensor | None = None

    def names(self) -> list[str]:
        """The names of the per-element state, such as exp_avg; empty before the first step.

        For a parameter of one element both kinds of state have one number; other parameters tell which it is.
        """
        parameters = [each for each in self._layout.parameters if each.dim()] or self._layout.parameters
        return sorted(
            {
                name
                for parameter in parameters
                for name, value in self._optimizer.state.get(parameter, {}).items()
                if _along(value, parameter) and (parameter.dim() or name not in ONCE)
            }
        )

    def flat(self, names: Sequence[str]) -> tuple[tuple[Tensor, ...], Tensor]:
        """The state of these names as flat vectors, and which parameters have it.

        Its own tensors become views into them, on which it works in place; where it has made new ones, these
        are taken in. Parameters that it keeps nothing for are zero.
        """
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._layout.parameters]
        if self._held is None:
            self._held = self._empty(len(states), torch.float32, torch.device("cpu"))
        for index, (parameter, state) in enumerate(zip(self._layout.parameters, states, strict=True)):
            self._held[index] = float(any(_along(state.get(name), parameter) for name in names))
        for name in names:
            vectors = self._vectors(name, states)
            for parameter, piece, state in zip(
                self._layout.parameters, self._layout.pieces, states, strict=True
            ):
                view, value = self._layout.tensor(vectors, piece), state.get(name)
                if not _along(value, parameter):
                    view.zero_()
                elif value.data_ptr() != view.data_ptr():
                    state[name] = view.copy_(value)
        return tuple(vector for name in names for vector in self._buffers[name]), self._held

    def _vectors(self, name: str, states: Sequence[dict[str, Any]]) -> tuple[Tensor, ...]:
        """The flat vectors for one name; they have the dtypes that the optimizer has chosen."""
        if name not in self._buffers:
            dtypes = [dtype for dtype, _ in self._layout.kinds]
            for piece, state in zip(self._layout.pieces, states, strict=True):
                if isinstance(state.get(name), Tensor):
                    dtypes[piece.part] = state[name].dtype
            self._buffers[name] = tuple(
                self._empty(count, dtype, device)
                for count, dtype, (_, device) in zip(
                    self._layout.counts, dtypes, self._layout.kinds, strict=True
                )
            )
        return self._buffers[name]

    def adopt(self, names: Sequence[str]) -> None:
        """Where others have a state and this optimizer has none, it takes theirs."""
        states, held = self._optimizer.state, ([] if self._held is None else self._held.tolist())
        neighbour: dict[str, Any] = next(
            (states[each] for each in self._layout.parameters if states.get(each)), {}
        )
        rest = {name: value for name, value in neighbour.items() if name not in names}
        for parameter, piece, present in zip(self._layout.parameters, self._layout.pieces, held, strict=True):
            if present > 0:
                state = states[parameter] = states.get(parameter) or copy.deepcopy(rest)
                for name in names:
                    if state.get(name) is None:
                        state[name] = self._layout.tensor(self._buffers[name], piece)

    def forget(self) -> None:
        """Resets the optimizer to its initial state."""
        optimizer = self._optimizer
        taken = inspect.signature(type(optimizer)).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in taken}
        optimizer.state.clear()
        # Some, such as Adagrad, begin with a state; one of the user's own may be made differently.
        with contextlib.suppress(TypeError):
            groups = [dict(group) for group in optimizer.param_groups]
            optimizer.state.update(type(optimizer)(groups, **settings).state)


def _along(value: Any, parameter: Tensor) -> TypeGuard[Tensor]:
    """True if a value of an optimizer's state has a number for each element of its parameter."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
