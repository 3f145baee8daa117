"""RowSGD: plain SGD on a linear model over sparse rows, one row a step, compiled.

What HogWild! was made for. A row takes a fraction of a microsecond, where PyTorch's own step takes hundreds
of them for its bookkeeping alone. Under `hogwild` several processes go through rows of their own on weights
that they share.
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

if TYPE_CHECKING:
    from polyrhythm.core.node import Lock

Array = np.ndarray[Any, Any]

LOSSES = ("logistic", "hinge", "squared")  # in the order of `row_loops`
INDEXES = (torch.int32, torch.int64)
_NOTHING = np.zeros(0, np.int64)


class Counts(NamedTuple):
    """Where updates are counted: of one row of the weights in 2^shift, and how many this worker has made."""

    counts: Array = _NOTHING
    shift: int = 0
    made: Array = _NOTHING


class Batch(NamedTuple):
    """Rows end to end, checked: where each begins, its label, and values, if they are not all 1."""

    words: Array
    offsets: Array
    labels: Array
    values: Array


class RowSGD(torch.optim.Optimizer):
    """SGD on one weight a feature, by rows that have few features each, one row a step.

    For each row, in order: z = sum_k v_k w[i_k], then w[i_k] <- w[i_k] - lr dl/dz v_k for each k. The loss l
    is `logistic` or `hinge` (labels are 0 and 1), or `squared`: (z - y)^2. The parameter is one tensor of
    shape (features, 1) on the CPU, such as the weight of `nn.EmbeddingBag(features, 1, mode="sum",
    sparse=True)`. `learn` takes the place of the forward pass, `backward()` and `step()`. Only `hogwild`
    takes it, for all others want gradients.

    >>> import torch, polyrhythm as pr
    >>> model = torch.nn.EmbeddingBag(1000, 1, mode="sum", sparse=True)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> optimizer = pr.RowSGD(model.parameters(), lr=0.5)
    >>> x, y = torch.tensor([[3, 141, 592], [65, 3, 58]]), torch.tensor([1.0, 0.0])
    >>> for _ in range(3):
    ...     print(f"{optimizer.learn(x, None, y):.3f}")
    0.760
    0.499
    0.356
    """

    own_gradients: ClassVar[bool] = True  # it needs none of `backward()`, and no strategy sees any

    # Of the class, for a copy of an optimizer has its settings only, and shares nothing with anybody.
    _batch: Batch | None = None
    _loss = math.nan
    _rank, _name, _counts = 0, "RowSGD", Counts()
    _lock: Lock | None = None

    def __init__(self, params: Iterable[Any], lr: float | Tensor, loss: str = "logistic") -> None:
        _loops()
        super().__init__(params, {"lr": lr, "loss": loss})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # what torch.optim.SGD saved tells of no loss
            group.setdefault("loss", self.defaults["loss"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group}
        rate, loss = settings["lr"], settings["loss"]
        number = isinstance(rate, numbers.Real) or (isinstance(rate, Tensor) and rate.numel() == 1)
        if not number or not 0 <= rate < float("inf"):
            raise UsageError(f"RowSGD: lr is {rate!r}; it must be a finite number, 0 or more")
        if loss not in LOSSES:
            raise UsageError(f"RowSGD: loss is {loss!r}; it may be {', '.join(LOSSES)}")
        super().add_param_group(param_group)
        found = [each for group in self.param_groups for each in group["params"]]
        one = found[0] if len(found) == 1 else torch.zeros(0)
        if one.dim() != 2 or one.shape[1] != 1 or one.device.type != "cpu":
            shapes = ", ".join(f"{tuple(each.shape)} on {each.device.type}" for each in found) or "none"
            raise UsageError(
                "RowSGD: it trains one tensor of shape (features, 1) on the CPU, such as the weight of "
                f'nn.EmbeddingBag(features, 1, mode="sum", sparse=True), and was given {shapes}'
            )
        if one.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"RowSGD: weights are float32 or float64, and these are {one.dtype}")

    def learn(
        self, words: Tensor, offsets: Tensor | None, labels: Tensor, values: Tensor | None = None
    ) -> float:
        """Learns the rows of a batch, one after the other; the mean of the losses each had before its step.

        As `nn.EmbeddingBag` takes them: the features of all rows end to end, with where each row begins, or a
        matrix, and no offsets. A feature may come several times in a row. `values` are 1 if there are none.
        """
        self._batch = self._checked(words, offsets, labels, values)
        try:
            self.step()  # under a session this is the strategy's, which comes back to ours
        finally:
            self._batch = None
        return self._loss

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        batch = self._batch
        if closure is not None or batch is None:
            raise UsageError("RowSGD: call learn(words, offsets, labels), which takes the steps, not step()")
        group = self.param_groups[0]
        rows = len(batch.labels)
        loops, weights = _loops(), group["params"][0].detach().view(-1).numpy()
        kind = LOSSES.index(group["loss"])
        args = (weights, *batch, float(group["lr"]), kind, *self._counts)
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

    def share(self, rank: int, counts: Counts, lock: Lock | None) -> None:
        """From here on counts its updates where others count theirs, and learns each row under this lock."""
        self._rank, self._name, self._counts, self._lock = rank, f"worker {rank}", counts, lock

    def _learn_locked(self, loops: ModuleType, args: Any, lock: Lock) -> tuple[int, float, int]:
        assert lock.mutex is not None
        line, until = np.frombuffer(lock.mutex, np.int64), np.zeros(2, np.int64)
        total, row, slices = 0.0, 0, 0
        while True:
            before = row
            end, some, row = loops.learn_locked(*args, row, line, self._rank, until)
            total += some
            if end == loops.FAILED:
                raise WaitError("RowSGD: the lock cannot be had any longer")
            if end != loops.TIMED_OUT:
                return end, total, row
            slices = slices + 1 if row == before else 1
            lock.waited(slices * loops.SLICE / 1e9)

    def _checked(self, words: Tensor, offsets: Tensor | None, labels: Tensor, values: Tensor | None) -> Batch:
        """The batch for the compiled loops; UsageError if it cannot be learned whole."""
        weight = self.param_groups[0]["params"][0]
        given = {"words": words, "offsets": offsets, "labels": labels, "values": values}
        for name, each in given.items():
            if not isinstance(each, Tensor) and (each is not None or name in ("words", "labels")):
                raise UsageError(f"RowSGD: {name} are a tensor, and this is {type(each).__name__}")
            if name in ("words", "offsets") and each is not None and each.dtype not in INDEXES:
                raise UsageError(f"RowSGD: {name} are int32 or int64, and these are {each.dtype}")
        rows = labels.numel()
        if words.dim() != (2 if offsets is None else 1):
            raise UsageError(
                f"RowSGD: words have {words.dim()} dimensions: they are a matrix and offsets are None, or "
                "they are all rows end to end and offsets tell where each begins"
            )
        if offsets is not None and offsets.dim() != 1:
            raise UsageError(f"RowSGD: offsets have {offsets.dim()} dimensions; they are a vector")
        many = len(words) if offsets is None else len(offsets)
        if labels.dim() != 1 or many != rows or not rows:
            raise UsageError(f"RowSGD: there are {many} rows, and labels of shape {tuple(labels.shape)}")
        if values is not None and values.shape != words.shape:
            raise UsageError(
                f"RowSGD: values have the shape {tuple(values.shape)}, and words {tuple(words.shape)}"
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
            raise UsageError(f"RowSGD: word {at} is {batch.words[at]}, and there are {len(weight)} features")
        if wrong == loops.BAD_OFFSET:
            raise UsageError(
                f"RowSGD: offset {at} is {starts[at]}: they begin with 0, do not fall, and do not go beyond "
                f"the {len(batch.words)} words"
            )
        if wrong == loops.BAD_LABEL:
            what = "a finite number" if kind == "squared" else f"0 or 1 for the {kind} loss"
            raise UsageError(f"RowSGD: label {at} is {batch.labels[at]:g}; it must be {what}")
        if wrong == loops.BAD_VALUE:
            raise UsageError(f"RowSGD: value {at} is {batch.values[at]}; it must be a finite number")
        return batch


def _array(tensor: Tensor, dtype: torch.dtype) -> Array:
    array: Array = tensor.detach().to("cpu", dtype).contiguous().view(-1).numpy()
    return array


def _loops() -> ModuleType:
    """The compiled loops; UsageError if what they need is not there."""
    if why := missing(checksums=False):
        raise UsageError(f"RowSGD needs {why}")
    from polyrhythm.optim import sparse_sgd_loops as row_loops

    return row_loops
