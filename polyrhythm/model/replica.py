"""Replica: a worker's model and optimizer as flat vectors.

The model's own tensors become views into the flat vectors (see `layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.model.attachment import Attachment
from polyrhythm.model.gradients import GradientBuffer
from polyrhythm.model.layout import (
    Empty,
    Layout,
    Span,
    State,
    check_optimizer,
    hyper_parameters,
    private,
    spans_of,
    untouched,
)
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.optimizer_state import OptimizerState


class Replica:
    """A worker's part of the model and its optimizer as flat vectors.

    `parameters` and `gradient` are tuples with one flat vector per dtype and device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        empty: Empty = private,
        sparse: bool = False,
        temporary: Empty = private,
        runner: OptimizerRunner | None = None,
        closures: bool = False,
    ) -> None:
        check_optimizer(optimizer, sparse, closures)
        self.model, self.optimizer = model, optimizer
        self.layout = Layout(model, optimizer)
        self.steps = 0
        self.samples = 0  # examples trained on so far; borrowed ones do not count
        self.leaves_early = False  # while others still train on the data
        self.epochs: Callable[[], int] = lambda: 0  # of data that the script has begun, see `CallNumbers`
        self.runner = runner or OptimizerRunner()
        self.empty, self._temporary = empty, temporary
        self.parameters = self.layout.vectors(untouched if sparse else empty)
        for parameter, piece in zip(self.layout.parameters, self.layout.pieces, strict=True):
            self.layout.view(self.parameters, piece).copy_(parameter.detach())
        self.attachment = Attachment(self.layout)
        self.attachment.attach(self.parameters)
        self.gradients = GradientBuffer(self.layout, empty, sparse)
        self._optimizer_step = optimizer.step
        # Those of torch work in place. Another one may set `p.data`.
        self._may_replace = not type(optimizer).__module__.startswith("torch.optim.")
        self.closure: Callable[[], Any] | None = None  # of an optimizer that evaluates the loss itself
        self._consensus: tuple[Tensor, ...] | None = None  # for the next call of `take_consensus`
        self._abandoned: list[tuple[Tensor, ...]] = []
        self.optimizer_state = OptimizerState(self.layout, optimizer, empty)
        self.stepped()

    def move(self, vectors: Sequence[Tensor]) -> None:
        """Makes these vectors the parameters, with the values that they have."""
        self.parameters = tuple(vectors)
        self.attachment.attach(self.parameters)

    @property
    def gradient(self) -> tuple[Tensor, ...]:
        return self.gradients.vectors

    def check_finite(self, worker: object, step: int | None = None) -> None:
        """Raises `NotFinite` if this worker's gradient was not finite."""
        self.gradients.check_finite(worker, step or self.steps)

    def apply(self) -> None:
        """Runs the user's own optimizer on the gradient."""
        step = self._optimizer_step
        self.runner.run(self.optimizer, step if self.closure is None else partial(step, self.closure))
        if self._may_replace and not self.attachment.intact:
            self.attachment.restore()

    def stepped(self) -> None:
        """Called after each step."""
        self._versions = [each._version for each in self.layout.parameters]

    @property
    def rewritten(self) -> bool:
        """True if the script has written to parameters since the last step, as far as PyTorch shows it."""
        versions = [each._version for each in self.layout.parameters]
        return not self.attachment.intact or versions != self._versions

    def settings(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each parameter group, as plain values."""
        return [hyper_parameters(group) for group in self.optimizer.param_groups]

    def spans(self, *, whole: bool = False) -> list[Span]:
        """The flat vectors by parameter group, without the parameters that have no gradient now, or whole."""
        slices = (
            (index, piece.group, piece.part, piece.start, piece.stop)
            for index, piece in enumerate(self.layout.pieces)
        )
        groups = self.optimizer.param_groups
        spans = spans_of(slices, frozenset() if whole else frozenset(self.gradients.absent))
        return [Span(groups[group], group, *rest) for group, *rest in spans]

    def restore(self, states: Sequence[State]) -> None:
        """Puts the state of the optimizers on the servers, in slices, into the optimizer of the script."""
        whole: dict[int, dict[str, Any]] = {}
        for slices, tensors in states:
            queue = iter(tensors)
            for index, low, high, plain, names in slices:
                parameter = self.layout.parameters[index]
                entry = whole.setdefault(index, {})
                entry.update(plain)
                for name, shape in names:
                    value = next(queue)
                    if shape is not None:
                        entry[name] = value.clone().reshape(shape)
                        continue
                    place = entry.setdefault(name, torch.empty_like(parameter, dtype=value.dtype))
                    place.view(-1)[low:high].copy_(value)
        for index, entry in whole.items():
            self.optimizer.state[self.layout.parameters[index]] = entry

    def buffer(self, exact: bool = False) -> tuple[Tensor, ...]:
        """New flat vectors of the layout, zero, in memory that can be lent; `exact`: in at least 32 bits."""
        vectors = self.layout.vectors(self.empty, exact)
        for vector in vectors:
            vector.zero_()
        return vectors

    def scratch(self, exact: bool = False) -> tuple[Tensor, ...]:
        """New uninitialized flat vectors. Their memory is freed with them: do not drop them while lent."""
        return self.layout.vectors(self._temporary, exact)

    def examples_since(self, samples: int) -> int:
        """The examples trained on since `samples` was this; of the whole site where a site is one worker."""
        return self.samples - samples

    # --- the model that the workers agree on --------------------------------------------------------

    def consensus_vectors(self) -> tuple[Tensor, ...]:
        """Flat vectors to write a consensus to. They become the parameters of the copy of the model."""
        if self._consensus is None:
            self._consensus = self.scratch()
        return self._consensus

    def abandon_consensus(self) -> None:
        """Called if an exchange failed: others may still write to its vectors, so they are not used again."""
        if self._consensus is not None:
            self._abandoned.append(self._consensus)
            self._consensus = None

    def take_consensus(self, vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """These parameters in vectors that nothing changes later: those of `consensus_vectors`."""
        held, self._consensus = self.consensus_vectors(), None
        for place, part in zip(held, vectors, strict=True):
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)
        return held
