"""DividedModel: the part of a script's model that one worker holds, where several hold it together.

`prepare` captures the operations of the model (`parallel.graph`), worker 0 decides which of them run at which
place, and each worker keeps the tensors of its own place. The script's model object stays: calling it runs
the operations of all places, and tensors of other places have no data here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.model.hooks import Hook
from polyrhythm.parallel.example import Call
from polyrhythm.parallel.graph import Signature
from polyrhythm.parallel.loss import with_loss
from polyrhythm.parallel.micro_batches import Values
from polyrhythm.parallel.partition import Mode
from polyrhythm.parallel.pipeline import StageRunner, Tied
from polyrhythm.parallel.place_plan import PlacePlan, place_plan
from polyrhythm.parallel.weight_gradients import WeightGradients
from polyrhythm.session.model_context import ModelContext
from polyrhythm.session.model_division import ModelDivision
from polyrhythm.session.place_exchange import Found, PlaceExchange
from polyrhythm.session.prediction.models import digest_of, evaluating
from polyrhythm.session.random_states import OwnNumbers
from polyrhythm.session.result_parts import TensorShare
from polyrhythm.session.seeds import mix
from polyrhythm.session.stage_link import StageLink, fingerprint

_PICKLE = (
    "the model is divided over several workers, and each holds a part of it: save model.state_dict(), which "
    "is whole, not the model itself"
)


class DividedModel:
    """One worker's part of a model."""

    def __init__(
        self, context: ModelContext, division: ModelDivision, seed: int, number: int, exchange: PlaceExchange
    ) -> None:
        """`number`: that of the model, if the session has several."""
        self._context, self._model, how = context, division.model, division.how
        self._exchange = exchange
        self.place = place = context.place
        chain = bool(division.graph.note)  # of modules, which run as they are
        self._grid, self._tensors = division.grid, division.tensors
        self.section, self.column = self._grid.section(place), self._grid.column(place)
        numbers = mix("stage", seed, self.section, *([number] if number else ()))
        self.link = StageLink(context, self._grid, division.shares, OwnNumbers(numbers, python=chain), number)
        if self._tensors is not None:
            self._tensors.release()
            self._tensors.axis.all_reduce = self.link.sum_parts
        self.signature: Signature = division.graph.signature
        self.batched = division.batched
        modes: tuple[Mode, Mode] = ("train", "eval")
        self._plans: dict[Mode, PlacePlan] = {
            mode: place_plan(division.parts, mode, place, self.column) for mode in modes
        }
        self.plans_with_loss: dict[Mode, PlacePlan] = {}
        if division.loss is not None and how.needs_loss:
            with_it = with_loss(division.parts, division.loss)
            self.plans_with_loss = {mode: place_plan(with_it, mode, place, self.column) for mode in modes}
        self.before_forward: Callable[[], None] = lambda: None  # called when the script calls the model
        self.before_saving: Callable[[], None] = lambda: None  # called when the script saves its state
        self._saving: list[nn.Module] = []  # the modules whose `state_dict()` is running
        self._run: Callable[[Values, Mode], Any] | None = None
        self._first_names = dict(division.graph.names)
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._mine = {name for name in tensors if division.owner(name, place) == place}
        used = {name for name in tensors if place in division.users(name, place)}
        self.held = used | self._mine
        kept = [each for name, each in self._model.named_parameters() if name in used]
        later = WeightGradients()
        for segment in (each for plan in self._plans.values() for each in plan.segments):
            later.defer(segment.run)
        self.runner = StageRunner(
            place, self.link, how.micro_batches, how.recompute, kept, _tied(division, place), later
        )
        self._trainable = {name for name, each in self._model.named_parameters() if each.requires_grad}
        self._release(used)
        self._modules = list(self._model.modules())
        self._model.forward = Forward(self, inspect.signature(self._model.forward))
        self._watch_states()

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

    def begin(self, call: Call, tied: bool) -> Callable[[], Any]:
        """Begins to evaluate a whole batch; the returned function waits for the output of the model."""
        inputs = self.signature.values(*call)
        self.link.fingerprint = seen = fingerprint(inputs)
        wait = self.runner.begin(self._plans["eval"], inputs, self.batched, tied)

        def output() -> Any:
            self.link.fingerprint = seen
            return wait()

        return output

    def predictor(self, copy: nn.Module) -> DividedPredictor:
        """Predicts by a copy of this worker's part of the model, or by the model itself."""
        return DividedPredictor(self, self._model, copy, len(self._context.model))

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

    def owns(self, name: str) -> bool:
        """True if this place has a tensor, or a part of it, for the whole model."""
        return self._first_names.get(name, name) in self._mine

    @property
    def shares(self) -> dict[str, TensorShare]:
        """By name: the part of each divided tensor that a worker on this rank has."""
        if self._tensors is None:
            return {}
        rank, divided = self._grid.rank(self.place), self._tensors.shardings
        return {
            name: TensorShare(divided[first].dim, divided[first].blocks, rank, self._grid.tensor)
            for name, first in self._first_names.items()
            if first in divided
        }

    def complete(self, copy: nn.Module) -> None:
        """Gives a copy of the model the tensors of all places.

        All workers of the model call this at the same time.
        """
        copy.__dict__.pop("forward", None)
        tensors = (*copy.named_parameters(), *copy.named_buffers())
        self._fill(
            copy, self._gathered({name: each.detach() for name, each in tensors if name in self._mine})
        )

    def _gathered(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from those of all places."""
        parts: dict[str, dict[int, Tensor]] = {}
        for place, found in enumerate(self._exchange.gather(Found(mine, {}))):
            for name, tensor in found.tensors.items():
                parts.setdefault(name, {})[place] = tensor
        if self._tensors is None:
            return {name: next(iter(each.values())) for name, each in parts.items()}
        return {name: self._tensors.joined(name, each) for name, each in parts.items()}

    def _fill(self, copy: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Replaces tensors without data, and the parts of divided ones."""
        parts = self._tensors.shardings if self._tensors is not None else ()
        made: dict[str, nn.Parameter] = {}
        for prefix, module in copy.named_modules():
            for name, parameter in module._parameters.items():
                first = self._first(prefix, name)
                if parameter is not None and (parameter.is_meta or first in parts):
                    trains = first in self._trainable
                    module._parameters[name] = made.setdefault(first, nn.Parameter(tensors[first], trains))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = tensors[self._first(prefix, name)]

    def _watch_states(self) -> None:
        """Makes the results of `state_dict()` whole, and gives `load_state_dict()` the part of this place."""
        for prefix, module in self._model.named_modules():
            module.register_state_dict_pre_hook(Hook(self._before_saving))
            module.register_state_dict_post_hook(Hook(partial(self._whole_state, prefix)))
            module.register_load_state_dict_pre_hook(Hook(partial(self._own_state, prefix)))

    def _before_saving(self, module: nn.Module, *_: object) -> None:
        """Called when `state_dict()` of a module begins. It calls that of its children."""
        while self._saving and not any(module is each for each in self._saving[-1].children()):
            self._saving.pop()  # its `state_dict()` has failed
        if not self._saving:
            self.before_saving()
        self._saving.append(module)

    def _whole_state(self, name: str, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        """Called when `state_dict()` of a module ends. `name`: that of the module."""
        self._saving.pop()
        if self._saving:
            return  # it makes the state of this module whole, too
        own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        keys = {
            key: first
            for key in state
            if key.startswith(prefix) and (first := self._first(name, key.removeprefix(prefix))) in own
        }
        mine = dict.fromkeys(first for first in keys.values() if first in self._mine)
        whole = self._gathered({first: own[first].detach().clone() for first in mine})
        state.update((key, whole[first]) for key, first in keys.items())

    def _own_state(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Called before a module loads its own tensors. `name`: that of the module."""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = self._first(name, key)
            if tensor is None or prefix + key not in state:
                continue
            if tensor.is_meta:
                state[prefix + key] = tensor
            elif self._tensors is not None:
                state[prefix + key] = self._tensors.own_part(full, state[prefix + key])

    def _first(self, prefix: str, name: str) -> str:
        full = f"{prefix}.{name}" if prefix else name
        return self._first_names.get(full, full)


class DividedPredictor:
    """Predicts by a divided model: batches follow each other through its parts."""

    def __init__(self, divided: DividedModel, model: nn.Module, copy: nn.Module, ahead: int) -> None:
        self._divided, self.model, self._copy, self.ahead = divided, model, copy, ahead
        self._changed = True  # the parameters, since the last batch

    @property
    def digest(self) -> str:
        return digest_of(self._copy)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the operations of the model have the tensors of the copy."""
        theirs = {**dict(self._copy.named_parameters()), **dict(self._copy.named_buffers())}
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        held = [(each, each.data, theirs[name].data) for name, each in own.items() if not each.is_meta]
        self._changed = True
        with evaluating(self.model):
            try:
                for tensor, _, other in held:
                    tensor.data = other
                yield
            finally:
                for tensor, data, _ in held:
                    tensor.data = data

    def begin(self, call: Call) -> Callable[[], Any]:
        changed, self._changed = self._changed, False
        return self._divided.begin(call, tied=changed)


class Forward:
    """The forward method of a divided model."""

    def __init__(self, divided: DividedModel, signature: inspect.Signature) -> None:
        self._divided, self.__signature__ = divided, signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided.forward(args, kwargs)

    def __deepcopy__(self, memo: object) -> CopiedForward:
        return CopiedForward()

    def __reduce__(self) -> NoReturn:
        raise UsageError(_PICKLE)


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


def _without_data(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(_empty(parameter), requires_grad=False)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
