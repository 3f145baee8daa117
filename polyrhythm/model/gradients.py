"""GradientBuffer: the gradient of a replica as flat vectors, filled by backward, in buckets.

Hooks note which gradients a backward pass has completed. A bucket whose gradients are all complete is handed
on while backward continues, so that its exchange overlaps with computing (see `buckets`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyrhythm.core.errors import NotFinite, PolyrhythmError, UsageError
from polyrhythm.model.buckets import Bucket, arrange
from polyrhythm.model.layout import Empty, Layout, spans_of, untouched


class GradientBuffer:
    """The gradient as flat vectors.

    `present` has a 1 for each parameter tensor that has a gradient, because PyTorch skips those that have
    none. With `sparse`, sparse gradients stay as backward left them, outside the flat vectors, so a step
    costs no more than it touches.
    """

    def __init__(self, layout: Layout, empty: Empty, sparse: bool = False) -> None:
        self.layout = layout
        self.vectors = layout.vectors(untouched if sparse else empty)
        self.present = empty(len(layout.pieces), torch.float32, torch.device("cpu"))
        self.present.zero_()
        for vector in () if sparse else self.vectors:
            vector.zero_()
        self._views = [layout.view(self.vectors, piece) for piece in layout.pieces]
        self._has: list[bool] = [False] * len(self._views)
        self._sparse = sparse
        self.densified = ""  # the name of a parameter whose gradient was sparse and became dense
        self._rows: dict[int, Tensor] = {}  # the sparse gradients of this step, by parameter
        self._dense = () if sparse else self.vectors  # the parts of the vectors that hold a gradient
        self._sums: list[Tensor] = []
        self._scale, self._before = 1.0, tuple[Tensor, ...]()
        self.passes = 0  # complete gradients so far
        self.touched: dict[int, None] = {}  # the parameters that a backward pass has reached, in order
        self.begun = 0  # how many buckets of this backward pass have been handed on
        self._early = False  # buckets of this pass are handed on before it ends
        self._begin: Callable[[Bucket], None] | None = None
        self._bucket_of: list[int] = []
        self._lock = threading.Lock()
        self._accumulators: list[Any] = []
        self.arrange(reversed(range(len(self._views))))
        self._frozen = dict(enumerate(layout.parameters))  # not watched
        self._watch_unfrozen()

    # --- buckets ------------------------------------------------------------------------------------

    def arrange(self, order: Iterable[int]) -> None:
        """Makes the buckets for gradients that become ready in this order."""
        self.buckets = arrange(self.layout, self.vectors, list(order))
        owners = {index: place for place, bucket in enumerate(self.buckets) for index in bucket.indexes}
        self._bucket_of = [owners[index] for index in range(len(self._views))]

    def _watch_unfrozen(self) -> None:
        for index, parameter in list(self._frozen.items()):
            if parameter.requires_grad:
                self._watch(index, parameter)
                del self._frozen[index]

    def _watch(self, index: int, parameter: Tensor) -> None:
        """Has `_touch` called when backward is done with a parameter's gradient.

        The script's own tensor hooks have run by then: hooks of a graph node run after those of its tensor.
        """
        with torch.enable_grad():
            accumulate: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulate.register_hook(lambda *_: self._touch(index, parameter))
        self._accumulators.append(accumulate)  # the graph holds only weak references

    def _touch(self, index: int, parameter: Tensor) -> None:
        """Notes a complete gradient and hands on the buckets that it completes, in order."""
        with self._lock:  # parameters on several devices have a thread each
            if self._bucket_of[index] < self.begun:
                raise UsageError(
                    f"the gradient of {self.layout.pieces[index].name} was completed twice in one backward "
                    "pass: use torch.utils.checkpoint with use_reentrant=False"
                )
            self.touched[index] = None
            if torch.is_grad_enabled():  # backward(create_graph=True)
                with torch.no_grad():
                    self._complete(index, parameter)
            else:  # no_grad() for each parameter would cost as much as the copy
                self._complete(index, parameter)

    def _complete(self, index: int, parameter: Tensor) -> None:
        self._take(index, parameter)
        if self._begin is None:
            return
        self.buckets[self._bucket_of[index]].missing.discard(index)
        while self.begun < len(self.buckets) and not self.buckets[self.begun].missing:
            self.hand_on(self._begin)

    def hand_on(self, begin: Callable[[Bucket], None]) -> None:
        """Hands on the next bucket, to begin its exchange."""
        bucket = self.buckets[self.begun]
        if self._early:  # while it is in the cache; otherwise `after_backward` has done it
            for part in bucket.gradient if self._scale != 1 else ():
                part.mul_(self._scale) if self._scale else part.zero_()
            sums = [part.sum() for part in bucket.gradient]
            self._sums = [*self._sums, *sums] if self.begun else sums
        self.begun += 1
        begin(bucket)

    def wait_for_the_end(self) -> None:
        """Hands on nothing more before this backward pass has ended."""
        self._begin = None

    def give_up(self, begin: Callable[[Bucket], None]) -> bool:
        """Called after a backward pass failed. True if buckets were on their way to other workers.

        They wait for the rest, so they get it, with NaN in `present` to say that it is void.
        """
        begun = self.begun
        if begun == len(self.buckets):
            raise PolyrhythmError(
                "a backward pass failed after its gradient was exchanged: the others take this step"
            )
        if begun:
            self.present.fill_(math.nan)
            while self.begun < len(self.buckets):
                self.hand_on(begin)
        return begun > 0

    def recover(self) -> None:
        """Drops the remains of a failed pass."""
        for index, parameter in enumerate(self.layout.parameters):
            self._has[index], parameter.grad = False, None
        for vector in (*self.vectors, self.present):
            vector.zero_()
        self.begun, self._begin, self._early = 0, None, False

    def _take(self, index: int, parameter: Tensor) -> None:
        """Copies one gradient into the flat vector, so that backward's own tensor is freed at once."""
        gradient, view = parameter.grad, self._views[index]
        if gradient is None or self._sparse:
            return  # `gather` keeps sparse ones apart
        if gradient is not view:
            view.copy_(self._densify(index, gradient) if gradient.is_sparse else gradient)
            parameter.grad = view
        if not self._has[index]:
            self._has[index] = True
            self.present[index] = 1.0

    def _densify(self, index: int, gradient: Tensor) -> Tensor:
        self.densified = self.densified or self.layout.pieces[index].name
        return gradient.to_dense()

    # --- scale --------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        """Sets the weight of a new gradient: 1 for a fair share of the examples."""
        self._scale = factor

    @property
    def scaling(self) -> float:
        """The weight of a new gradient now."""
        return self._scale

    @property
    def counts(self) -> bool:
        """False if the present batch is borrowed and has no weight."""
        return self._scale != 0

    # --- around backward ----------------------------------------------------------------------------

    def before_backward(self, begin: Callable[[Bucket], None] | None = None) -> None:
        """Keeps the gradient accumulated so far, if the new one has to be scaled.

        With `begin`, buckets are handed on, scaled, as they are completed; not if they are added to others
        with another scale.
        """
        self.touched, self.begun = {}, 0
        if self._frozen:
            self._watch_unfrozen()
        accumulates = self._scale != 1 and self.gather()
        self._begin = None if accumulates else begin
        self._early = self._begin is not None
        if self._early:
            for bucket in self.buckets:
                bucket.missing = set(bucket.indexes)
        elif self._scale != 1:
            self._before = tuple(vector.clone() for vector in self.vectors)

    def before_anything(self) -> None:
        """Like `before_backward` where `.grad` was set without `backward()`: nothing was accumulated."""
        self.begun, self._begin, self._early = 0, None, False
        self._before = tuple(torch.zeros_like(vector) for vector in self.vectors) if self._scale != 1 else ()

    def after_backward(self) -> None:
        """Copies the new gradient into the flat vectors, scaled. Its sums keep any NaN for later."""
        self.passes += 1
        self.gather()
        if self._scale != 1 and not self._early:
            for vector, before in zip(self.vectors, self._before, strict=True):
                vector.sub_(before).mul_(self._scale).add_(before) if self._scale else vector.copy_(before)
        if not self._early:
            self._sums = [part.sum() for part in self._dense]
            self._sums += [gradient._values().sum() for gradient in self._rows.values()]

    def gather(self) -> bool:
        """Copies `.grad` of every parameter into the flat vectors; False if no parameter has a gradient."""
        places, found = [], []
        changed = False
        rows: dict[int, Tensor] = {}
        for index, (parameter, view) in enumerate(zip(self.layout.parameters, self._views, strict=True)):
            gradient = parameter.grad
            has = gradient is not None
            if gradient is None or (self._sparse and gradient.is_sparse):
                if self._has[index] and index not in self._rows:
                    view.zero_()
                if gradient is not None:
                    rows[index] = gradient
            elif gradient is not view:
                places.append(view)
                found.append(self._densify(index, gradient) if gradient.is_sparse else gradient)
                parameter.grad = view
            if has != self._has[index]:
                self._has[index] = has
                self.present[index] = float(has)
                changed = True
        if places:
            torch._foreach_copy_(places, found)
        if self._sparse and (changed or rows.keys() != self._rows.keys()):
            whole = (
                (index, 0, piece.part, piece.start, piece.stop)
                for index, piece in enumerate(self.layout.pieces)
            )
            spans = spans_of(whole, frozenset([*rows, *self.absent]))
            self._dense = tuple(self.vectors[part][start:stop] for _, part, start, stop in spans)
        self._rows = rows
        return any(self._has)

    def any(self) -> bool:
        """False if the script has dropped the gradient: by `zero_grad()`, for example."""
        return any(each.grad is not None and bool(each.grad.any()) for each in self.layout.parameters)

    def revive(self) -> None:
        """Marks parameters that have a non-zero gradient as present: it may come from a residual."""
        for index in (self.present == 0).nonzero().flatten().tolist():
            if bool(self._views[index].any()):
                self.present[index] = 1.0

    def bind(self) -> None:
        """Makes `.grad` views of the flat vectors again, after an exchange may have added to them."""
        flags = self.present.tolist()
        if flags == self._has:
            self.begun, self._begin, self._early = 0, None, False
            return
        if any(math.isnan(present) for present in flags):
            raise PolyrhythmError("another worker skipped a failed backward pass, so its gradient is missing")
        for index, present in enumerate(flags):
            has = present > 0
            if has != self._has[index]:
                self._has[index] = has
                self.layout.parameters[index].grad = self._views[index] if has else None
        self.present.copy_(self.present > 0)  # a mean of flags is a fraction
        self.begun, self._begin, self._early = 0, None, False

    def check_finite(self, worker: object, step: int) -> None:
        """Raises `NotFinite` if this worker's gradient was not finite; the step must not be taken."""
        if all(math.isfinite(float(total)) for total in self._sums):
            return
        # The sum of large finite numbers may overflow too: look at each before saying so.
        found = {**dict(enumerate(self._views)), **{i: rows._values() for i, rows in self._rows.items()}}
        names = [piece.name for piece in self.layout.pieces]
        layers = [names[index] for index, part in found.items() if not bool(torch.isfinite(part).all())]
        if not layers:
            return
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        raise NotFinite(
            f"{worker}: the gradient of {layers[0]}{more} at step {step} is not finite (the loss is NaN or "
            "infinite): lower the learning rate, clip gradients, or check the data of that step"
        )

    @property
    def absent(self) -> list[int]:
        """The indexes of the parameter tensors that have no gradient now."""
        return [index for index, has in enumerate(self._has) if not has]
