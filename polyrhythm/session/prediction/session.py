"""PredictingSession: the session of a node under `polyrhythm predict`, which trains nothing.

The script runs as it does in training. `prepare` loads the parameters that a run has saved, and whatever
would train is refused: nothing is skipped silently. So the script has to ask `session.predicting`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import LastStep, LeaveRun, Prepared
from polyrhythm.model.consensus import ConsensusModel, joined, one_or_all
from polyrhythm.model.spilled import spilling
from polyrhythm.session.arguments import Arguments, Evaluated
from polyrhythm.session.distributed import DistributedSession
from polyrhythm.session.evaluation import EvaluationLoader
from polyrhythm.session.prediction.call import Inputs, RunTogether
from polyrhythm.session.prediction.models import Predictor
from polyrhythm.session.prediction.outputs import write_outputs
from polyrhythm.session.prediction.rounds import To
from polyrhythm.session.result import left_out
from polyrhythm.session.saved_tensors import SavedTensors

NO_TRAINING = (
    "polyrhythm predict loads a model that is trained, and here the script trains: put its training under "
    "if not session.predicting:"
)
NEVER = (
    "the script never called session.predict(loader), so polyrhythm predict has nothing to do: call it after "
    "the training, which is under if not session.predicting:"
)
_NAMED = 3  # parameters that an error names


class PredictingSession(DistributedSession):
    """The session of a node that predicts with the model of a run that is over."""

    predicting = True
    _predicted = 0  # calls of predict()

    def prepare(
        self,
        *objects: Any,
        evaluate: Evaluated = (),
        example: Any = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Any:
        given = Arguments(objects, evaluate, again=self._given is not None, example=example, loss=loss)
        if self._given is None:
            given.check()
            self._load(given)
        own, processes = (self.rank, self.workers, self.seed), self._context.processes
        untrained = {each: UntrainedLoader(each, 0, 1, self.seed, processes) for each in given.loaders}
        return given.returned(
            untrained | {each: EvaluationLoader(each, *own, processes) for each in given.evaluated}
        )

    def _load(self, given: Arguments) -> None:
        model, path = joined(given.models), self._context.plan.predicts_with
        assert path is not None
        load_parameters(model, Path(path))
        self._note(left_out(model) if self.rank == 0 else "")
        state = [(name, list(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
        self._placement.plan(given)
        self._placement.begin(self.seed)
        self._given, self._copies = given, ConsensusModel(given.models)
        self._predictions = CountedTogether(self._context, self.workers, lambda: self._exchange.last)
        self._context.request(Prepared(hashlib.sha256(repr(state).encode()).hexdigest()[:16]))

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        raise UsageError(NO_TRAINING)

    def consensus(self) -> Any:
        if self._copies is None:
            return super().consensus()
        with self._blocking():
            models = self._copies.copy()
            self._placement.complete(models)
        return one_or_all(models)

    def _predictor(self) -> Predictor:
        return self._placement.predictor(self._context, self._one_model())

    def predict(
        self, loader: Any, *, inputs: Inputs | None = None, to: To = "all", stream: bool = False
    ) -> Any:
        file = self._context.plan.predictions
        if file is not None and stream:
            raise UsageError(
                "--output writes the outputs of session.predict(loader), and the script takes each batch by "
                "itself with stream=True: leave out --output, and let the script write them"
            )
        if file is not None and self._predicted:
            raise UsageError(
                "--output writes the outputs of one call of session.predict(), and the script calls it "
                "again: leave out --output, and let the script write them by session.save()"
            )
        outputs = super().predict(loader, inputs=inputs, to=to, stream=stream)
        self._predicted += 1
        if file is not None and outputs is not None and self._speaks:
            write_outputs(Path(file), outputs)
        return outputs

    def close(self) -> None:
        if self._given is None:
            raise UsageError("the script never called session.prepare(model, optimizer, loader)")
        if not self._predicted:
            raise UsageError(NEVER)
        for each in self.before_close:
            each()
        self._placement.settle()
        self._context.flush()
        self._context.request(LastStep(0))
        self._context.request(LeaveRun(result=False))


class CountedTogether(RunTogether):
    """Reports the batches and examples of this worker to the run."""

    _batches = _examples = 0

    def computed(self, examples: int) -> None:
        super().computed(examples)
        self._batches, self._examples = self._batches + 1, self._examples + examples
        self._context.node.totals(steps=self._batches, samples=self._examples, compute_s=0.0, wait_s=0.0)


class UntrainedLoader(EvaluationLoader):
    """A training loader where nothing is trained: to iterate over it is an error."""

    def __iter__(self) -> NoReturn:
        raise UsageError(NO_TRAINING)


def load_parameters(model: nn.Module, path: Path) -> None:
    """Loads the parameters and buffers that a run has saved. UsageError if they do not fit the model."""
    try:
        file = SavedTensors(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; give the folder of a run that has finished") from None
    state, names = model.state_dict(), file.names
    held = [name for name, each in state.items() if isinstance(each, torch.Tensor) and not each.is_meta]
    if missing := [name for name in held if name not in names]:
        raise UsageError(f"{path} does not fit the script's model: it has no {_names(missing)}; {_REMEDY}")
    if unknown := sorted(names - state.keys()):
        raise UsageError(f"{path} does not fit the script's model, which has no {_names(unknown)}; {_REMEDY}")
    loaded, wrong = dict[str, Tensor](), dict[str, str]()
    for name in (each for each in state if each in names):
        saved = file.read(name)
        if _form(saved) != _form(state[name]):
            wrong[name] = _form(saved)
        elif spilling():  # all of them at once would not fit
            state[name].copy_(saved)
        else:
            loaded[name] = saved
    if wrong:
        first, form = next(iter(wrong.items()))
        raise UsageError(
            f"{path} does not fit the script's model: {_names(list(wrong))} differ, {first} is "
            f"{form} there and {_form(state[first])} here; {_REMEDY}"
        )
    model.load_state_dict(loaded, strict=False)


_REMEDY = "build the model of the run, with the same arguments of the script after --"


def _form(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
