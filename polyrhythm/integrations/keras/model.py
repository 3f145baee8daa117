"""DistributedModel: replaces the methods of one Keras model in a run, so that `fit` is part of it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import keras
import torch
from keras.src.trainers.data_adapters import array_slicing

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.integrations.keras.callbacks import WRITERS, EpochEnd, EpochStart, listed, numbers
from polyrhythm.integrations.keras.checks import check_arguments, check_model, check_norms, check_optimizer
from polyrhythm.integrations.keras.data import SharedBatches, first_batch, first_tensor, training_loader
from polyrhythm.integrations.keras.optimizer import KerasOptimizer, KerasSchedule, schedule_of
from polyrhythm.integrations.keras.weights import KerasWeights, separate_seeds
from polyrhythm.integrations.trainers import DeferredLoader, Trainee, TrainerSession

M = TypeVar("M", bound=Any)
REPLACED = ("fit", "train_step", "train_on_batch", "evaluate", "predict", "save", "save_weights", "export")


def distribute(model: M, strategy: str | Strategy | None = None, *, batch_norm: str | None = None) -> M:
    """From here on `model.fit()` trains by the strategy of the run. Returns the model.

    Call it before `fit`, before or after `compile`. `strategy` and `batch_norm` are those of `pr.init()`; the
    command line overrides both. Outside a run it changes nothing.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"distribute() takes a keras.Model, not {type(model).__name__}")
    mine = DistributedModel(model, strategy, batch_norm)
    if mine.workers.run is not None:
        mine.attach()
    return model


class DistributedModel:
    """A model whose `fit` is part of a run."""

    def __init__(self, model: Any, strategy: str | Strategy | None, batch_norm: str | None) -> None:
        self.model = model
        self.workers = TrainerSession(self._trainee, strategy, batch_norm)
        self._own: dict[str, Callable[..., Any]] = {}  # the model's methods
        self._weights: KerasWeights | None = None
        self._optimizer: KerasOptimizer | None = None
        self._schedule: KerasSchedule | None = None
        self._initial_epoch = 0
        self._epoch: EpochStart | None = None  # while `fit` runs

    def attach(self) -> None:
        """Replaces the methods of the model, not of its class."""
        if getattr(self.model.__dict__.get("fit"), "__self__", None).__class__ is DistributedModel:
            raise UsageError("distribute() was called twice with the same model")
        for name in REPLACED:
            self._own[name] = getattr(self.model, name)
            self.model.__dict__[name] = getattr(self, name)
        # Keras says so at the end of an epoch whose length is not known.
        warnings.filterwarnings("ignore", message="Your input ran out of data")

    # --- training -----------------------------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._own["fit"]).bind(*args, **kwargs)
        given.apply_defaults()
        arguments: dict[str, Any] = given.arguments
        run = self.workers.run
        assert run is not None
        check_model(self.model)
        check_arguments(arguments, self.workers.workers)
        check_optimizer(self.model.optimizer, run.strategy, len(run._node.members.servers))
        check_norms(self.model, run.batch_norm)
        if arguments["validation_split"] and arguments["validation_data"] is None:
            split = array_slicing.train_validation_split(
                (arguments["x"], arguments["y"], arguments["sample_weight"]),
                validation_split=arguments["validation_split"],
            )
            (arguments["x"], arguments["y"], arguments["sample_weight"]), arguments["validation_data"] = split
        arguments["validation_split"] = 0.0
        loader = training_loader(arguments)
        deferred = self._prepare(loader, arguments["initial_epoch"])
        assert deferred.shared is not None
        traits = run.strategy.traits
        # Where workers are lost or not in lockstep, one may get any number of batches of an epoch.
        known = traits.lockstep and not traits.survives
        count = len(deferred.shared) if known else len(loader)
        arguments["x"] = SharedBatches(deferred, count, loader.dataset, run.seed)
        arguments.update(y=None, sample_weight=None, class_weight=None, shuffle=False)
        if self.workers.rank:
            arguments["verbose"] = 0
        arguments["callbacks"] = self._callbacks(arguments["callbacks"], arguments["epochs"])
        try:
            history = self._own["fit"](**arguments)
        finally:
            self._epoch = None
        self.workers.show_consensus()
        return history

    def _prepare(self, loader: Any, initial_epoch: int) -> DeferredLoader:
        """Builds the model and prepares the session, or in a later call shares the new loader."""
        model, workers = self.model, self.workers
        deferred = workers.share(loader, None)
        if self._optimizer is not None:
            trained = [each.value for each in self._optimizer.variables]
            if model.optimizer is not self._optimizer.keras or not _same(trained, model.trainable_variables):
                raise UsageError(
                    "compile() or `trainable` has changed since the first fit(): a run trains one set of "
                    "variables with one optimizer; start another run from the saved model"
                )
            return deferred
        model._symbolic_build(data_batch=first_batch(loader))
        self._weights = KerasWeights(model, self._step)
        self._optimizer = KerasOptimizer(model.optimizer, model.trainable_variables)
        if workers.session.strategy.traits.uses_servers and not self._optimizer.whole:  # type: ignore[union-attr]
            raise UsageError(
                f"{type(model.optimizer).__name__} keeps state that does not belong to single variables, and "
                "cannot be divided among servers: use allreduce or local:8, or another optimizer"
            )
        self._schedule, self._initial_epoch = schedule_of(self._optimizer), initial_epoch
        workers.prepare()
        model.optimizer.__dict__["apply"] = self._apply
        separate_seeds(model, workers.session.rank)
        return deferred

    def _trainee(self) -> Trainee:
        assert self._weights is not None and self._optimizer is not None
        schedulers = [] if self._schedule is None else [self._schedule]
        return Trainee(self._weights, [self._optimizer], self._initial_epoch, schedulers, whole_run=True)

    def _callbacks(self, given: Any, epochs: int) -> list[Any]:
        own = listed(given)
        if self.workers.rank:
            own = [each for each in own if not isinstance(each, WRITERS)]
        self._epoch = EpochStart(self, epochs, shows=bool(own))
        return [self._epoch, *own, EpochEnd(self)]

    def train_step(self, data: Any) -> Any:
        if self._epoch is None or self._weights is None:
            return self._own["train_step"](data)
        self.workers.begin_batch()
        return self._weights(data)

    def _step(self, data: Any) -> Any:
        """One training step. Borrowed examples change neither statistics nor metrics."""
        run = self.workers.run
        assert run is not None and run._parts is not None and self._weights is not None
        kept: list[torch.Tensor] = []
        if not run.count(first_tensor(data)):
            kept = [*self._weights.buffers(), *(each.value for each in self.model.metrics_variables)]
        values, steps = [each.detach().clone() for each in kept], run._parts.steps
        logs = self._own["train_step"](data)
        if run._parts.steps == steps:
            raise UsageError(
                f"train_step() of {type(self.model).__name__} has not called self.optimizer.apply(), so "
                "nothing is exchanged: train with the optimizer of compile()"
            )
        with torch.no_grad():
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)
        return logs

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Replaces `optimizer.apply`: the step is one of the strategy."""
        optimizer = self._optimizer
        assert optimizer is not None
        variables = optimizer.variables if trainable_variables is None else list(trainable_variables)
        given = {id(variable): gradient for variable, gradient in zip(variables, grads, strict=True)}
        for variable in optimizer.variables:
            gradient = given.get(id(variable))
            if variable.value.grad is not gradient:
                variable.value.grad = gradient
        if self._schedule is None:
            optimizer.set_rate(optimizer.current_rate())
        optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("train_on_batch() cannot share out data among workers: use fit()")

    # --- evaluation and files -----------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """On all of the data, by each worker; after or between `fit` of the consensus."""
        result = self._quietly("evaluate", args, kwargs)
        if self.workers.run is not None and self._epoch is None and self._optimizer is not None:
            found = result if isinstance(result, dict) else self.model.get_metrics_result()
            self.workers.run.log(**{f"test_{name}": value for name, value in numbers(found).items()})
        return result

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._quietly("predict", args, kwargs)

    def _quietly(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the model. Only worker 0 shows its progress."""
        if self.workers.rank:
            given = inspect.signature(self._own[name]).bind(*args, **kwargs)
            given.arguments["verbose"] = 0
            return self._own[name](*given.args, **given.kwargs)
        return self._own[name](*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        self._write("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        self._write("save_weights", args, kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        self._write("export", args, kwargs)

    def _write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Worker 0 writes the consensus; when the others return, the file is there. All workers call it."""
        with self._shown(f"{name}()"):
            if not self.workers.rank:
                if self._optimizer is not None:
                    self._optimizer.state_dict()  # fetches it from servers
                    self._optimizer.show()
                self._own[name](*args, **kwargs)
            self.workers.barrier()

    @contextmanager
    def _shown(self, what: str) -> Iterator[None]:
        """A context in which the model holds the consensus."""
        if self._epoch is not None and self._epoch.training and not self.workers.lockstep:
            raise UsageError(
                f"{what} needs all workers, and under {self.workers.session.strategy} they take unequal "
                "numbers of steps: do it at the end of an epoch"
            )
        with self.workers.consensus_shown():
            yield


def _same(tensors: list[Any], variables: list[Any]) -> bool:
    return len(tensors) == len(variables) and all(
        one is other.value for one, other in zip(tensors, variables, strict=True)
    )
