"""Replica: a worker's model and optimizer as flat vectors.

The model's own tensors become views into the flat vectors (see `layout`). Everything a strategy remembers on
a worker between steps lives here; what it remembers on a server is in `shard`.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import NotFinite, PolyrhythmError, UsageError
from polyrhythm.model.buckets import Bucket, arrange
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
from polyrhythm.model.optimizer_state import Moments

if TYPE_CHECKING:
    from polyrhythm.compress.compressor import Coder, Sender
    from polyrhythm.core.message import Reply
    from polyrhythm.core.peer import Peer
    from polyrhythm.model.level import Level


SENT = "sent: "  # so begin the names of the buffers in which codecs remember what a worker sends


class Replica:
    """A worker's model and optimizer as flat vectors.

    `parameters` and `gradient` are tuples with one flat vector per dtype and device. `present` tells for
    each parameter tensor whether it has a gradient, for PyTorch skips those that have none.

    With `sparse`, gradients that are sparse stay as backward left them, and in the flat gradient there is
    nothing of them: no step costs more than what it touches, in time or in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        empty: Empty = private,
        sparse: bool = False,
    ) -> None:
        check_optimizer(optimizer, sparse)
        self.model = model
        self.optimizer = optimizer
        self.layout = Layout(model, optimizer)
        self.steps = 0
        self.samples = 0  # examples trained on so far; borrowed ones do not count
        self.version: dict[int, int] = {}
        self.buffers: dict[str, tuple[Tensor, ...]] = {}
        self.leaves_early = False  # while others go on with the data
        self.clock: Callable[[], float] = float  # what time it is, by the world's clock
        self.applying = 0.0  # seconds that the optimizer has taken for its steps
        self.notes: dict[str, Any] = {}  # what else a strategy remembers
        self.senders: dict[Any, Sender] = {}  # through a codec: views of the buffers and notes above
        self.readers: dict[Any, Coder] = {}  # of what servers answer in code
        self.outstanding: list[tuple[Peer, Reply]] = []  # answers that a strategy has not waited for yet
        self.levels: dict[str, Level] = {}  # where two strategies share it, what each remembers
        self.parameters = self.layout.vectors(untouched if sparse else empty)
        self.gradient = self.layout.vectors(untouched if sparse else empty)
        self.present = empty(len(self.layout.pieces), torch.float32, torch.device("cpu"))
        self.present.zero_()
        for vector in () if sparse else self.gradient:
            vector.zero_()
        self._empty = empty
        self._views = [self.layout.view(self.gradient, piece) for piece in self.layout.pieces]
        for parameter, piece in zip(self.layout.parameters, self.layout.pieces, strict=True):
            place = self.layout.view(self.parameters, piece)
            place.copy_(parameter.detach())
            parameter.data = place
        self._sparse = sparse
        self._rows: dict[int, Tensor] = {}  # the sparse gradients that are there now, by parameter
        self._summed = () if sparse else self.gradient  # what else there may be of a gradient
        self._optimizer_step = optimizer.step
        self._has: list[bool] = [False] * len(self._views)
        self._sums: list[Tensor] = []
        self._scale, self._before = 1.0, tuple[Tensor, ...]()
        self.touched: dict[int, None] = {}  # the parameters that a backward pass has reached, in order
        self.begun = 0  # how many buckets' exchanges this backward pass has begun
        self._early = False  # whether buckets of this pass are handed on before it has ended
        self._begin: Callable[[Bucket], None] | None = None
        self._bucket_of: list[int] = []
        self._lock = threading.Lock()
        self._accumulators: list[Any] = []
        self.arrange(reversed(range(len(self._views))))
        for index, parameter in enumerate(self.layout.parameters):
            if parameter.requires_grad:
                self._watch(index, parameter)
        self._shown: nn.Module | None = None
        self.moments = Moments(self.layout, optimizer, self.buffers, empty)

    def move(self, vectors: Sequence[Tensor]) -> None:
        """From here on the parameters are these vectors, with the values that they have."""
        self.parameters = tuple(vectors)
        for parameter, piece in zip(self.layout.parameters, self.layout.pieces, strict=True):
            parameter.data = self.layout.view(self.parameters, piece)

    # --- the gradient -------------------------------------------------------------------------------

    def arrange(self, order: Iterable[int]) -> None:
        """Makes the buckets for gradients that become ready in this order."""
        self.buckets = arrange(self.layout, self.gradient, list(order))
        owners = {index: place for place, bucket in enumerate(self.buckets) for index in bucket.indexes}
        self._bucket_of = [owners[index] for index in range(len(self._views))]

    def _watch(self, index: int, parameter: Tensor) -> None:
        """Has `_touch` called when backward has done with a parameter's gradient.

        And so have the script's own hooks, whenever they came: those of a node come after its tensor's.
        """
        with torch.enable_grad():
            accumulate: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulate.register_hook(lambda *_: self._touch(index, parameter))
        self._accumulators.append(accumulate)  # they live as long as somebody has them

    def _touch(self, index: int, parameter: Tensor) -> None:
        """A gradient is complete; a bucket that it completes is handed on, after those before it."""
        with self._lock:  # parameters on several devices have a thread each
            if self._bucket_of[index] < self.begun:
                raise UsageError(
                    f"the gradient of {self.layout.pieces[index].name} was completed twice in one backward "
                    "pass: use torch.utils.checkpoint with use_reentrant=False"
                )
            self.touched[index] = None
            if self._begin is None:
                return
            with torch.no_grad():
                self._take(index, parameter)
                self.buckets[self._bucket_of[index]].missing.discard(index)
                while self.begun < len(self.buckets) and not self.buckets[self.begun].missing:
                    self.hand_on(self._begin)

    def hand_on(self, begin: Callable[[Bucket], None]) -> None:
        """Hands the next bucket on, for its exchange to begin."""
        bucket = self.buckets[self.begun]
        if self._early:  # while it is in the cache; otherwise `after_backward` has done it
            sums = [part.sum() for part in bucket.gradient]
            self._sums = [*self._sums, *sums] if self.begun else sums
        self.begun += 1
        begin(bucket)

    def wait_for_the_end(self) -> None:
        """From here on nothing is handed on before this backward pass has ended."""
        self._begin = None

    def give_up(self, begin: Callable[[Bucket], None]) -> bool:
        """A backward pass has failed. If others have got parts of its gradient, they get the rest too, for
        they wait for it, and are told by NaN in `present` what it is worth. False if they have not."""
        begun = self.begun
        if begun == len(self.buckets):
            raise PolyrhythmError(
                "a backward pass failed when its gradient had been exchanged: the others take this step"
            )
        if begun:
            self.present.fill_(math.nan)
            while self.begun < len(self.buckets):
                self.hand_on(begin)
        return begun > 0

    def recover(self) -> None:
        """What the failed pass and others have left is no gradient of anybody's."""
        for index, parameter in enumerate(self.layout.parameters):
            self._has[index], parameter.grad = False, None
        for vector in (*self.gradient, self.present):
            vector.zero_()
        self.begun, self._begin, self._early = 0, None, False

    def _take(self, index: int, parameter: Tensor) -> None:
        """Brings one gradient into the flat vector."""
        gradient, view = parameter.grad, self._views[index]
        if gradient is not None and gradient is not view:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = view
        if not self._has[index]:
            self._has[index] = True
            self.present[index] = 1.0

    def scale(self, factor: float) -> None:
        """From here on a new gradient counts this much: a fair share of the examples counts 1."""
        self._scale = factor

    @property
    def scaling(self) -> float:
        """How much a new gradient counts now."""
        return self._scale

    @property
    def counts(self) -> bool:
        """Whether the present batch counts; one that is borrowed does not."""
        return self._scale != 0

    def before_backward(self, begin: Callable[[Bucket], None] | None = None) -> None:
        """Keeps what was accumulated so far, if what is added now has to be scaled.

        With `begin` buckets are handed on as they are completed; not if they are still to be scaled.
        """
        self.touched, self.begun = {}, 0
        self._begin = begin if self._scale == 1 else None
        self._early = self._begin is not None
        if self._early:
            for bucket in self.buckets:
                bucket.missing = set(bucket.indexes)
        if self._scale != 1:
            self.gather()
            self._before = tuple(vector.clone() for vector in self.gradient)

    def before_anything(self) -> None:
        """Nothing was accumulated before what `.grad` holds now."""
        self.begun, self._begin, self._early = 0, None, False
        self._before = tuple(torch.zeros_like(vector) for vector in self.gradient) if self._scale != 1 else ()

    def after_backward(self) -> None:
        """Brings the new gradient into the flat vector, scaled, and sums it up: NaN stays in a sum."""
        self.gather()
        if self._scale != 1:
            for vector, before in zip(self.gradient, self._before, strict=True):
                vector.sub_(before).mul_(self._scale).add_(before) if self._scale else vector.copy_(before)
        if not self._early:
            self._sums = [part.sum() for part in self._summed]
            self._sums += [gradient._values().sum() for gradient in self._rows.values()]

    def gather(self) -> bool:
        """Brings what backward left in `.grad` into the flat gradient; False if nothing has a gradient."""
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
                found.append(gradient.to_dense() if gradient.is_sparse else gradient)
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
            self._summed = tuple(self.gradient[part][start:stop] for _, part, start, stop in spans)
        self._rows = rows
        return any(self._has)

    def revive(self) -> None:
        """A parameter that nobody has a gradient for now may still get what was not sent before."""
        for index in (self.present == 0).nonzero().flatten().tolist():
            if bool(self._views[index].any()):
                self.present[index] = 1.0

    def bind(self) -> None:
        """Shows the flat gradient in `.grad` again, after others may have added to it."""
        flags = self.present.tolist()
        if flags == self._has:  # as whole as before
            self.begun, self._begin, self._early = 0, None, False
            return
        if any(math.isnan(present) for present in flags):
            raise PolyrhythmError(
                "a backward pass has failed on another worker, whose script went on: a gradient is missing"
            )
        for index, present in enumerate(flags):
            has = present > 0
            if has != self._has[index]:
                self._has[index] = has
                self.layout.parameters[index].grad = self._views[index] if has else None
        self.present.copy_(self.present > 0)  # whole again, for the next mean
        self.begun, self._begin, self._early = 0, None, False

    def check_finite(self, worker: object, step: int | None = None) -> None:
        """Raises `NotFinite` if this worker's gradient was not finite; the step must not be taken."""
        if not all(math.isfinite(float(total)) for total in self._sums):
            # The sum of large finite numbers may overflow too: look at each before saying so.
            found = {**dict(enumerate(self._views)), **{i: rows._values() for i, rows in self._rows.items()}}
            names = [piece.name for piece in self.layout.pieces]
            layers = [names[index] for index, part in found.items() if not bool(torch.isfinite(part).all())]
            if not layers:
                return
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            raise NotFinite(
                f"{worker}: the gradient of {layers[0]}{more} at step {step or self.steps} is not finite "
                "(the loss is NaN or infinite): lower the learning rate, clip gradients, or look at the data "
                "of that step"
            )

    @property
    def absent(self) -> list[int]:
        """The indexes of the parameter tensors that have no gradient now."""
        return [index for index, has in enumerate(self._has) if not has]

    # --- the step -----------------------------------------------------------------------------------

    def apply(self) -> None:
        """Runs the user's own optimizer on the gradient."""
        before = self.clock()
        self._optimizer_step()
        self.applying += self.clock() - before

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
                for name, shape in names:
                    value = next(queue)
                    if shape is not None:
                        entry[name] = value.clone().reshape(shape)
                        continue
                    place = entry.setdefault(name, torch.empty_like(parameter, dtype=value.dtype))
                    place.view(-1)[low:high].copy_(value)
        for index, entry in whole.items():
            self.optimizer.state[self.layout.parameters[index]] = entry

    # --- what it remembers --------------------------------------------------------------------------

    def buffer(self, name: str, exact: bool = False) -> tuple[Tensor, ...]:
        """Persistent flat vectors of the layout by name, zero at first: a residual, a momentum, a copy.

        `exact`: in at least 32 bits.
        """
        if name not in self.buffers:
            self.buffers[name] = self.layout.vectors(self._empty, exact)
            for vector in self.buffers[name]:
                vector.zero_()
        return self.buffers[name]

    @property
    def owed(self) -> tuple[Tensor, ...]:
        """What a codec has not sent yet of what this worker wanted to send."""
        return self.buffer(f"{SENT}residual", exact=True)

    def memory(self, names: Sequence[str]) -> dict[str, Any]:
        """What is saved of it: buffers and notes of these names, and all that codecs remember."""
        kept = [name for name in self.buffers if name in names or name.startswith(SENT)]
        return {
            "layout": self.layout.hash,
            "buffers": {name: [part.clone() for part in self.buffers[name]] for name in kept},
            "notes": {name: self.notes[name] for name in names if name in self.notes},
            "codecs": copy.deepcopy(self.notes.get("codecs", {})),
            "rates": list(self.notes.get("rates of residuals", ())),
            "levels": {name: level.memory(level.remembers) for name, level in self.levels.items()},
        }

    def remember(self, saved: dict[str, Any]) -> None:
        """Takes back what `memory` gave."""
        if saved["layout"] != self.layout.hash:
            raise UsageError("this state was saved with another model, or with other parameter groups")
        for name, parts in saved["buffers"].items():
            for place, part in zip(self.buffer(name, exact=name.startswith(SENT)), parts, strict=True):
                place.copy_(part)
        self.notes.update(saved["notes"])
        self.notes["codecs"] = copy.deepcopy(saved["codecs"])
        self.senders.clear()  # they look at the notes that were there before
        if saved["rates"]:
            self.notes["rates of residuals"] = list(saved["rates"])
        for name, level in self.levels.items():
            level.remember(saved["levels"][name])

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
