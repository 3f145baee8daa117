"""StageRunner: runs the segments of one place of a model that several workers hold together (GPipe).

The script calls the model as before, on every worker of it. A forward pass cuts the batch into micro-batches
and streams them through the segments; then every worker gets the true output of the whole model, so loss,
metrics and control flow are the same on all. A backward pass streams the gradients of the micro-batches back,
through the segments in reverse order. One autograd function is both: to autograd the model is a single
operation on the parameters of this place. Sends never wait, and segments are in an order in which all of
them can run, so no two places wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.micro_batches import (
    GradientSums,
    MicroBatchOf,
    Values,
    added,
    cut_gradient,
    joined_gradient,
    joined_output,
    micro_batches,
)
from polyrhythm.parallel.place_plan import PlacePlan, SegmentPlan
from polyrhythm.parallel.stage_messages import Computation, StageMessages
from polyrhythm.parallel.weight_gradients import WeightGradients


@dataclass
class Tied:
    """Parameters that several places use. One of them owns each; the others have copies."""

    lent: Mapping[int, dict[str, nn.Parameter]]  # by other place: what it borrows
    borrowed: Mapping[int, dict[str, nn.Parameter]]  # by owning place: the copies here
    # Places that compute the same gradients as the owner of what they borrow, and do not return them.
    silent: frozenset[int] = frozenset()


class StageRunner:
    """Runs the segments of one place of a divided model."""

    def __init__(
        self,
        place: int,
        link: StageMessages,
        micro_batches: int,
        recompute: bool,
        parameters: Sequence[nn.Parameter],
        tied: Tied,
        later: WeightGradients,
    ) -> None:
        """`parameters`: those that this place owns, and its copies of those that it borrows."""
        self.place, self.link, self._recompute = place, link, recompute
        self._micro_batches = micro_batches
        self._parameters, self.tied, self.later = list(parameters), tied, later
        self._anchor = torch.zeros((), requires_grad=True)  # a place may have no parameter to train
        self.passes = itertools.count()

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters here that have gradients, copies included."""
        return [each for each in self._parameters if each.requires_grad]

    def __call__(self, plan: PlacePlan, inputs: Values, batched: Sequence[str]) -> Any:
        """The output of the whole model for these inputs, by name. All workers of the model call this.

        `batched`: the inputs that have a row for each example.
        """
        trained = self.trained
        leaves = [name for name, each in inputs.items() if isinstance(each, Tensor) and each.requires_grad]
        pieces = micro_batches(inputs, batched, self._micro_batches)
        one = Pass(self, plan, next(self.passes), pieces, batched, leaves, trained)
        if torch.is_grad_enabled():
            given = [inputs[name] for name in leaves]
            found = _Differentiable.apply(one, self._anchor, *given, *trained)  # type: ignore[no-untyped-call]
        else:
            found = one.forward(keep=False)
        return plan.build({**inputs, **one.plain, **dict(zip(one.names, found, strict=True))})

    def begin(
        self, plan: PlacePlan, inputs: Values, batched: Sequence[str], tied: bool = True
    ) -> Callable[[], Any]:
        """Runs this place on a whole batch, without gradients. The returned function waits for the output.

        Other batches may be begun meanwhile. Not `tied`: no parameter has changed since the last batch.
        """
        one = Pass(self, plan, next(self.passes), micro_batches(inputs, batched, 1), batched, [], [])
        mine = one.send_output(one.run_place(keep=False, tied=tied))

        def wait() -> Any:
            found = one.collect(mine)
            return plan.build({**inputs, **one.plain, **dict(zip(one.names, found, strict=True))})

        return wait

    def run(self, function: Callable[..., Sequence[Any]], given: Sequence[Any], keep: bool) -> Sequence[Any]:
        """Runs the function of a segment on one micro-batch."""
        with torch.set_grad_enabled(keep):
            if keep and self._recompute:
                return checkpoint(function, *given, use_reentrant=False)  # type: ignore[no-any-return]
            return function(*given)


class Pass:
    """One forward pass of the model and its backward pass, as this place sees them."""

    def __init__(
        self,
        runner: StageRunner,
        plan: PlacePlan,
        number: int,
        micro_batches: list[MicroBatchOf],
        batched: Sequence[str],
        leaves: list[str],
        trained: list[nn.Parameter],
    ) -> None:
        self.runner, self._plan, self._number = runner, plan, number
        self._micro_batches, self._batched = micro_batches, batched
        self._leaves, self._trained = leaves, trained
        self._sizes = [each.rows for each in micro_batches]
        self._totals = GradientSums(len(trained))
        # By micro-batch and segment: inputs and outputs, as far as they have gradients.
        self._saved: dict[tuple[int, int], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        self.names: list[str] = []  # of the tensors of the output
        self.plain: Values = {}  # values of the output that are no tensors

    def kind(self, what: str, micro_batch: int = 0, segment: int = 0) -> str:
        return f"{what} {self._number}.{micro_batch}.{segment}"

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, keep: bool) -> list[Tensor]:
        """Streams the micro-batches through this place. Returns the tensors of the model's output."""
        return self.collect(self.send_output(self.run_place(keep)))

    def run_place(self, keep: bool, tied: bool = True) -> list[Values]:
        """Streams the micro-batches through this place. Returns what it has of the output of each."""
        own: list[Values] = []
        if tied:
            self.exchange_tied()
        mine = self._plan.results.get(self.runner.place, ())
        for number in range(len(self._micro_batches)):
            known = self.forward_one(number, keep)
            own.append({name: _detached(known[name]) for name in mine})
        return own

    def forward_one(self, number: int, keep: bool) -> Values:
        """Runs this place on one micro-batch. Returns all values of it that are known here then."""
        known = dict(self._micro_batches[number].values)
        for name in self._leaves if keep else ():
            known[name] = known[name].detach().requires_grad_()
        for segment in self._plan.segments:
            self.forward_segment(number, segment, known, keep)
        return known

    def function_of(self, segment: SegmentPlan) -> Callable[..., Sequence[Any]]:
        """What a segment computes."""
        return segment.run

    def forward_segment(self, number: int, segment: SegmentPlan, known: Values, keep: bool) -> None:
        """Runs a segment on one micro-batch, and adds what it computes to the values that are known here.

        `keep`: there will be a backward pass.
        """
        link = self.runner.link
        for source, (place, _) in segment.sources.items():
            known.update(link.receive(place, self.kind("forward", number, source)))
        wanted = {name: known[name] for name in segment.inputs if _differentiable(known[name])}
        with link.compute(Computation("forward", segment.number, number), len(self._sizes)):
            given = [known[name] for name in segment.inputs]
            made = self.runner.run(self.function_of(segment), given, keep)
            outputs = dict(zip(segment.outputs, made, strict=True))
        for sink, names in segment.sinks.items():
            kind = self.kind("forward", number, segment.number)
            link.send(sink, kind, {name: outputs[name] for name in names})
        # A later segment begins a graph of its own, as at another place.
        known.update({name: _leaf(each) for name, each in outputs.items()})
        if keep:
            trained = {name: each for name, each in outputs.items() if _differentiable(each)}
            self._saved[number, segment.number] = wanted, trained

    def send_output(self, own: list[Values]) -> Values:
        """Sends what this place has of the model's output to the others; returns it."""
        runner, mine = self.runner, {}
        if (names := self._plan.results.get(runner.place)) is not None:
            mine = {name: joined_output([each[name] for each in own], self._sizes) for name in names}
            runner.link.send_all(self.kind("output"), mine)
        return mine

    def collect(self, mine: Values) -> list[Tensor]:
        """The output of the model: what this place has of it, and what the others have."""
        runner, whole = self.runner, dict(mine)
        for place in self._plan.results:
            if place != runner.place:
                whole.update(runner.link.receive(place, self.kind("output")))
        self.names = [name for name, each in whole.items() if isinstance(each, Tensor)]
        self.plain = {name: each for name, each in whole.items() if not isinstance(each, Tensor)}
        return [whole[name] for name in self.names]

    def exchange_tied(self) -> None:
        """Brings the copies of borrowed parameters up to date."""
        kind, tied = self.kind("tied"), self.runner.tied
        for place, lent in tied.lent.items():
            self.runner.link.send(place, kind, {name: each.detach() for name, each in lent.items()})
        with torch.no_grad():
            for place, copies in tied.borrowed.items():
                for name, each in self.runner.link.receive(place, kind).items():
                    if not torch.equal(copies[name], each):
                        copies[name].data.copy_(each)  # it may be saved for a backward pass

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Streams the gradients back. Returns those of the model's inputs, and of the parameters here."""
        mine = self._plan.results.get(self.runner.place, ())
        cut = {
            name: cut_gradient(each, self._sizes)
            for name, each in zip(self.names, gradients, strict=True)
            if name in mine and each is not None
        }
        inputs: dict[str, list[Tensor | None]] = {name: [] for name in self._leaves}
        for number in range(len(self._sizes)):
            arriving = {name: [pieces[number]] for name, pieces in cut.items()}
            self.backward_one(number, arriving)
            for name in self._leaves:
                inputs[name].append(added(arriving[name]) if name in arriving else None)
        return self._input_gradients(inputs), self.sums()

    def backward_one(self, number: int, arriving: dict[str, list[Tensor]]) -> None:
        """Brings the gradients of one micro-batch back through this place.

        `arriving`: the gradients of a value, from all that use it here.
        """
        for segment in reversed(self._plan.segments):
            self.backward_segment(number, segment, arriving)

    @property
    def differentiated(self) -> Sequence[Tensor]:
        """The tensors with the values of the parameters that the forward pass has used."""
        return self._trained

    def sums(self) -> list[Tensor | None]:
        """The gradients of the parameters here, when those of all micro-batches are known."""
        self._return_tied()
        return self._totals.sums

    def backward_segment(
        self, number: int, segment: SegmentPlan, arriving: dict[str, list[Tensor]], apart: bool = False
    ) -> None:
        """Brings the gradients of a segment's outputs to its inputs and to the parameters of this place.

        `apart`: weight gradients that can be computed later are left in `runner.later`.
        """
        link = self.runner.link
        wanted, outputs = self._saved.pop((number, segment.number))  # frees the activations
        for sink in segment.sinks:
            for name, piece in link.receive(sink, self.kind("backward", number, segment.number)).items():
                arriving.setdefault(name, []).append(piece)
        reached = [name for name in outputs if name in arriving]
        found: list[Tensor | None] = [None] * (len(wanted) + len(self._trained))

        def differentiate() -> None:
            found[:] = torch.autograd.grad(
                [outputs[name] for name in reached],
                [*wanted.values(), *self.differentiated],
                [added(arriving.pop(name)) for name in reached],
                allow_unused=True,
            )

        done = Computation("backward", segment.number, number)
        with link.compute(done, len(self._sizes)):
            if reached:
                link.run_backward(differentiate)
            if apart and self.runner.later:
                done.kind = "input"
        for name, gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                arriving.setdefault(name, []).append(gradient)
        for source, (place, names) in segment.sources.items():
            sent = {name: added(arriving.pop(name)) for name in names if name in arriving}
            link.send(place, self.kind("backward", number, source), sent)
        for parameter, gradient in enumerate(found[len(wanted) :]):
            self._totals.add(parameter, gradient)
        if self.runner.later and not apart:
            with link.weights(segment.number, number):
                self.runner.later.take().add_to(self._totals, self.differentiated)

    def _input_gradients(self, inputs: Mapping[str, Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of the model's inputs. Several places may use one."""
        parts = [each.values for each in self._micro_batches]
        mine = [
            joined_gradient(inputs[name], [each[name] for each in parts], name in self._batched)
            for name in self._leaves
        ]
        if mine:
            self.runner.link.sum(*mine)
        return list(mine)

    def _return_tied(self) -> None:
        """Adds the gradients of parameters that other places have borrowed, and returns those of copies."""
        kind, tied, totals = self.kind("tied gradient"), self.runner.tied, self._totals
        number = {id(each): number for number, each in enumerate(self._trained)}
        for place, copies in tied.borrowed.items():
            found = {
                name: totals.take(number[id(each)]) for name, each in copies.items() if id(each) in number
            }
            known = {name: each for name, each in found.items() if each is not None}
            if place not in tied.silent:
                self.runner.link.send(place, kind, known)
        for place, lent in tied.lent.items():
            if place in tied.silent:
                continue
            for name, gradient in self.runner.link.receive(place, kind).items():
                if id(lent[name]) in number:
                    totals.add(number[id(lent[name])], gradient)


class _Differentiable(torch.autograd.Function):
    """A pass through the whole model as one operation of autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, one: Pass, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.one = one  # type: ignore[attr-defined]
        found = one.forward(keep=True)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a divided model cannot be differentiated twice: leave out create_graph=True, or train the "
                "model whole, as by allreduce"
            )
        if ctx.one is None:
            raise UsageError(
                "backward() went through a divided model a second time: call the model again, or add the "
                "losses and call backward() once"
            )
        inputs, parameters = ctx.one.backward(gradients)
        ctx.one = None
        return None, None, *inputs, *parameters


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _leaf(value: Any) -> Any:
    """A value without its history; it requires a gradient if it did."""
    return value.detach().requires_grad_() if _differentiable(value) else _detached(value)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
