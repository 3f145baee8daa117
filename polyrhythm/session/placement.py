"""Placement: whether the models of a session are whole on each worker, or divided over several.

This module has the session's side of it: which nodes agree on what, and what changes for the script. A
`DividedModel` is one worker's part of a model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.core.address_space import address_space
from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.core.requests import ShowNote
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import joined
from polyrhythm.model.spilled import SpilledParameters
from polyrhythm.parallel.example import Call, example_batch, given_call, model_inputs
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.batch_norm.policies import tracking
from polyrhythm.session.context import WorldContext
from polyrhythm.session.divided_model import DividedModel
from polyrhythm.session.exchange import Exchange
from polyrhythm.session.meter import Meter
from polyrhythm.session.model_context import ModelContext, receive_from
from polyrhythm.session.model_division import ModelDivision
from polyrhythm.session.part import TrainingPart, scoped
from polyrhythm.session.places import script_call
from polyrhythm.session.prediction.models import Predictor, WholeModel
from polyrhythm.session.result_parts import ResultParts
from polyrhythm.session.scheduled import ScheduledTraining, check_scheduled, scheduled_training

_MICRO_BATCHES = (
    "the model has BatchNorm, and under {strategy} it normalizes each micro-batch by itself: its statistics "
    "are of fewer rows than in the undivided model; with micro_batches=1 batches stay whole"
)

_WORTH_COLLECTING = 1 << 24  # bytes; a collection takes half a second, and Python makes one by itself later


class Served(NamedTuple):
    """A part that a server serves: the node as it sees it, and what is trained."""

    node: Node
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Placement:
    """Each worker holds whole models."""

    divided = False
    leads = True  # this worker acts for all that hold one model together

    def plan(self, given: Arguments) -> None:
        """Called in `prepare` on every node: decides which part of the model is where."""

    def begin(self, seed: int) -> None:
        """Called on every worker after `plan`: it keeps its own part of the model."""

    def on_server(self, node: Node, given: Arguments) -> Sequence[Served]:
        """The parts that a server serves."""
        nodes, model = scoped(node, len(given.optimizers)), joined(given.models)
        return [Served(each, model, one) for each, one in zip(nodes, given.optimizers, strict=True)]

    def measured_by(self, meter: Meter) -> bool:
        """True if workers wait for each other inside forward and backward passes, which this meter counts."""
        return False

    def norm(self, norm: Tensor, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """The norm of the gradients of a whole model, from the norm of those here."""
        return norm

    def scheduled(self, part: TrainingPart) -> ScheduledTraining | None:
        """How `session.backward` trains the part, if that is not what a script would do."""
        return None

    def settle(self) -> None:
        """Called after the last step, before the leader of a model leaves: waits for its other workers."""

    def complete(self, models: Sequence[nn.Module]) -> None:
        """Makes copies of the models whole."""

    def predictor(self, context: WorldContext, model: nn.Module) -> Predictor:
        """Predicts by a copy of the model: of a divided one, by a copy of the part of this worker."""
        return WholeModel(model, context)

    def send_parts(self, result: nn.Module) -> Tensor:
        """Sends this worker's part of the result of a divided model; returns the places of all parameters."""
        raise NotImplementedError("the model is not divided")

    def refuse(self, what: str) -> None:
        """Raises UsageError if something is not possible with parts of a model."""


class DividedPlacement(Placement):
    """Several workers hold one model together."""

    divided = True

    def __init__(
        self, context: ModelContext, strategy: Strategy, batch_norm: str, exchange: Exchange
    ) -> None:
        self._context, self._strategy, self._batch_norm = context, strategy, batch_norm
        self._exchange = exchange
        self.leads = context.leads
        self._division: ModelDivision | None = None
        self._model: DividedModel | None = None
        self._spilled = spilled_parameters(context, strategy)

    def plan(self, given: Arguments) -> None:
        if self._spilled is not None:
            self._spilled.stop()
        if tracking(joined(given.models)) and self._batch_norm in ("sync", "recompute"):
            raise UsageError(
                f"batch_norm={self._batch_norm} runs the layers of a whole model, and {self._strategy} "
                "divides it: use batch_norm=rank0, mean or local"
            )
        check_scheduled(self._strategy, given, self._context.plan.workers)
        if tracking(joined(given.models)) and any(each.micro_batches > 1 for each in self._strategy.splits):
            self._context.request(ShowNote(_MICRO_BATCHES.format(strategy=self._strategy)))
        self._division = ModelDivision(
            self._strategy.splits, given, _example(given), self._decide, self._context.place
        )
        if self._division.doubt:
            self._context.request(ShowNote(self._division.doubt))

    def _decide(self, choose: Callable[[], list[int]], captured: str) -> list[int]:
        """Lets worker 0 choose for all nodes, which have captured the same operations."""
        me = self._context.me
        decides = me.role == "worker" and me.rank == 0
        call = script_call("session.prepare()", anywhere=True)
        found = self._exchange.gather([choose() if decides else [], captured], call)
        chosen, theirs = found[0]
        if theirs != captured:
            raise UsageError(
                f"{me} and worker 0 capture different operations of the model: all must build the same "
                "model, with the same version of torch"
            )
        return list(chosen)

    def begin(self, seed: int) -> None:
        assert self._division is not None
        model = self._division.model
        parameters = dict(model.named_parameters())
        self._model, self._division = DividedModel(self._context, self._division, seed), None
        if _missing(model) > _WORTH_COLLECTING:
            gc.collect()  # graphs refer to themselves, and to the tensors of other workers
        if self._spilled is not None:
            self._spilled.close(each for name, each in parameters.items() if name not in self._model.held)

    def on_server(self, node: Node, given: Arguments) -> Sequence[Served]:
        assert self._division is not None
        if self._spilled is not None:
            self._spilled.close(())
        return [
            Served(self._context.node_at(place), *self._division.on_server(place))
            for place in range(self._context.size)
        ]

    def measured_by(self, meter: Meter) -> bool:
        assert self._model is not None
        self._model.link.meter = meter
        return True

    def norm(self, norm: Tensor, gradients: Sequence[Tensor], kind: float) -> Tensor:
        if self._model is None or not self._model.has(gradients):
            return norm
        if any(each.asynchronous for each in self._strategy.splits):
            raise UsageError(
                f"under {self._strategy} the stages have gradients of different batches, so there is no norm "
                "of all of them: leave out clip_grad_norm_, or use schedule=1f1b"
            )
        return self._model.link.norm(norm, kind)

    def scheduled(self, part: TrainingPart) -> ScheduledTraining | None:
        assert self._model is not None
        return scheduled_training(self._model, self._strategy.splits, part)

    def settle(self) -> None:
        node, [leader, *others] = self._context.worker_node, self._context.model
        if not self.leads:
            node.send(leader, f"finished {self._context.place}")
        for place, other in enumerate(others, 1) if self.leads else ():
            receive_from(node, other, f"finished {place}")

    def complete(self, models: Sequence[nn.Module]) -> None:
        assert self._model is not None
        if not _room(missing := _missing(models[0])):
            raise UsageError(
                f"session.consensus() is the whole model on every worker, and {missing >> 20} MiB more do "
                "not fit this one: raise the limit of its memory, or evaluate model(x) on all workers instead"
            )
        self._model.complete(models[0])

    def predictor(self, context: WorldContext, model: nn.Module) -> Predictor:
        assert self._model is not None
        return self._model.predictor(model)

    def send_parts(self, result: nn.Module) -> Tensor:
        assert self._model is not None
        parts = ResultParts(result, self._model.owns, self._model.shares)
        for part, tensors in parts.messages(header=self.leads):
            self._context.send_result_part(part, tensors)
        self.settle()  # until the parts of all have arrived
        return parts.order

    def refuse(self, what: str) -> None:
        raise UsageError(
            f"{what} is not supported where a model is divided: save session.consensus().state_dict() by "
            "session.save(), and load it into the model before session.prepare()"
        )


def spilled_parameters(context: ModelContext, strategy: Strategy) -> SpilledParameters | None:
    """Keeps parameters in a file until `prepare`, if memory is limited or the strategy asks for it."""
    wanted = address_space() is not None or any(each.spill for each in strategy.splits)
    if not wanted or not context.processes:
        return None
    spilled = SpilledParameters()
    spilled.start()
    return spilled


def _room(nbytes: int) -> bool:
    """True if so many bytes more fit this process."""
    try:
        torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def _missing(model: nn.Module) -> int:
    """The bytes of the tensors of a model that have no data here."""
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if each.is_meta)


def _example(given: Arguments) -> Call:
    """A call of the model: what the script gave as an example, or from the first batch of its loader."""
    if given.example is not None:
        return given_call(given.example)
    if not given.loaders:
        raise UsageError(
            "a model that is divided needs an example of its inputs, and no loader was given: pass it as in "
            "session.prepare(model, optimizer, example=(x,))"
        )
    return model_inputs(given.models[0], example_batch(given.loaders[0]))


def placement(context: WorldContext, strategy: Strategy, batch_norm: str, exchange: Exchange) -> Placement:
    """How the models of a session are divided under a strategy."""
    if isinstance(context, ModelContext):
        return DividedPlacement(context, strategy, batch_norm, exchange)
    return Placement()
