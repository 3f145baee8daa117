"""Learning rate schedules by the examples that the whole run has seen.

A script steps its scheduler once per batch, once every few batches or once per epoch. N workers share the
batches, so each of them takes 1/N of the steps, and outside lockstep a fast one takes more than a slow one. A
scheduler that was passed to `session.prepare()` is therefore advanced, at each `scheduler.step()` between two
batches, to where it would be in a single process after as many batches as the run has used:

    steps += (batches used by the run since the last call) / (batches of this worker since the last call)

In lockstep that is N, and what is left in the last round of an epoch. Otherwise the number of the batch in
the order of a single process says how far the run is; a scheduler that is stepped once per batch is also
advanced when the worker gets its next batch, so each batch is trained with the rate that it has in a single
process. A call after an epoch is one step, as alone.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.context import WorldContext, session, world_context


class Progress:
    """How far the run is in its training data, as the loader of one worker sees it."""

    def __init__(self) -> None:
        self.iterating = False  # the script is between two batches of an epoch
        self.own = 0  # batches that this worker has got
        self.run = 0  # batches that a single process would have had by now
        self.on_batch: list[Callable[[], None]] = []  # called before each batch

    def give(self, position: int) -> None:
        """The script gets a batch; `position`: the value of `run` by its place in the order."""
        self.run = max(self.run, position)
        for call in self.on_batch:
            call()
        self.own += 1


class Paced(Protocol):
    """A training loader."""

    progress: Progress

    def __len__(self) -> int: ...


class Pace:
    """How many steps of a single process one `scheduler.step()` of this worker stands for."""

    def __init__(self, loaders: Sequence[Paced], workers: int) -> None:
        self._loaders, self._workers = loaders, workers
        self._last = [(0, 0)] * len(loaders)  # own and run of each loader at the last call
        self._begun = False
        self._due = Fraction(0)  # of a step
        self.each_batch = False  # the last call was once per batch

    def steps(self, resumed: bool) -> int:
        """Called at each `scheduler.step()`; `resumed`: the scheduler had been stepped before the first."""
        before, self._last = self._last, [(each.progress.own, each.progress.run) for each in self._loaders]
        news = [now[0] - then[0] for now, then in zip(self._last, before, strict=True)]
        begun, self._begun, self.each_batch = self._begun, True, False
        if not any(news):
            return 1
        at = news.index(max(news))
        loader, own = self._loaders[at], news[at]
        if not loader.progress.iterating or own >= len(loader) > 1:
            return 1  # once per epoch
        self.each_batch = own == 1
        run = self._last[at][1] - before[at][1]
        if resumed and not begun:  # the steps before this call have been counted
            run = min(run, own * self._workers)
        self._due += Fraction(run, own)
        steps = int(self._due)
        self._due -= steps
        return steps

    def catch_up(self, loader: Paced) -> int:
        """Called before a worker outside lockstep gets a batch: the steps of other workers' batches since."""
        at = self._loaders.index(loader)
        own, run = self._last[at]
        if not self.each_batch or own != loader.progress.own or loader.progress.run - 1 <= run:
            return 0
        self._last[at] = own, loader.progress.run - 1
        return loader.progress.run - 1 - run


def prepare_scheduler(
    scheduler: LRScheduler, context: WorldContext, strategy: Strategy, loaders: Sequence[Paced], workers: int
) -> None:
    """From here on the scheduler follows the run, not the steps of this worker."""
    if workers == 1:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        if not strategy.traits.lockstep or strategy.traits.survives:
            raise UsageError(
                f"ReduceLROnPlateau needs the mean metric of all workers, and under {strategy} they do "
                "not wait for each other: use allreduce, local:8 or sync, or a scheduler that counts steps"
            )
        _replace_step(scheduler, _averaging(type(scheduler).step, context))
    else:
        pace, step = Pace(loaders, workers), type(scheduler).step
        _replace_step(scheduler, _pacing(step, pace))
        for loader in () if strategy.traits.lockstep else loaders:
            loader.progress.on_batch.append(
                lambda loader=loader: _take_steps(scheduler, step, pace.catch_up(loader))  # type: ignore[misc]
            )


def _pacing(step: Callable[..., None], pace: Pace) -> Callable[..., None]:
    def paced(scheduler: Any, *epoch: Any, **named: Any) -> None:
        if epoch or named:  # the script says where
            return step(scheduler, *epoch, **named)
        _take_steps(scheduler, step, pace.steps(resumed=scheduler.last_epoch > 0))

    return paced


def _take_steps(scheduler: Any, step: Callable[..., None], count: int) -> None:
    """Takes so many steps, and none beyond the end of the schedule."""
    total = getattr(scheduler, "total_steps", None)
    for _ in range(count if total is None else min(count, total - scheduler.last_epoch)):
        step(scheduler)


def _averaging(step: Callable[..., None], context: WorldContext) -> Callable[..., None]:
    def averaged(scheduler: Any, metrics: Any, *rest: Any, **named: Any) -> None:
        mean = torch.tensor([float(metrics)], dtype=torch.float64)
        with torch.no_grad(), context.blocking():
            context.node.everyone.all_reduce(mean, op="mean")
        step(scheduler, mean.item(), *rest, **named)

    return averaged


def _replace_step(scheduler: LRScheduler, step: Callable[..., None]) -> None:
    """Replaces `step` by a class of its own: an attribute would be saved in the scheduler's `state_dict`."""
    cls = type(scheduler)

    def plain(self: LRScheduler, _: Any) -> Any:  # copies and pickles are of the original class
        return copyreg.__newobj__, (cls,), self.__dict__  # type: ignore[attr-defined]

    scheduler.__class__ = type(
        cls.__name__,
        (cls,),
        {"step": step, "follows_run": True, "__module__": cls.__module__, "__reduce_ex__": plain},
    )


_get_lr, _step = OneCycleLR.get_lr, LRScheduler.step


def watch_unprepared() -> None:
    """Has the session told of the steps of schedulers that were not prepared.

    Where workers differ in speed, they may also be stepped beyond their end.
    """
    OneCycleLR.get_lr = _get_lr_or_explain  # type: ignore[assignment,method-assign]
    LRScheduler.step = _step_and_tell  # type: ignore[assignment,method-assign]


def _step_and_tell(scheduler: LRScheduler, epoch: int | None = None) -> None:
    mine = session.get()
    if mine is not None and not getattr(scheduler, "follows_run", False):
        mine.scheduler_stepped(scheduler)
    _step(scheduler, epoch)


def _get_lr_or_explain(scheduler: OneCycleLR) -> Any:
    try:
        return _get_lr(scheduler)
    except ValueError as error:
        if world_context.get() is None or "Tried to step" not in str(error):
            raise
        raise UsageError(
            f"OneCycleLR ends after {scheduler.total_steps} steps, but this worker takes more: build it for "
            "the steps of a single process and pass it to session.prepare(model, optimizer, loader, "
            "scheduler), which lets it follow the whole run"
        ) from error
