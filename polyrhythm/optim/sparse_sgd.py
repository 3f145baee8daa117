"""SparseSGD: plain SGD on a linear model over sparse rows, one row per step, compiled.

HogWild! was designed for this problem. A row takes a fraction of a microsecond; the overhead alone of a
PyTorch step takes hundreds. Under `hogwild` several processes train shared weights, each on its own rows.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.core.errors import NotFinite, UsageError, WaitError
from polyrhythm.core.extras import missing
from polyrhythm.strategies.hogwild.tally import UpdateCounters

if TYPE_CHECKING:
    from polyrhythm.core.node import Lock

Array = np.ndarray[Any, Any]

LOSSES = ("logistic", "hinge", "squared")  # in the order of `sparse_sgd_loops`
INDEXES = (torch.int32, torch.int64)
_NOTHING = np.zeros(0, np.int64)


class Batch(NamedTuple):
    """Checked rows end to end: features, offsets of the rows, labels, and values if not all are 1."""

    words: Array
    offsets: Array
    labels: Array
    values: Array


class SparseSGD(torch.optim.Optimizer):
    """SGD on one weight per feature, over rows that have few features each, one row per step.

    For each row, in order: z = sum_k v_k w[i_k], then w[i_k] <- w[i_k] - lr dl/dz v_k for each k. The loss l
    is `logistic` or `hinge` (labels are 0 and 1), or `squared`: (z - y)^2. The parameter is one tensor of
    shape (features, 1) on the CPU, such as the weight of `nn.EmbeddingBag(features, 1, mode="sum",
    sparse=True)`. `learn` takes the place of the forward pass, `backward()` and `step()`. Of the strategies
    only `hogwild` takes it, because all others exchange gradients.

    >>> import torch, polyrhythm as pr
    >>> model = torch.nn.EmbeddingBag(1000, 1, mode="sum", sparse=True)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = pr.SparseSGD(model.parameters(), lr=0.5)
    >>> x, y = torch.tensor([[3, 141, 592], [65, 3, 58]]), torch.tensor([1.0, 0.0])
    >>> for _ in range(3):
    ...     print(f"{optimizer.learn(x, None, y):.3f}")
    0.760
    0.499
    0.356
    """

    own_gradients: ClassVar[bool] = True  # computes its gradients itself; no strategy sees them

    # Class defaults: a copy of an optimizer has only its settings, and shares nothing.
    _batch: Batch | None = None
    _loss = math.nan
    _rank, _name, _counters = 0, "SparseSGD", UpdateCounters(_NOTHING, 0, _NOTHING)
    _lock: Lock | None = None

    def __init__(self, params: Iterable[Any], lr: float | Tensor, loss: str = "logistic") -> None:
        _loops()
        super().__init__(params, {"lr": lr, "loss": loss})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the state of torch.optim.SGD has no loss
            group.setdefault("loss", self.defaults["loss"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group}
        rate, loss = settings["lr"], settings["loss"]
        number = isinstance(rate, numbers.Real) or (isinstance(rate, Tensor) and rate.numel() == 1)
        if not number or not 0 <= rate < float("inf"):
            raise UsageError(f"SparseSGD: lr is {rate!r}; it must be a finite number, 0 or more")
        if loss not in LOSSES:
            raise UsageError(f"SparseSGD: loss is {loss!r}; it must be one of {', '.join(LOSSES)}")
        super().add_param_group(param_group)
        found = [each for group in self.param_groups for each in group["params"]]
        one = found[0] if len(found) == 1 else torch.zeros(0)
        if one.dim() != 2 or one.shape[1] != 1 or one.device.type != "cpu":
            shapes = ", ".join(f"{tuple(each.shape)} on {each.device.type}" for each in found) or "none"
            raise UsageError(
                "SparseSGD: it trains one tensor of shape (features, 1) on the CPU, such as the weight of "
                f'nn.EmbeddingBag(features, 1, mode="sum", sparse=True), but was given {shapes}'
            )
        if one.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"SparseSGD: weights must be float32 or float64, but are {one.dtype}")

    def learn(
        self, words: Tensor, offsets: Tensor | None, labels: Tensor, values: Tensor | None = None
    ) -> float:
        """Takes a step for each row of a batch, in order; returns the mean of their losses before the step.

        The arguments are those of `nn.EmbeddingBag`: the features of all rows end to end with offsets where
        each row begins, or a matrix without offsets. A row may contain a feature several times. `values` are
        1 by default.
        """
        self._batch = self._checked(words, offsets, labels, values)
        try:
            self.step()  # in a session this is the worker's step, which calls ours
        finally:
            self._batch = None
        return self._loss

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        batch = self._batch
        if closure is not None or batch is None:
            raise UsageError(
                "SparseSGD: call learn(words, offsets, labels), which takes the steps, not step()"
            )
        group = self.param_groups[0]
        rows = len(batch.labels)
        loops, weights = _loops(), group["params"][0].detach().view(-1).numpy()
        kind = LOSSES.index(group["loss"])
        args = (weights, *batch, float(group["lr"]), kind, *self._counters)
        if self._lock is None:
            end, total, row = loops.learn(*args)
        else:
            end, total, row = self._learn_locked(loops, args, self._lock)
        if end == loops.NOT_FINITE:
            raise NotFinite(
                f"{self._name}: row {row} of a batch of {rows} would make a step that is not finite: lower "
                "the learning rate, or look at the data"
            )
        self._loss = total / rows

    def share(self, rank: int, counters: UpdateCounters, lock: Lock | None) -> None:
        """Counts updates in shared memory from here on, and takes the lock, if any, for each row."""
        self._rank, self._name, self._counters, self._lock = rank, f"worker {rank}", counters, lock

    def _learn_locked(self, loops: ModuleType, args: Any, lock: Lock) -> tuple[int, float, int]:
        assert lock.mutex is not None
        line, until = np.frombuffer(lock.mutex, np.int64), np.zeros(2, np.int64)
        total, row, slices = 0.0, 0, 0
        while True:
            before = row
            end, some, row = loops.learn_locked(*args, row, line, self._rank, until)
            total += some
            if end == loops.FAILED:
                raise WaitError("SparseSGD: the lock is broken: the system refuses to take it")
            if end != loops.TIMED_OUT:
                return end, total, row
            slices = slices + 1 if row == before else 1
            lock.waited(slices * loops.SLICE / 1e9)

    def _checked(self, words: Tensor, offsets: Tensor | None, labels: Tensor, values: Tensor | None) -> Batch:
        """The batch for the compiled loops; UsageError, before any step, if a part of it is wrong."""
        weight = self.param_groups[0]["params"][0]
        given = {"words": words, "offsets": offsets, "labels": labels, "values": values}
        for name, each in given.items():
            if not isinstance(each, Tensor) and (each is not None or name in ("words", "labels")):
                raise UsageError(f"SparseSGD: {name} must be a tensor, but are {type(each).__name__}")
            if name in ("words", "offsets") and each is not None and each.dtype not in INDEXES:
                raise UsageError(f"SparseSGD: {name} must be int32 or int64, but are {each.dtype}")
        rows = labels.numel()
        if words.dim() != (2 if offsets is None else 1):
            raise UsageError(
                f"SparseSGD: words have {words.dim()} dimensions: they must be a matrix without offsets, or "
                "all rows end to end with offsets where each begins"
            )
        if offsets is not None and offsets.dim() != 1:
            raise UsageError(f"SparseSGD: offsets have {offsets.dim()} dimensions; they must be a vector")
        many = len(words) if offsets is None else len(offsets)
        if labels.dim() != 1 or many != rows or not rows:
            raise UsageError(f"SparseSGD: there are {many} rows, but labels of shape {tuple(labels.shape)}")
        if values is not None and values.shape != words.shape:
            raise UsageError(
                f"SparseSGD: values have the shape {tuple(values.shape)}, but words {tuple(words.shape)}"
            )
        starts = (
            np.arange(rows, dtype=np.int64) * words.shape[1]
            if offsets is None
            else _array(offsets, torch.int64)
        )
        nothing = np.zeros(0, weight.detach()[:0].numpy().dtype)
        batch = Batch(
            _array(words, words.dtype),
            starts,
            _array(labels, weight.dtype),
            nothing if values is None else _array(values, weight.dtype),
        )
        loops, kind = _loops(), self.param_groups[0]["loss"]
        wrong, at = loops.check(*batch, len(weight), kind != "squared")
        if wrong == loops.OUT_OF_RANGE:
            raise UsageError(
                f"SparseSGD: word {at} is {batch.words[at]}, but there are {len(weight)} features"
            )
        if wrong == loops.BAD_OFFSET:
            raise UsageError(
                f"SparseSGD: offset {at} is {starts[at]}: offsets must begin with 0, not decrease, and not "
                f"exceed the {len(batch.words)} words"
            )
        if wrong == loops.BAD_LABEL:
            what = "a finite number" if kind == "squared" else f"0 or 1 for the {kind} loss"
            raise UsageError(f"SparseSGD: label {at} is {batch.labels[at]:g}; it must be {what}")
        if wrong == loops.BAD_VALUE:
            raise UsageError(f"SparseSGD: value {at} is {batch.values[at]}; it must be a finite number")
        return batch


def _array(tensor: Tensor, dtype: torch.dtype) -> Array:
    array: Array = tensor.detach().to("cpu", dtype).contiguous().view(-1).numpy()
    return array


def _loops() -> ModuleType:
    """The compiled loops; UsageError if numba is missing."""
    if why := missing(checksums=False):
        raise UsageError(f"SparseSGD needs {why}")
    from polyrhythm.optim import sparse_sgd_loops

    return sparse_sgd_loops
