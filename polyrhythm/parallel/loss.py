"""The loss of a divided model, computed by its last stage for each micro-batch.

The loss of a batch is the mean of those of its micro-batches, weighted by their rows. That is exact for a
loss that is a mean over the rows of its batch. Others are refused, as far as the first batches show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.micro_batches import MicroBatchOf, Values
from polyrhythm.parallel.partition import GraphSegment, Mode, Partition
from polyrhythm.parallel.untouched import random_states_kept

LOSS, TARGETS = "loss", "targets"  # the names of these values
Loss = Callable[..., Tensor]
_CHECKED = 8  # batches whose first micro-batch is checked
_NOT_A_MEAN = (
    'the loss of a batch is not the mean of the losses of its rows, as by reduction="sum", weights or '
    "ignored rows, so micro-batches would change it: use a mean over all rows, or micro_batches=1"
)


class Targets(NamedTuple):
    """What the loss function takes besides the output of the model, for one micro-batch."""

    rows: int
    whole: int  # rows of the batch
    first: bool  # of the micro-batches
    given: tuple[Any, ...]


def with_targets(pieces: Sequence[MicroBatchOf], targets: tuple[Any, ...]) -> list[MicroBatchOf]:
    """Micro-batches with their rows of the targets."""
    sizes = [each.rows for each in pieces]
    leaves, spec = pytree.tree_flatten(targets)
    cut = [_rows(leaf, sizes) for leaf in leaves]
    found = []
    for number, (rows, values) in enumerate(pieces):
        mine = pytree.tree_unflatten([each[number] for each in cut], spec)
        found.append(MicroBatchOf(rows, {**values, TARGETS: Targets(rows, sum(sizes), not number, mine)}))
    return found


def _rows(leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if not isinstance(leaf, Tensor) or len(sizes) == 1:
        return [leaf] * len(sizes)
    if not leaf.dim() or len(leaf) != sum(sizes):
        raise UsageError(
            f"session.backward() got a target of shape {list(leaf.shape)} for a batch of {sum(sizes)} rows, "
            "which cannot be cut into micro-batches: give targets a row for each example, and bind what "
            "has none to the loss function, as by functools.partial"
        )
    return torch.split(leaf, list(sizes))


def with_loss(parts: Partition, loss: Loss) -> Partition:
    """The model with the loss as its only output, which the last segment computes."""
    return replace(parts, train=_with_loss(parts, "train", loss), eval=_with_loss(parts, "eval", loss))


def _with_loss(parts: Partition, mode: Mode, loss: Loss) -> tuple[GraphSegment, ...]:
    *before, last = parts.segments(mode)
    leaves = dict.fromkeys(name for name in parts.results[mode].leaves if name is not None)
    others = tuple(name for name in leaves if name not in last.outputs)  # of earlier segments, or inputs
    assert isinstance(last.module, nn.Module)
    module = StageWithLoss(last, others, parts.results[mode].build, loss)
    return (*before, GraphSegment(last.place, module, (*last.inputs, *others, TARGETS), (LOSS,)))


class StageWithLoss(nn.Module):
    """The last stage of a model, and then the loss."""

    def __init__(
        self,
        stage: GraphSegment,
        others: tuple[str, ...],
        build: Callable[[Mapping[str, Any]], Any],
        loss: Loss,
    ) -> None:
        super().__init__()
        self.stage = stage.module
        self._taken, self._outputs, self._others = len(stage.inputs), stage.outputs, others
        self._build, self._loss, self._left = build, loss, _CHECKED

    def forward(self, *values: Any) -> tuple[Tensor]:
        targets: Targets = values[-1]
        known = dict(zip(self._outputs, self.stage(*values[: self._taken]), strict=True))
        known |= dict(zip(self._others, values[self._taken : -1], strict=True))
        found = self._loss(self._build(known), *targets.given)
        if not isinstance(found, Tensor) or found.dim():
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"the loss must be a tensor without dimensions, such as a mean, not {shape}")
        if targets.first and targets.rows < targets.whole and self._left:
            self._left -= 1
            with torch.no_grad(), random_states_kept():
                self._check(known, targets, found.detach())
        return (found,)

    def _check(self, known: Values, targets: Targets, whole: Tensor) -> None:
        """Raises UsageError if the loss of these rows is not the mean of those of two parts."""
        rows = targets.rows
        if rows > 1:
            parts = [self._of(known, targets, slice(0, 1)), self._of(known, targets, slice(1, rows))]
            mean = (parts[0] + (rows - 1) * parts[1]) / rows
        else:  # one row, and the same twice
            parts = [self._of(known, targets, [0, 0])]
            mean = parts[0]
        scale = float(max(whole.abs(), *(each.abs() for each in parts)))
        tolerance = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 3e-2
        if bool(whole.isfinite()) and not abs(float(whole - mean)) <= tolerance * scale:
            raise UsageError(_NOT_A_MEAN)

    def _of(self, known: Values, targets: Targets, chosen: Any) -> Tensor:
        def some(leaf: Any) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == targets.rows
            return leaf[chosen] if has_rows else leaf

        output = self._build({name: some(each) for name, each in known.items()})
        return self._loss(output, *pytree.tree_map(some, targets.given)).detach()
