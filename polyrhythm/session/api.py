"""init() and Session: the three lines that a user adds.

In a single process (`python train.py`) a session does nothing: `prepare` returns its arguments. In a run, a
server serves inside `prepare` and never returns from it. On a worker, the model's parameters become views of
flat vectors, `optimizer.step()` becomes the step of the strategy, and the loader gives out this worker's
share of the batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import parse
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import ConsensusModel, one_or_all
from polyrhythm.parallel.example import given_call
from polyrhythm.session import batch_norm as norms
from polyrhythm.session.arguments import Arguments, Evaluated, refuse_groups
from polyrhythm.session.context import EndedInPrepare, ends_in_prepare, session, world_context
from polyrhythm.session.counting import Counting
from polyrhythm.session.exchange import checked, checked_weight, save_atomically, weighted_mean
from polyrhythm.session.places import Call, script_call
from polyrhythm.session.prediction.call import Inputs, predict
from polyrhythm.session.prediction.models import Predictor, WholeModel
from polyrhythm.session.prediction.rounds import To, Together

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from polyrhythm.session.backward import BackwardPasses
    from polyrhythm.session.external import ExternalTraining
    from polyrhythm.session.scheduled import ScheduledTraining


def init(strategy: str | Strategy | None = None, *, batch_norm: str | None = None) -> Session:
    """Joins the run that this process belongs to, or makes a session for a single process.

    `strategy` decides how workers synchronize, such as "async", "local:8" or an instance of your own class.
    `batch_norm` is the policy for BatchNorm's statistics: "rank0" (the consensus has those of worker 0; the
    default), "mean", "sync", "recompute" or "local". The command line overrides both.

    In a run a later call returns the same session, because a run trains once. In a single process it makes
    another one.
    """
    if batch_norm is not None:
        norms.check_name(batch_norm)
    chosen = parse(strategy) if isinstance(strategy, str) else strategy
    here = world_context.get()
    if here is None:
        mine = Session()
    else:
        from polyrhythm.session.distributed import join_run  # imports this module

        mine = join_run(here, chosen, batch_norm)
    session.set(mine)
    return mine


REDUCTIONS = ("mean", "min", "max", "rank0")


class Session:
    """The result of `init()`. This class is the session of a single process: plain PyTorch."""

    rank: int = 0
    workers: int = 1
    worker: int = 0  # the number of this process; not its rank if several processes hold one model
    strategy: Strategy | None = None
    external: ExternalTraining | None = None  # by another tool than `prepare`
    batch_norm: str = norms.DEFAULT
    predicting: bool = False  # the script runs to predict with a saved model, by `polyrhythm predict`

    backward_passes: BackwardPasses | None = None  # None: they need no attention

    def __init__(self) -> None:
        self._given: Arguments | None = None  # the models and optimizers of this session
        self._copies: ConsensusModel | None = None
        self._counting = Counting()
        self._scheduled: ScheduledTraining | None = None  # None: `backward` does what a script would

    def prepare(
        self,
        *objects: Any,
        evaluate: Evaluated = (),
        example: Any = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Any:
        """Call it with the model, its optimizer and the training loader; use the objects that it returns.

        A script may have any number of each: all models and optimizers are given in one call. The order of
        the arguments does not matter; the results have the same order. A later call takes loaders only.
        Loaders in `evaluate`, one or a list, come last: each of their examples is on exactly one worker. A
        loader that is not passed stays whole on every worker.

        `example` is needed only where the model is divided over workers and its inputs cannot be told from a
        batch: an input of the model, a tuple of inputs or a dict of keyword arguments, of a few examples; of
        several models, a list of these.
        `loss` is the loss function, if the script trains by `backward`.
        """
        given = Arguments(objects, evaluate, again=self._copies is not None, example=example, loss=loss)
        if self._copies is None:
            given.check()
            if ends_in_prepare.get():
                raise EndedInPrepare(given)
            self._given, self._copies = given, ConsensusModel(given.models)
            for optimizer in given.optimizers:
                refuse_groups(optimizer)
        return given.returned({})

    def backward(self, inputs: Any, *targets: Any) -> Tensor:
        """Runs the model on `inputs`, the loss function on its output and `targets`, and the backward pass.

        `inputs` is an input of the model, a tuple of inputs or a dict of keyword arguments; the loss function
        is that of `prepare(..., loss=fn)`. Returns the loss, without a graph. It is what a script does by
        itself, except under schedules of a pipeline that have to know the loss (see `pipeline`).
        """
        given = self._given
        if given is None or given.loss is None:
            raise UsageError(
                "session.backward() needs the loss function: call session.prepare(model, optimizer, loader, "
                "loss=fn) before"
            )
        args, kwargs = given_call(inputs)
        if self._scheduled is not None:
            return self._scheduled.backward(args, kwargs, targets)
        loss: Tensor = given.loss(given.models[0](*args, **kwargs), *targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def after_update(self, act: Callable[[], None]) -> None:
        """Does something after the update of the last batch: at once, unless that is still to come."""
        self._scheduled.after_update(act) if self._scheduled is not None else act()

    def scheduler_steps(self, scheduler: LRScheduler) -> None:
        """Called when a scheduler takes a step; a single process needs no word about it."""

    def past_end(self, scheduler: LRScheduler) -> str:
        """What to do about a scheduler that cannot take one more step; "" if PyTorch's error says it."""
        return ""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Called when any optimizer is about to take a step."""

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """Called when a GradScaler is about to step an optimizer."""

    def whole_norm(self, norm: Tensor, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Called when the norm of some gradients was computed: returns that of the whole model."""
        return norm

    def epochs(self, start: int, stop: int | None = None) -> Iterator[int]:
        """Counts epochs like `range(stop)` or `range(start, stop)`, and shows them in the progress line."""
        epochs = range(start) if stop is None else range(start, stop)
        for epoch in epochs:
            self._begin_epoch(epoch, epochs.stop)
            yield epoch

    def _begin_epoch(self, epoch: int, count: int) -> None:
        """The script begins an epoch, of `count`."""

    def count(self, batch: Sized) -> int:
        """How many examples of the present batch count: `len(batch)`, or 0 if this worker has borrowed it.

        In lockstep the last round of an epoch may have fewer batches than workers. The others get examples of
        another worker, so that they can take part in the step.
        """
        return self._counting.count(batch)

    def log(self, *, reduce: Any = "mean", **metrics: Any) -> None:
        """Records metrics in the run folder and the summary; a single process prints them.

        The summary and the progress line show one value for all workers: the mean of their latest values,
        weighted by the examples that each has trained on since it logged the same name before; by choice
        the lowest ("min"), the highest ("max"), or that of worker 0 ("rank0"), as for all that is no number.
        """
        check_reduce(reduce)
        print("  ".join(f"{name} {plain(value)}" for name, value in metrics.items()), flush=True)

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for all but the last `backward()` before a step: gradients are summed, not exchanged.

        The result is the same without it, but strategies that exchange gradients then exchange more often.
        """
        return nullcontext()

    @property
    def is_main(self) -> bool:
        """True on worker 0, and in a single process: there a script prints and saves."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """`print` on worker 0 only, or if it has died on the first worker that is alive."""
        if self._speaks:
            print(*values, **options)

    @property
    def _speaks(self) -> bool:
        """True on the worker that prints for all."""
        return True

    def mean(self, value: Any, weight: Any = 1) -> Any:
        """The mean of a number or tensor over all workers, exact and the same on all of them.

        `weight` is how much this worker's value counts, such as the examples that it is about (see `count`);
        a value of weight 0 does not count. All workers must call it at the same points of the script. A
        worker that has died, and is not replaced, does not count.
        """
        pair = checked(value, "session.mean()"), checked_weight(weight)
        self._counting.on_mean(pair[1])
        found = weighted_mean(self._gather(pair, script_call("session.mean()")))
        return found.to(value.device) if isinstance(value, Tensor) else found

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, by rank: numbers, texts, tensors of any shape, and lists of these.

        All workers must call it at the same points of the script. A worker that has died, and is not
        replaced, is left out.
        """
        found = self._gather(checked(value, "session.gather()"), script_call("session.gather()"))
        return [each.to(value.device) for each in found] if isinstance(value, Tensor) else found

    def barrier(self) -> None:
        """Waits until all workers have called it."""
        self._gather(None, script_call("session.barrier()", anywhere=True))

    def save(self, value: Any, path: str | os.PathLike[str]) -> None:
        """`torch.save` by worker 0 only; when it returns, the file is complete for all workers.

        All workers must call it at the same points of the script. A process that reads the path sees the old
        file or the new one, never a part. With several machines the file is on that of worker 0. If worker 0
        has died, the first of those that are alive saves.
        """
        call = script_call(f'session.save("{Path(path).name}")')
        if self.worker == min(self._gather(self.worker, call)):
            save_atomically(value, path)
            self.file_written(path, once=True)
        self._gather(None, call)

    def file_written(self, path: str | os.PathLike[str], once: bool = False) -> None:
        """Called when the script has written a file; `once`: no other worker writes it."""

    def _gather(self, value: Any, call: Call) -> list[Any]:
        """The values of all workers that are alive, by rank."""
        return [value]

    def predict(
        self, loader: Any, *, inputs: Inputs | None = None, to: To = "all", stream: bool = False
    ) -> Any:
        """The outputs of the model that all workers agree on, in the order of the loader's examples.

        The workers share the batches, which stay whole: the outputs have the bits of a single process. They
        are tensors, or tuples, lists and dicts of tensors, joined along dimension 0, on the CPU. The loader
        must not shuffle. The model is in evaluation mode meanwhile, without gradients. All workers must call
        it at the same points of the script.

        Of a batch the model gets what its `forward` needs: the first parts of a tuple, the keywords of a
        dict; or what the function `inputs` returns for it. With `to="main"` only worker 0 gets the outputs,
        and others None. With `stream=True` it is an iterator over the outputs of each batch, for outputs that
        do not fit into memory; all workers must iterate to the end.
        """
        return predict(self._together(), self._predictor, loader, inputs, to, stream)

    def _together(self) -> Together:
        """The workers that predict together."""
        return Together()

    def _predictor(self) -> Predictor:
        """The model that predicts. Called at the same point of the script on all workers."""
        return WholeModel(self._one_model())

    def _one_model(self) -> nn.Module:
        if self._given is None:
            raise UsageError("call session.prepare(model, optimizer, loader) before session.predict()")
        if len(self._given.models) > 1:
            raise UsageError(
                f"session.predict() predicts by one model, and session.prepare() got "
                f"{len(self._given.models)}: call those that session.consensus() returns"
            )
        return self._given.models[0]

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker besides model and optimizer: its strategy's, such as the residual of a
        codec, the position in the data, and the random number generators.

        Each worker saves its own: `torch.save(session.state_dict(), f"{session.worker}.pt")`.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; call it after `prepare()`, with the same strategy and model."""
        if state:
            raise UsageError(
                f"this state was saved under {state.get('strategy')}, but a single process has no strategy: "
                "load it in a run, or do not load it"
            )

    def consensus(self) -> Any:
        """The model that all workers agree on: the server's parameters, or the average of the replicas.

        A tuple of models if several were given to `prepare`. They are copies that neither training nor a
        later call changes. All workers must call it at the same points of the script.
        """
        if self._copies is None or self._given is None:
            raise UsageError("call session.prepare(model, optimizer, loader) before session.consensus()")
        self._given.check_owned()
        return one_or_all(self._copies.copy())


def check_reduce(reduce: object) -> None:
    if reduce not in REDUCTIONS:
        raise UsageError(f"session.log() can reduce by {', '.join(REDUCTIONS)}, not by {reduce!r}")


def plain(value: Any) -> Any:
    """Converts a value to a number or text for JSON."""
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, float):
        return round(value, 6) if abs(value) >= 1e-3 else float(f"{value:.6g}")  # a rate may be tiny
    return value if isinstance(value, int | str | bool | None) else str(value)
