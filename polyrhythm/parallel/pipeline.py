"""StageRunner: runs one stage of a model whose stages are on different workers (GPipe).

The script calls the model as before, on every worker of it. A forward pass cuts the batch into micro-batches
and streams them through the stages; then every worker gets the true output of the whole model, so loss,
metrics and control flow are the same on all. A backward pass streams the gradients of the micro-batches back.
One autograd function is both: to autograd the model is a single operation on the parameters of this stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from polyrhythm.core.errors import UsageError

Values = dict[str, Any]  # by name: tensors, and plain numbers such as sizes


class StageMessages(Protocol):
    """The messages between the stages of one model."""

    def send(self, to: int, kind: str, values: Mapping[str, Any]) -> None:
        """Sends values to another stage. They may be changed at once."""

    def send_all(self, kind: str, values: Mapping[str, Any]) -> None:
        """Sends values to all other stages."""

    def receive(self, sender: int, kind: str) -> Values:
        """Waits for the values that another stage sends under this kind.

        Those that require a gradient there require one here.
        """

    def sum(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over all stages, in place."""

    def compute(self, backward: bool, micro_batches: int) -> AbstractContextManager[None]:
        """A context for the computation of one of so many micro-batches in this stage."""


@dataclass(frozen=True)
class StagePlan:
    """What one stage has to know of one mode (training or evaluation) of the divided model."""

    run: Callable[..., Sequence[Any]]  # this stage
    inputs: tuple[str, ...]  # names of the values that it takes
    outputs: tuple[str, ...]  # names of the values that it computes and others need
    sources: Mapping[int, tuple[str, ...]]  # by earlier stage: the values that come from there
    sinks: Mapping[int, tuple[str, ...]]  # by later stage: the values that go there
    results: Mapping[int, tuple[str, ...]]  # by stage: the values of the model's output that it computes
    build: Callable[[Mapping[str, Any]], Any]  # makes the model's output from values


class MicroBatchOf(NamedTuple):
    """A part of a batch."""

    rows: int
    values: Values


@dataclass
class Tied:
    """Parameters that several stages use. The first one owns them; the others have copies."""

    lent: Mapping[int, dict[str, nn.Parameter]]  # by later stage: what it borrows
    borrowed: Mapping[int, dict[str, nn.Parameter]]  # by earlier stage: the copies here


class StageRunner:
    """Runs one stage of a divided model, as one of the workers that hold it."""

    def __init__(
        self,
        stage: int,
        link: StageMessages,
        micro_batches: int,
        recompute: bool,
        parameters: Sequence[nn.Parameter],
        tied: Tied,
    ) -> None:
        """`parameters`: those that this stage owns, and its copies of those that it borrows."""
        self.stage, self.link, self._recompute = stage, link, recompute
        self._micro_batches = micro_batches
        self._parameters, self.tied = list(parameters), tied
        self._anchor = torch.zeros((), requires_grad=True)  # a stage may have no parameter to train
        self._passes = itertools.count()

    def __call__(self, plan: StagePlan, inputs: Values, batched: Sequence[str]) -> Any:
        """The output of the whole model for these inputs, by name. All workers of the model call this.

        `batched`: the inputs that have a row for each example.
        """
        trained = [each for each in self._parameters if each.requires_grad]
        leaves = [name for name, each in inputs.items() if isinstance(each, Tensor) and each.requires_grad]
        pieces = self.micro_batches(inputs, batched)
        one = _Pass(self, plan, next(self._passes), pieces, batched, leaves, trained)
        if torch.is_grad_enabled():
            given = [inputs[name] for name in leaves]
            found = _Differentiable.apply(one, self._anchor, *given, *trained)  # type: ignore[no-untyped-call]
        else:
            found = one.forward(keep=False)
        return plan.build({**inputs, **one.plain, **dict(zip(one.names, found, strict=True))})

    def begin(
        self, plan: StagePlan, inputs: Values, batched: Sequence[str], tied: bool = True
    ) -> Callable[[], Any]:
        """Runs this stage on a whole batch, without gradients. The returned function waits for the output.

        Other batches may be begun meanwhile. Not `tied`: no parameter has changed since the last batch.
        """
        rows = len(inputs[batched[0]]) if batched else 1
        one = _Pass(self, plan, next(self._passes), [MicroBatchOf(rows, dict(inputs))], batched, [], [])
        mine = one.send_output(one.run_stage(keep=False, tied=tied))

        def wait() -> Any:
            found = one.collect(mine)
            return plan.build({**inputs, **one.plain, **dict(zip(one.names, found, strict=True))})

        return wait

    def micro_batches(self, inputs: Values, batched: Sequence[str]) -> list[MicroBatchOf]:
        """A batch cut along the first dimension of the inputs that have a row for each example."""
        count = len(inputs[batched[0]]) if batched else 1
        pieces = max(1, min(self._micro_batches, count))
        cut = {name: inputs[name].detach().tensor_split(pieces) for name in batched}
        sizes = [len(each) for each in cut[batched[0]]] if batched else [1]
        return [
            MicroBatchOf(sizes[number], {**inputs, **{name: each[number] for name, each in cut.items()}})
            for number in range(pieces)
        ]

    def run(self, plan: StagePlan, values: Values, keep: bool) -> Sequence[Any]:
        """Runs this stage on one micro-batch."""
        given = [values[name] for name in plan.inputs]
        with torch.set_grad_enabled(keep):
            if keep and self._recompute:
                return checkpoint(plan.run, *given, use_reentrant=False)  # type: ignore[no-any-return]
            return plan.run(*given)


class _Pass:
    """One forward pass of the model and its backward pass, as this stage sees them."""

    def __init__(
        self,
        runner: StageRunner,
        plan: StagePlan,
        number: int,
        micro_batches: list[MicroBatchOf],
        batched: Sequence[str],
        leaves: list[str],
        trained: list[nn.Parameter],
    ) -> None:
        self._runner, self._plan, self._number = runner, plan, number
        self._micro_batches, self._batched = micro_batches, batched
        self._leaves, self._trained = leaves, trained
        self._sizes = [each.rows for each in micro_batches]
        self._saved: list[tuple[Values, dict[str, Tensor]]] = []  # by micro-batch: inputs, and outputs
        self.names: list[str] = []  # of the tensors of the output
        self.plain: Values = {}  # values of the output that are no tensors

    def _kind(self, what: str, micro_batch: int) -> str:
        return f"{what} {self._number}.{micro_batch}"

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, keep: bool) -> list[Tensor]:
        """Streams the micro-batches through this stage. Returns the tensors of the model's output."""
        return self.collect(self.send_output(self.run_stage(keep)))

    def run_stage(self, keep: bool, tied: bool = True) -> list[Values]:
        """Streams the micro-batches through this stage. Returns what it has of the output of each."""
        runner, plan, link = self._runner, self._plan, self._runner.link
        if tied:
            self._exchange_tied()
        own: list[Values] = []
        for number, (_, values) in enumerate(self._micro_batches):
            kind = self._kind("forward", number)
            if keep:
                for name in self._leaves:
                    values[name] = values[name].detach().requires_grad_()
            received = {name: None for names in plan.sources.values() for name in names}
            for source in plan.sources:
                values.update(link.receive(source, kind))
            with link.compute(False, len(self._sizes)):
                outputs = dict(zip(plan.outputs, runner.run(plan, values, keep), strict=True))
            for sink, names in plan.sinks.items():
                link.send(sink, kind, {name: outputs[name] for name in names})
            own.append({name: _detached(outputs[name]) for name in plan.results.get(runner.stage, ())})
            if keep:
                wanted = {name: values[name] for name in (*received, *self._leaves)}
                kept = {name: each for name, each in outputs.items() if _differentiable(each)}
                self._saved.append((wanted, kept))
        return own

    def send_output(self, own: list[Values]) -> Values:
        """Sends what this stage has of the model's output to the others; returns it."""
        runner, mine = self._runner, {}
        if (names := self._plan.results.get(runner.stage)) is not None:
            mine = {name: _joined([each[name] for each in own], self._sizes) for name in names}
            runner.link.send_all(self._kind("output", 0), mine)
        return mine

    def collect(self, mine: Values) -> list[Tensor]:
        """The output of the model: what this stage has of it, and what the others have."""
        runner, whole = self._runner, dict(mine)
        for stage in self._plan.results:
            if stage != runner.stage:
                whole.update(runner.link.receive(stage, self._kind("output", 0)))
        self.names = [name for name, each in whole.items() if isinstance(each, Tensor)]
        self.plain = {name: each for name, each in whole.items() if not isinstance(each, Tensor)}
        return [whole[name] for name in self.names]

    def _exchange_tied(self) -> None:
        """Brings the copies of borrowed parameters up to date."""
        kind, tied = self._kind("tied", 0), self._runner.tied
        for stage, lent in tied.lent.items():
            self._runner.link.send(stage, kind, {name: each.detach() for name, each in lent.items()})
        with torch.no_grad():
            for stage, copies in tied.borrowed.items():
                for name, each in self._runner.link.receive(stage, kind).items():
                    if not torch.equal(copies[name], each):
                        copies[name].data.copy_(each)  # it may be saved for a backward pass

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Streams the gradients back. Returns those of the model's inputs, and of the parameters here."""
        runner, plan, link = self._runner, self._plan, self._runner.link
        cut = {
            name: [None] * len(self._sizes) if each is None else _cut(each, self._sizes)
            for name, each in zip(self.names, gradients, strict=True)
            if name in plan.results.get(runner.stage, ())
        }
        totals = _Totals(len(self._trained))
        inputs: dict[str, list[Tensor | None]] = {name: [] for name in self._leaves}
        for number, (wanted, outputs) in enumerate(self._saved):
            kind = self._kind("backward", number)
            arriving: dict[str, list[Tensor]] = {name: [] for name in outputs}
            for name, pieces in cut.items():
                if name in outputs and (piece := pieces[number]) is not None:
                    arriving[name].append(piece)
            for sink in plan.sinks:
                for name, piece in link.receive(sink, kind).items():
                    arriving[name].append(piece)
            reached = [name for name, pieces in arriving.items() if pieces]
            sources = [each for each in wanted.values() if isinstance(each, Tensor) and each.requires_grad]
            names = [name for name, each in wanted.items() if isinstance(each, Tensor) and each.requires_grad]
            with link.compute(True, len(self._saved)):
                found: list[Tensor | None] = [None] * (len(sources) + len(self._trained))
                if reached:
                    found = list(
                        torch.autograd.grad(
                            [outputs[name] for name in reached],
                            [*sources, *self._trained],
                            [_sum(arriving[name]) for name in reached],
                            allow_unused=True,
                        )
                    )
            by_name = dict(zip(names, found, strict=False))
            for source, those in plan.sources.items():
                sent = {name: by_name[name] for name in those if by_name.get(name) is not None}
                link.send(source, kind, sent)
            for name in self._leaves:
                inputs[name].append(by_name.get(name))
            for place, each in enumerate(found[len(sources) :]):
                totals.add(place, each)
            self._saved[number] = ({}, {})  # frees the activations
        self._return_tied(totals)
        return self._input_gradients(inputs), totals.sums

    def _input_gradients(self, inputs: Mapping[str, Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The gradients of the model's inputs. Several stages may use one."""
        parts = [each.values for each in self._micro_batches]
        mine = [
            _cat(inputs[name], [each[name] for each in parts], name in self._batched) for name in self._leaves
        ]
        if mine:
            self._runner.link.sum(*mine)
        return list(mine)

    def _return_tied(self, totals: _Totals) -> None:
        """Adds the gradients of parameters that other stages have borrowed, and returns those of copies."""
        kind, tied = self._kind("tied gradient", 0), self._runner.tied
        place = {id(each): number for number, each in enumerate(self._trained)}
        for stage, copies in tied.borrowed.items():
            found = {name: totals.take(place[id(each)]) for name, each in copies.items() if id(each) in place}
            known = {name: each for name, each in found.items() if each is not None}
            self._runner.link.send(stage, kind, known)
        for stage, lent in tied.lent.items():
            for name, gradient in self._runner.link.receive(stage, kind).items():
                if id(lent[name]) in place:
                    totals.add(place[id(lent[name])], gradient)


class _Differentiable(torch.autograd.Function):
    """A pass through the whole model as one operation of autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, one: _Pass, anchor: Tensor, *tensors: Tensor) -> Any:
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


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _joined(pieces: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output of the model from those of the micro-batches."""
    if len(pieces) == 1:
        return pieces[0]
    if all(
        isinstance(each, Tensor) and each.dim() and len(each) == rows
        for each, rows in zip(pieces, sizes, strict=True)
    ):
        return torch.cat(list(pieces))
    raise UsageError(
        "the model returns something else than a row for each example, which micro-batches cannot be joined "
        "to: compute a loss or a mean outside the model, or use pipeline:...,micro_batches=1"
    )


def _sum(pieces: Sequence[Tensor]) -> Tensor:
    total = pieces[0]
    for each in pieces[1:]:
        total = total + each
    return total


class _Totals:
    """Sums of gradients, in the order in which they are added."""

    def __init__(self, count: int) -> None:
        self.sums: list[Tensor | None] = [None] * count
        self._own = [False] * count  # the sum is a tensor that nothing else uses

    def add(self, place: int, gradient: Tensor | None) -> None:
        total = self.sums[place]
        if gradient is None:
            return
        if total is None:
            self.sums[place] = gradient  # autograd may return one tensor for two parameters
        elif self._own[place]:
            total.add_(gradient)
        else:
            self.sums[place], self._own[place] = total + gradient, True

    def take(self, place: int) -> Tensor | None:
        """Returns a sum, which is gone then."""
        total, self.sums[place] = self.sums[place], None
        return total


def _cut(gradient: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return torch.split(gradient, list(sizes)) if len(sizes) > 1 else [gradient]


def _cat(pieces: Sequence[Tensor | None], parts: Sequence[Tensor], batched: bool) -> Tensor:
    """The gradient of an input from those of its parts, or of all of it in each micro-batch."""
    known = [
        torch.zeros_like(part) if each is None else each for each, part in zip(pieces, parts, strict=True)
    ]
    return torch.cat(known) if batched else torch.stack(known).sum(0)
