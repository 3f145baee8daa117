"""ScheduledTraining: `session.backward()` of a divided model, by a schedule that needs to know the loss.

Under 1F1B and its relatives a call is a whole pass, like `loss.backward()`. Under the asynchronous schedules
a call gives a batch to the pipeline, and the gradient that `optimizer.step()` then applies is of an earlier
batch. While the pipeline fills there is none, and `step()` does nothing. A scheduler that the script steps is
stepped after the update of the batch that was given last. `flush` makes the updates that are left.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.core.errors import UsageError
from polyrhythm.core.events import Applied
from polyrhythm.core.split import ModelSplit
from polyrhythm.core.stopping import RunStopped
from polyrhythm.core.strategy import Strategy
from polyrhythm.parallel.lookahead import check_lookahead, discounted
from polyrhythm.parallel.loss import with_targets
from polyrhythm.parallel.micro_batches import Values, micro_batches
from polyrhythm.parallel.orders import order
from polyrhythm.parallel.partition import Mode
from polyrhythm.parallel.pipedream import AsynchronousPipeline, GivenPass
from polyrhythm.parallel.schedules import BatchPass
from polyrhythm.parallel.splits import Pipeline
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.divided_model import DividedModel
from polyrhythm.session.part import TrainingPart
from polyrhythm.session.patches import installed


class ScheduledTraining:
    """Trains one place of a model by 1F1B, interleaved 1F1B or zero bubble."""

    stashed = False

    def __init__(self, model: DividedModel, how: Pipeline) -> None:
        self._model, self._how = model, how
        self._stage, self._stages, self._last = model.section, how.size, model.column[-1]
        model.before_forward = self.check_forward

    def backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> Tensor:
        """Leaves the gradient of a batch in the parameters of this stage; returns the loss of the batch."""
        batch: BatchPass = self._model.call(
            lambda inputs, mode: self._run(inputs, mode, targets), args, kwargs
        )
        self._accumulate(batch.gradients)
        return batch.loss(self._last)

    def _run(self, inputs: Values, mode: Mode, targets: tuple[Any, ...]) -> BatchPass:
        batch = self._batch(inputs, mode, targets)
        batch.begin()
        for action in order(self._stage, self._stages, self._how.chunks, batch.pieces, self._how.apart):
            batch.run(action)
        return batch

    def _batch(self, inputs: Values, mode: Mode, targets: tuple[Any, ...]) -> BatchPass:
        if any(isinstance(each, Tensor) and each.requires_grad for each in inputs.values()):
            raise UsageError(
                f"an input of the model requires a gradient, which schedule={self._how.schedule} does not "
                "return: detach() it, or use schedule=gpipe"
            )
        pieces = micro_batches(inputs, self._model.batched, self._how.micro_batches)
        runner, plan = self._model.runner, self._model.plans_with_loss[mode]
        return BatchPass(runner, plan, with_targets(pieces, targets), self.stashed)

    def _accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds gradients to those of the parameters, as a backward pass of the script would."""
        parameters = self._model.runner.trained
        pairs = [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]
        if pairs:  # or all of its parameters are frozen, or the loss does not depend on them
            torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])

    def check_forward(self) -> None:
        """Called when the script calls the model."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"schedule={self._how.schedule} trains by session.backward(x, y): call that instead of the "
                "model, and evaluate under torch.no_grad()"
            )

    def after_update(self, act: Callable[[], None]) -> None:
        """Does something after the update of the batch that was given last."""
        act()

    def flush(self) -> None:
        """Makes all updates that are left."""

    def close(self) -> None:
        """Makes all updates that are left when the script is over; the run may be stopped meanwhile."""
        with suppress(RunStopped), installed():
            self.flush()
        self.flush()


@dataclass
class _Given:
    """What the session keeps of a batch in the pipeline."""

    weight: float  # of its gradient
    samples: int  # examples so far
    after: list[Callable[[], None]] = field(default_factory=list)  # what to do after its update


class AsynchronousTraining(ScheduledTraining):
    """Trains one stage of a model by PipeDream or 2BW."""

    def __init__(self, model: DividedModel, how: Pipeline, part: TrainingPart) -> None:
        super().__init__(model, how)
        ahead = self._stages - 1 - self._stage
        delay, heard = (ahead, self._stages - 1) if how.schedule == "pipedream" else (1, 1)
        self.stashed = ahead > 0  # or no step comes between the passes of a batch
        self._pipeline = AsynchronousPipeline(self._stage, self._stages, delay, heard)
        self._given: deque[_Given] = deque()
        self._ready: tuple[GivenPass, _Given] | None = None  # the gradients that the next step applies
        self._stepped, self._weight = True, 1.0
        self._samples = 0  # examples of the updates so far
        self._part, self._driver, self._replica = part, part.driver, part.replica
        self._on_backward, self._driver.on_backward = self._driver.on_backward, self._weigh
        self._take_step = part.optimizer.step
        part.optimizer.step = types.MethodType(self._make_step(), part.optimizer)  # type: ignore[method-assign]

    def backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> Tensor:
        if not self._stepped:
            raise UsageError(
                f"session.backward() was called twice before optimizer.step(): schedule={self._how.schedule} "
                "updates after every batch; use larger batches instead of accumulating gradients"
            )
        loss, ready = self._model.call(lambda inputs, mode: self._give(inputs, mode, targets), args, kwargs)
        self._stepped = False
        if ready is None:
            self._replica.gradients.passes += 1  # the batch is used
        else:
            self._deliver(ready)
        return loss  # type: ignore[no-any-return]

    def _give(self, inputs: Values, mode: Mode, targets: tuple[Any, ...]) -> tuple[Tensor, GivenPass | None]:
        self._on_backward()  # says so if the batch is of no loader
        self._given.append(_Given(self._replica.gradients.scaling, self._replica.samples))
        return self._pipeline.give(self._batch(inputs, mode, targets))

    def _deliver(self, ready: GivenPass) -> None:
        """Leaves the gradients of a batch in the parameters, with the weight that the batch had."""
        self._ready = ready, self._given.popleft()
        self._weight = self._ready[1].weight
        gradients = ready.batch.gradients
        if self._how.lookahead:
            gradients = discounted(self._part.optimizer, self._model.runner.trained, gradients)
        self._accumulate(gradients)

    def _weigh(self) -> None:
        self._replica.gradients.scale(self._weight)

    def _make_step(self) -> Callable[..., None]:
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None or self._stepped:
                raise UsageError(
                    f"under schedule={self._how.schedule} call optimizer.step() without a closure, once "
                    "after each session.backward()"
                )
            self._stepped = True
            if self._ready is None:  # the pipeline fills; others count an exchange here
                self._driver.exchanges += self._driver.exchanges_per_step
            else:
                self._apply()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or earlier schedulers would warn
        return step

    def _apply(self) -> None:
        assert self._ready is not None
        (ready, given), self._ready = self._ready, None
        self._samples = given.samples
        self._take_step()
        staleness, self._pipeline.version = self._pipeline.version - ready.version, self._pipeline.version + 1
        me = self._part.node.me.rank
        self._part.node.log(Applied(self._pipeline.version, me, ready.number, self._replica.steps, staleness))
        for act in given.after:
            act()

    def check_forward(self) -> None:
        super().check_forward()
        if not self._pipeline.empty:
            raise UsageError(
                f"under schedule={self._how.schedule} batches are in the pipeline, and each stage has "
                "parameters of another version: evaluate session.consensus(), which waits for them"
            )

    def after_update(self, act: Callable[[], None]) -> None:
        self._given[-1].after.append(act) if self._given else act()

    def flush(self) -> None:
        self._ready, self._stepped = None, True
        if self._part.node.stopping.stopped:  # all stages after the same update
            self._pipeline.drop()
            self._given.clear()
            self._replica.samples = self._samples
            return
        for ready in self._pipeline.drain():
            # Others count the exchanges of these updates where the pipeline was filled.
            self._driver.exchanges -= self._driver.exchanges_per_step
            self._part.optimizer.zero_grad()
            self._deliver(ready)
            self._apply()


def check_scheduled(strategy: Strategy, given: Arguments, models: int) -> None:
    """Raises UsageError if the schedule of a pipeline cannot work with what the script has prepared."""
    for how in strategy.splits:
        if not isinstance(how, Pipeline) or not how.needs_loss:
            continue
        if given.loss is None:
            raise UsageError(
                f"schedule={how.schedule} needs to know the loss: call session.prepare(model, optimizer, "
                "loader, loss=fn), and in the loop session.backward(x, y) in place of loss.backward()"
            )
        if isinstance(given.loss, nn.Module) and any(each.requires_grad for each in given.loss.parameters()):
            raise UsageError(
                f"schedule={how.schedule} needs a loss without parameters to train: make these parameters "
                "part of the model"
            )
        if how.lookahead:
            check_lookahead(given.optimizers[0])
        if how.asynchronous and given.schedulers and models > 1:
            raise UsageError(
                f"under {strategy} a prepared scheduler would follow batches that are still in the pipeline: "
                "do not pass it to session.prepare(), and build it for the steps of one model"
            )


def scheduled_training(
    model: DividedModel, splits: Sequence[ModelSplit], part: TrainingPart
) -> ScheduledTraining | None:
    """How `session.backward()` trains a divided model; None: by calling it, as the script would."""
    for how in splits:
        if isinstance(how, Pipeline) and how.needs_loss:
            return (
                AsynchronousTraining(model, how, part) if how.asynchronous else ScheduledTraining(model, how)
            )
    return None
