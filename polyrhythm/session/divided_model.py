"""DividedModel: the part of a script's model that one worker holds, where several hold it together.

`prepare` captures the operations of the model (`parallel.graph`), worker 0 decides which of them run at which
place, and each worker keeps the tensors of its own place. The script's model object stays: calling it runs
the operations of all places, and tensors of other places have no data here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import UsageError
from polyrhythm.core.split import ModelSplit
from polyrhythm.model.hooks import Hook
from polyrhythm.model.layout import needs_closure
from polyrhythm.parallel.divide import choose, divide, doubt
from polyrhythm.parallel.estimates import estimate
from polyrhythm.parallel.example import Call
from polyrhythm.parallel.graph import ModelGraph, Signature, capture
from polyrhythm.parallel.grid import Grid
from polyrhythm.parallel.loss import with_loss
from polyrhythm.parallel.micro_batches import Values
from polyrhythm.parallel.partition import Mode, Partition, holder, split
from polyrhythm.parallel.pipeline import StageRunner, Tied
from polyrhythm.parallel.place_plan import PlacePlan, place_plan
from polyrhythm.parallel.rows import check_rows
from polyrhythm.parallel.splits import TensorParallel
from polyrhythm.parallel.tensor_shards import TensorShards
from polyrhythm.parallel.weight_gradients import WeightGradients
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.model_context import ModelContext, receive_from
from polyrhythm.session.seeds import mix
from polyrhythm.session.stage_link import StageLink, fingerprint

_TENSORS = "tensors of model"  # the kind of messages with the tensors of a part
_SAVE = (
    "the model is divided over several workers, and each holds a part of it and of its optimizer: save "
    "session.consensus().state_dict(), or use the consensus.safetensors of the run"
)
Decide = Callable[[Callable[[], list[int]], str], list[int]]


class ModelDivision:
    """How a model is divided, as every node of the run knows it."""

    def __init__(
        self, splits: Sequence[ModelSplit], given: Arguments, call: Call, decide: Decide, place: int
    ) -> None:
        """`decide` lets worker 0 choose for all nodes. `place`: that of this worker; 0 on servers."""
        how = self.how = _main_split(splits)
        self.grid = Grid(splits)
        if len(given.models) > 1 or len(given.optimizers) > 1:
            raise UsageError(
                f"{how} divides one model with one optimizer, and session.prepare() got "
                f"{len(given.models)} and {len(given.optimizers)}: use a strategy in which each worker holds "
                "whole models, such as allreduce"
            )
        self.model, self.optimizer, self.loss = given.models[0], given.optimizers[0], given.loss
        if needs_closure(self.optimizer):
            raise UsageError(
                f"{type(self.optimizer).__name__} sees whole models, and {how} divides one: use an "
                "optimizer such as SGD or Adam, or allreduce without @"
            )
        if how.recompute and any(isinstance(each, _BatchNorm) for each in self.model.modules()):
            raise UsageError("recompute=yes would update BatchNorm's statistics twice: leave it out")
        self.graph: ModelGraph = capture(self.model, *call)
        inputs = self.graph.signature.values(*call)
        owned = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        trained = {name for name, each in self.model.named_parameters() if id(each) in owned}
        # The inputs that have a row for each example.
        self.batched = [
            name
            for name, each in zip(inputs, self.graph.signature.inputs, strict=True)
            if each.rows is not None
        ]
        if how.micro_batches > 1:
            check_rows(split(self.graph, ()), inputs, self.batched)
        captured, whole = self.graph.hash, sum(estimate(self.graph.train, inputs).seconds)
        self.tensors = self._take_shards(splits, place)
        chosen = decide(lambda: choose(self.graph, how, inputs, trained), captured)
        self.parts: Partition = divide(self.graph, how, chosen)
        costs = estimate(self.graph.train, inputs)
        self.shares = self._shares(costs.seconds, whole)
        self.doubt = doubt(self.graph, how, self.parts, costs)
        if idle := sorted(set(range(self.grid.sections)) - {self._sections(name)[0] for name in trained}):
            raise UsageError(f"worker {idle[0]} of {how} would have no parameter to train: {how.advice}")

    def _take_shards(self, splits: Sequence[ModelSplit], place: int) -> TensorShards | None:
        """Leaves this worker's parts of divided tensors in the model, and its operations in the graph."""
        for each in splits:
            if isinstance(each, TensorParallel):
                tensors = TensorShards(self.graph, each, self.grid.rank(place))
                tensors.check(self.optimizer)
                tensors.take(self.model, self.optimizer)
                self.graph = tensors.graph
                return tensors
        return None

    def _shares(self, costs: Sequence[float], whole: float) -> list[float]:
        """By segment: its share of the computation of the whole model."""
        spent = [0.0] * len(self.parts.train)
        for segment, cost in zip(self.parts.operations, costs, strict=True):
            spent[segment] += cost
        return [each / whole for each in spent]

    def _sections(self, name: str) -> tuple[int, ...]:
        """The sections of the grid that use a tensor of the model, the owner first."""
        return self.parts.users.get(self.graph.names.get(name, name), ()) or (0,)

    def users(self, name: str, place: int) -> tuple[int, ...]:
        """The places that use the same tensor as one place does, the owner first.

        Of a divided tensor each rank on the tensor axis has another part; a whole one belongs to rank 0.
        """
        sections = self._sections(name)
        if self.tensors is not None and name in self.tensors.shardings:
            return tuple(self.grid.place(each, self.grid.rank(place)) for each in sections)
        ranks = range(self.grid.tensor)
        return tuple(self.grid.place(each, rank) for each in sections for rank in ranks)

    def owner(self, name: str, place: int) -> int:
        """The place that owns a tensor: it trains it, and lends it to the others that use it."""
        return self.users(name, place)[0]

    def groups(self, place: int) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer with the parameters that a place owns."""
        names = {id(each): name for name, each in self.model.named_parameters()}

        def owned(parameter: Tensor) -> bool:
            return self.owner(names[id(parameter)], place) == place

        return [{**each, "params": [*filter(owned, each["params"])]} for each in self.optimizer.param_groups]

    def on_server(self, place: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The parameters of one place by name, and a copy of the optimizer for them."""
        copy: torch.optim.Optimizer = object.__new__(type(self.optimizer))
        copy.__dict__.update(self.optimizer.__dict__)
        copy.param_groups, copy.state = self.groups(place), self.optimizer.state.copy()
        if self.tensors is None:
            return self.model, copy
        rank, tensors = self.grid.rank(place), self.tensors
        named = {name: tensors.of(name, each, rank) for name, each in self.model.named_parameters()}
        for name, each in self.model.named_parameters():
            if named[name] is not each:
                copy.state[named[name]] = tensors.state_of(name, rank)
        parts = {id(each): named[name] for name, each in self.model.named_parameters()}
        for group in copy.param_groups:
            group["params"] = [parts[id(each)] for each in group["params"]]
        return holder(named), copy


class DividedModel:
    """One worker's part of a model."""

    def __init__(self, context: ModelContext, division: ModelDivision, seed: int) -> None:
        self._context, self._model, how = context, division.model, division.how
        self.place = place = context.place
        chain = bool(division.graph.note)  # of modules, which run as they are
        self._grid, self._tensors = division.grid, division.tensors
        section, column = self._grid.section(place), self._grid.column(place)
        self.link = StageLink(context, self._grid, division.shares, mix("stage", seed, section), chain)
        if self._tensors is not None:
            self._tensors.release()
            self._tensors.axis.all_reduce = self.link.sum_parts
        self.signature: Signature = division.graph.signature
        self.batched = division.batched
        modes: tuple[Mode, Mode] = ("train", "eval")
        self._plans: dict[Mode, PlacePlan] = {
            mode: place_plan(division.parts, mode, place, column) for mode in modes
        }
        self.plans_with_loss: dict[Mode, PlacePlan] = {}
        if division.loss is not None and how.needs_loss:
            with_it = with_loss(division.parts, division.loss)
            self.plans_with_loss = {mode: place_plan(with_it, mode, place) for mode in modes}
        self.before_forward: Callable[[], None] = lambda: None  # called when the script calls the model
        self._run: Callable[[Values, Mode], Any] | None = None
        self._first_names = dict(division.graph.names)
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._mine = {name for name in tensors if division.owner(name, place) == place}
        used = {name for name in tensors if place in division.users(name, place)}
        kept = [each for name, each in self._model.named_parameters() if name in used]
        later = WeightGradients()
        for segment in (each for plan in self._plans.values() for each in plan.segments):
            later.defer(segment.run)
        self.runner = StageRunner(
            place, self.link, how.micro_batches, how.recompute, kept, _tied(division, place), later
        )
        division.optimizer.param_groups[:] = division.groups(place)
        self._trainable = {name for name, each in self._model.named_parameters() if each.requires_grad}
        self._release(used)
        self._modules = list(self._model.modules())
        self._model.forward = Forward(self)
        self._model.register_state_dict_pre_hook(Hook(_refuse_saving))  # type: ignore[no-untyped-call]
        division.optimizer.register_state_dict_pre_hook(_refuse_saving)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the whole model. All workers that hold it call this."""
        if self._run is None:
            self.before_forward()
        inputs = self.signature.values(args, kwargs)
        self.link.fingerprint = fingerprint(inputs)
        if self._run is not None:
            return self._run(inputs, self._mode)
        return self.runner(self._plans[self._mode], inputs, self.batched)

    def call(
        self, run: Callable[[Values, Mode], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls the model, so that its hooks run, with something else in place of its forward pass."""
        self._run = run
        try:
            return self._model(*args, **kwargs)
        finally:
            self._run = None

    def has(self, gradients: Sequence[Tensor]) -> bool:
        """True if these are gradients of this model."""
        mine = {id(each.grad) for each in self._model.parameters() if each.grad is not None}
        return not gradients or any(id(each) in mine for each in gradients)

    @property
    def _mode(self) -> Mode:
        modes = {module.training for module in self._modules}
        if len(modes) > 1:
            raise UsageError(
                "some layers of a divided model are in training mode and others are not: call model.train() "
                "or model.eval() on the whole model, and freeze layers by requires_grad_(False)"
            )
        return "train" if modes == {True} else "eval"

    def _release(self, used: set[str]) -> None:
        """Frees the tensors that other places hold. What remains has a shape, and no data.

        Copies of parameters that another place owns are in the operations of this place only.
        """
        made: dict[str, Tensor] = {}  # one for all names of a tensor
        for prefix, module in self._model.named_modules():
            for tensors, make in ((module._parameters, _without_data), (module._buffers, _empty)):
                for name, tensor in list(tensors.items()):
                    full = f"{prefix}.{name}" if prefix else name
                    first = self._first_names.get(full, full)
                    if tensor is not None and first not in (
                        self._mine if make is _without_data else self._mine | used
                    ):
                        tensors[name] = made.setdefault(first, make(tensor))

    # --- the whole model ----------------------------------------------------------------------------

    def complete(self, copy: nn.Module, on_all: bool) -> None:
        """Gives a copy of the model the tensors of all places: on all workers of the model, or on the first.

        All workers of the model call this at the same time.
        """
        copy.__dict__.pop("forward", None)
        tensors = {
            name: each.detach()
            for name, each in (*copy.named_parameters(), *copy.named_buffers())
            if name in self._mine
        }
        node, me = self._context.worker_node, self.place
        others = [place for place in range(len(self._context.model)) if place != me]
        for place in others if on_all else [0] * (me != 0):
            node.send(
                self._context.model[place],
                f"{_TENSORS} {me}",
                *(each.reshape(-1) for each in tensors.values()),
                names=list(tensors),
            )
        shards = self._tensors.shardings if self._tensors is not None else {}
        parts = {name: {self._grid.rank(me): each} for name, each in tensors.items() if name in shards}
        for place in others if on_all or not me else ():
            message = receive_from(node, self._context.model[place], f"{_TENSORS} {place}")
            for name, flat in zip(message["names"], message.tensors, strict=True):
                if name in shards:
                    parts.setdefault(name, {})[self._grid.rank(place)] = flat  # a message is a copy
                else:
                    tensors[name] = flat
        if on_all or not me:
            for name, pieces in parts.items():
                assert self._tensors is not None
                tensors[name] = self._tensors.joined(name, pieces)
            self._fill(copy, tensors, parts)

    def _fill(self, copy: nn.Module, tensors: Mapping[str, Tensor], parts: Collection[str]) -> None:
        """Replaces tensors without data, and the parts of divided ones."""
        made: dict[str, nn.Parameter] = {}
        for prefix, module in copy.named_modules():
            for name, parameter in module._parameters.items():
                first = self._first(prefix, name)
                if parameter is not None and (parameter.is_meta or first in parts):
                    value = tensors[first] if first in parts else tensors[first].view(parameter.shape)
                    module._parameters[name] = made.setdefault(
                        first, nn.Parameter(value, first in self._trainable)
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = tensors[self._first(prefix, name)].view(buffer.shape)

    def _first(self, prefix: str, name: str) -> str:
        full = f"{prefix}.{name}" if prefix else name
        return self._first_names.get(full, full)


class Forward:
    """The forward method of a divided model."""

    def __init__(self, divided: DividedModel) -> None:
        self._divided = divided

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided.forward(args, kwargs)

    def __deepcopy__(self, memo: object) -> CopiedForward:
        return CopiedForward()

    def __reduce__(self) -> NoReturn:
        raise UsageError(_SAVE)


class CopiedForward:
    """The forward method of a copy of a divided model, which nobody can run."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "this is a copy of a divided model, of which each worker has a part: copy the model that "
            "session.consensus() returns, which is whole"
        )


def _tied(division: ModelDivision, place: int) -> Tied:
    """The parameters that this place lends to others, and those that it borrows."""
    lent: dict[int, dict[str, nn.Parameter]] = {}
    borrowed: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in division.model.named_parameters():
        owner, *others = division.users(name, place)
        if owner == place:
            for other in others:
                lent.setdefault(other, {})[name] = parameter
        elif place in others:
            borrowed.setdefault(owner, {})[name] = parameter
    row = set(division.grid.row(place)) - {place}
    if division.grid.rank(place) == 0:
        # Also without parameters: workers that compute together compare their batches.
        lent = {other: lent.get(other, {}) for other in sorted({*lent, *row})}
    else:
        first = division.grid.place(division.grid.section(place), 0)
        borrowed.setdefault(first, {})
    column = set(division.grid.column(place))
    return Tied(lent, borrowed, frozenset({*lent, *borrowed} - column))


def _main_split(splits: Sequence[ModelSplit]) -> ModelSplit:
    """The way in which the operations of a model are divided; tensors may be divided besides."""
    others = [each for each in splits if not isinstance(each, TensorParallel)]
    if len(others) > 1:
        raise UsageError(
            f"{'@'.join(map(str, splits))} would divide one model in {len(others)} ways: use one of them, "
            "alone or with tensor"
        )
    if others and others[0].needs_loss and len(splits) > 1:
        raise UsageError(
            f"{others[0]} cannot be used with tensor: leave out its schedule, which is gpipe then"
        )
    return others[0] if others else splits[0]


def _without_data(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(_empty(parameter), requires_grad=False)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _refuse_saving(*_: object) -> NoReturn:
    raise UsageError(_SAVE)
