"""Placement: whether the models of a session are whole on each worker, or divided over several.

This module has the session's side of it: which nodes agree on what, and what changes for the script. A
`DividedModel` is one worker's part of a model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.core.address_space import address_space
from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.core.place_node import receive_from
from polyrhythm.core.requests import ShowNote
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import joined
from polyrhythm.model.spilled import SpilledParameters
from polyrhythm.parallel.example import Call, example_batch, given_call, model_inputs
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.batch_norm.policies import tracking
from polyrhythm.session.context import WorldContext
from polyrhythm.session.divided_model import DividedModel
from polyrhythm.session.divided_optimizer import DividedOptimizer
from polyrhythm.session.exchange import Exchange
from polyrhythm.session.meter import Meter
from polyrhythm.session.model_context import ModelContext
from polyrhythm.session.model_division import ModelDivision
from polyrhythm.session.parameter_owners import ParameterOwners
from polyrhythm.session.part import TrainingPart, scoped
from polyrhythm.session.place_exchange import PlaceExchange
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

    def flush(self) -> None:
        """Makes all updates that are left in a pipeline."""

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

    def state_dict(self) -> dict[str, Any]:
        """What a worker has to save because it holds a part of a model."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from such a state."""


class DividedPlacement(Placement):
    """Several workers hold one model together."""

    divided = True

    def __init__(
        self, context: ModelContext, strategy: Strategy, batch_norm: str, exchange: Exchange
    ) -> None:
        self._context, self._strategy, self._batch_norm = context, strategy, batch_norm
        self._exchange = exchange
        self.leads = context.leads
        self._divisions: list[ModelDivision] = []
        self._owners: ParameterOwners | None = None
        self._given: Arguments | None = None
        self._models: list[DividedModel] = []
        self._whole = nn.Module()  # all of them, as the script has them
        self._scheduled: ScheduledTraining | None = None
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
        self._given = given
        for model, example in zip(given.models, _examples(given), strict=True):
            division = self._divided(model, example)
            self._divisions.append(division)
            if division.doubt:
                self._context.request(ShowNote(division.doubt))
        self._owners = ParameterOwners(joined(given.models), self._divisions, given.optimizers)

    def _divided(self, model: nn.Module, example: Call) -> ModelDivision:
        given, splits = self._given, self._strategy.splits
        assert given is not None
        try:
            return ModelDivision(splits, model, given, example, self._decide, self._context.place)
        except (UsageError, RuntimeError, TypeError) as error:
            if len(given.models) == 1 or given.example is not None:
                raise
            raise UsageError(
                f"{str(error).splitlines()[0]}; {type(model).__name__} got a batch of the loader: if it "
                "takes other inputs, pass example=[...] to session.prepare(), with those of each model"
            ) from error

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
        assert self._given is not None and self._owners is not None
        place, exchange, models = self._context.place, PlaceExchange(self._context), self._given.models
        for optimizer in self._given.optimizers:
            members = self._owners.members(optimizer, place)
            self._owners.keep(optimizer, place)
            DividedOptimizer(optimizer, members, exchange, self._before_saving)
        spilled: list[nn.Parameter] = []  # and not held by this worker
        for number, division in enumerate(self._divisions):
            parameters = dict(division.model.named_parameters())
            divided = DividedModel(self._context, division, seed, number, exchange)
            divided.before_saving = self._before_saving
            self._models.append(divided)
            spilled += [each for name, each in parameters.items() if name not in divided.held]
        self._divisions, self._owners, self._given, self._whole = [], None, None, joined(models)
        if _missing(self._whole) > _WORTH_COLLECTING:
            gc.collect()  # graphs refer to themselves, and to the tensors of other workers
        if self._spilled is not None:
            self._spilled.close(spilled)

    def _before_saving(self) -> None:
        """The script saves the state of a model or of an optimizer, and gets a whole one."""
        if not _room(missing := _missing(self._whole)):
            raise UsageError(
                f"state_dict() of a divided model is whole on every worker, and {missing >> 20} MiB more do "
                "not fit this one: raise the limit of its memory, or use the consensus.safetensors of the run"
            )
        self.flush()

    def flush(self) -> None:
        if self._scheduled is not None:
            self._scheduled.flush()

    def on_server(self, node: Node, given: Arguments) -> Sequence[Served]:
        owners = self._owners
        assert owners is not None
        if self._spilled is not None:
            self._spilled.close(())
        return [
            Served(part, *owners.on_server(optimizer, place))
            for place in range(self._context.size)
            for part, optimizer in zip(
                scoped(self._context.node_at(place), len(given.optimizers)), given.optimizers, strict=True
            )
        ]

    def measured_by(self, meter: Meter) -> bool:
        for model in self._models:
            model.link.meter = meter
        return True

    def norm(self, norm: Tensor, gradients: Sequence[Tensor], kind: float) -> Tensor:
        models = [model for model in self._models if model.has(gradients)]
        if not models:
            return norm
        if any(each.asynchronous for each in self._strategy.splits):
            raise UsageError(
                f"under {self._strategy} the stages have gradients of different batches, so there is no norm "
                "of all of them: leave out clip_grad_norm_, or use schedule=1f1b"
            )
        return models[0].link.norm(norm, kind)  # of the parts that all places have of these gradients

    def scheduled(self, part: TrainingPart) -> ScheduledTraining | None:
        self._scheduled = scheduled_training(self._models[0], self._strategy.splits, part)
        return self._scheduled

    def settle(self) -> None:
        node, [leader, *others] = self._context.worker_node, self._context.model
        if not self.leads:
            node.send(leader, f"finished {self._context.place}")
        for place, other in enumerate(others, 1) if self.leads else ():
            receive_from(node, other, f"finished {place}")

    def complete(self, models: Sequence[nn.Module]) -> None:
        if not _room(missing := _missing(joined(models))):
            raise UsageError(
                f"session.consensus() is the whole model on every worker, and {missing >> 20} MiB more do "
                "not fit this one: raise the limit of its memory, or evaluate model(x) on all workers instead"
            )
        for divided, model in zip(self._models, models, strict=True):
            divided.complete(model)

    def predictor(self, context: WorldContext, model: nn.Module) -> Predictor:
        return self._models[0].predictor(model)

    def send_parts(self, result: nn.Module) -> Tensor:
        several = len(self._models) > 1
        named = [(f"{number}." if several else "", model) for number, model in enumerate(self._models)]
        shares = {prefix + name: each for prefix, model in named for name, each in model.shares.items()}

        def owned(name: str) -> bool:
            return any(name.startswith(each) and model.owns(name.removeprefix(each)) for each, model in named)

        parts = ResultParts(result, owned, shares, self.leads)
        for part, tensors in parts.messages():
            self._context.send_result_part(part, tensors)
        self.settle()  # until the parts of all have arrived
        return parts.order

    def state_dict(self) -> dict[str, Any]:
        return {
            "place": self._context.place,
            "random": [model.link.random.state_dict() for model in self._models],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (place := state["place"]) != self._context.place:
            raise UsageError(
                f"this state was saved by worker {place} of a model, and this is its worker "
                f"{self._context.place}: each must load its own; use session.worker in the names of files, "
                "because session.rank is that of the model"
            )
        for model, each in zip(self._models, state["random"], strict=True):
            model.link.random.load_state_dict(each)


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


def _examples(given: Arguments) -> list[Call]:
    """A call of each model: what the script gave as an example, or from the first batch of its loader."""
    several = len(given.models) > 1
    if given.example is not None and several:
        if not isinstance(given.example, list) or len(given.example) != len(given.models):
            raise UsageError(
                f"session.prepare() got {len(given.models)} models to divide: pass example=[...] with an "
                "example of the inputs of each, in the same order"
            )
        return [given_call(each) for each in given.example]
    if given.example is not None:
        return [given_call(given.example)]
    if not given.loaders:
        raise UsageError(
            "a model that is divided needs an example of its inputs, and no loader was given: pass it as in "
            "session.prepare(model, optimizer, example=(x,))"
        )
    batch = example_batch(given.loaders[0])
    return [model_inputs(model, batch) for model in given.models]


def placement(context: WorldContext, strategy: Strategy, batch_norm: str, exchange: Exchange) -> Placement:
    """How the models of a session are divided under a strategy."""
    if isinstance(context, ModelContext):
        return DividedPlacement(context, strategy, batch_norm, exchange)
    return Placement()
