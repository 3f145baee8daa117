"""Learning rate schedules by the examples that the whole run has seen.

A scheduler that was passed to `session.prepare()` is advanced, at each `scheduler.step()`, to where it would
be in a single process after as many batches as the run has used; `pace` has the rule. It goes on from the
step at which the script has left it. Its own `state_dict` is that of a plain scheduler, and what the run has
used since its last step is part of `session.state_dict()`. So either may be loaded without the other, and in
any order.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from polyrhythm.core.errors import UsageError
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.exchange import weighted_mean
from polyrhythm.session.own_rates import OwnRates
from polyrhythm.session.pace import Pace, Paced
from polyrhythm.session.places import Call, script_call

OVER = (
    "{name} was built for {total} steps and takes more: a prepared scheduler counts the batches of all "
    "workers, so if the script counts its own steps, build it for session.workers times as many"
)
UNPREPARED = (
    "{name} ends after {total} steps, but this worker takes more: build it for the steps of a single process "
    "and pass it to session.prepare(model, optimizer, loader, scheduler), which lets it follow the whole run"
)
PLATEAU = (
    "each worker steps its own ReduceLROnPlateau: give all the same value, as in "
    "scheduler.step(session.mean(loss)), or their learning rates will differ"
)
PER_BATCH = (
    "{name} is stepped once per batch and was not passed to session.prepare(): it counts the steps of one "
    "worker, of which a run has fewer than a single process; pass it to prepare(), with the length for a "
    "single process"
)


@dataclass
class _Prepared:
    scheduler: LRScheduler
    step: Callable[..., None]  # the scheduler's own
    pace: Pace
    ahead: int = 0  # its steps beyond the calls of the script, each of which is a step in a single process
    saved: Sequence[int | None] | None = None  # its steps in the saved state, until it is used

    @property
    def steps(self) -> list[int | None]:
        """The steps that the scheduler, and those inside it, have taken."""
        return [getattr(each, "last_epoch", None) for each in _nested(self.scheduler)]

    def settle(self) -> Pace:
        """Called at each use: the script may load the state of the scheduler after that of the session."""
        if self.saved is not None and self.saved != self.steps:
            self.pace.begin()
            self.ahead = 0
        self.saved = None
        return self.pace


class Schedules:
    """The prepared schedulers of one worker, and the training loaders that they follow."""

    def __init__(
        self,
        strategy: Strategy,
        loaders: Sequence[Paced],
        evaluated: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        """`evaluated`: the examples of evaluation loaders that this worker has had."""
        self._strategy, self._loaders, self._evaluated, self._note = strategy, loaders, evaluated, note
        self._prepared: list[_Prepared] = []
        self._exempt: list[LRScheduler] = []
        self._others: dict[int, int] = {}  # the batches at the last step of other schedulers, by id
        self.own_rates = OwnRates(lambda: sum(each.progress.epochs for each in loaders), note)

    def follow(self, loader: Paced) -> None:
        """A loader is new."""
        if not self._strategy.traits.lockstep:
            loader.progress.on_batch.append(lambda: self._catch_up(loader))

    def _catch_up(self, loader: Paced) -> None:
        for each in self._prepared:
            self._take_steps(each, each.settle().catch_up(loader), calls=0)

    def exempt(self, scheduler: LRScheduler) -> None:
        """The scheduler counts the steps of one worker, and was built for these."""
        self._exempt.append(scheduler)

    def on_step(self, scheduler: LRScheduler) -> None:
        """Called at each step of any scheduler; notes those that a script should have prepared."""
        self.own_rates.scheduled()
        known = [*self._exempt, *(each.scheduler for each in self._prepared)]
        if any(scheduler is each for one in known for each in _nested(one)):
            return
        if isinstance(scheduler, ReduceLROnPlateau) and not self._strategy.traits.lockstep:
            self._note(PLATEAU)
        own = sum(loader.progress.count.own for loader in self._loaders)
        last, self._others[id(scheduler)] = self._others.get(id(scheduler)), own
        if (
            any(loader.progress.iterating for loader in self._loaders)
            and last is not None
            and own - last == 1
        ):
            self._note(PER_BATCH.format(name=type(scheduler).__name__))

    def past_end(self, scheduler: LRScheduler) -> str:
        """What to do about a scheduler that cannot take one more step; "" if it is an error alone, too."""
        if any(scheduler is each.scheduler for each in self._prepared):
            return ""
        inside = any(scheduler is each for one in self._prepared for each in _nested(one.scheduler))
        total = getattr(scheduler, "total_steps", None)
        return (OVER if inside else UNPREPARED).format(name=type(scheduler).__name__, total=total)

    def prepare(self, scheduler: LRScheduler, gather: Callable[[Any, Call], list[Any]]) -> None:
        """From here on the scheduler follows the run, not the steps of this worker."""
        prepared = _Prepared(scheduler, type(scheduler).step, Pace(self._loaders))
        if isinstance(scheduler, ReduceLROnPlateau):
            traits = self._strategy.traits
            if not traits.lockstep or traits.survives:
                raise UsageError(
                    "ReduceLROnPlateau needs the mean metric of all workers, and under "
                    f"{self._strategy} they do not wait for each other: use allreduce, local:8 or sync, or a "
                    "scheduler that counts steps"
                )
            step = self._averaging(prepared, gather)
        else:
            step = self._pacing(prepared)
        self._prepared.append(prepared)
        _replace_step(scheduler, step)

    def _pacing(self, prepared: _Prepared) -> Callable[..., None]:
        def paced(scheduler: LRScheduler, *epoch: Any, **named: Any) -> None:
            if epoch or named:  # the script says where
                return prepared.step(scheduler, *epoch, **named)
            self._take_steps(prepared, prepared.settle().steps(), calls=1)

        return paced

    def _take_steps(self, prepared: _Prepared, count: int, calls: int) -> None:
        """Takes so many steps for so many calls of the script.

        A schedule that has an end stops there, because a script that counts its own steps would not go beyond
        it in a single process. If it would, its next step is taken, which is an error under OneCycleLR.
        """
        scheduler: Any = prepared.scheduler
        end, before = getattr(scheduler, "total_steps", None), getattr(scheduler, "last_epoch", 0)
        usual = end or (scheduler.T_max if isinstance(scheduler, CosineAnnealingLR) else None)
        alone = before - prepared.ahead + calls  # its steps in a single process, at least
        beyond = end is not None and alone > end
        if usual is not None and before >= usual and (end or count > 1) and count and not beyond:
            self._note(OVER.format(name=type(scheduler).__name__, total=usual))
        if end is not None:
            count = calls if beyond else max(0, min(count, end - before))
        self.own_rates.scheduled()
        for _ in range(count):
            prepared.step(scheduler)
        prepared.ahead = before + count - alone

    def _averaging(
        self, prepared: _Prepared, gather: Callable[[Any, Call], list[Any]]
    ) -> Callable[..., None]:
        evaluated = 0  # at the last call

        def averaged(scheduler: LRScheduler, metrics: Any, *rest: Any, **named: Any) -> None:
            nonlocal evaluated
            before, evaluated = evaluated, self._evaluated()
            mine = float(metrics), evaluated - before, sum(each.examples for each in prepared.settle().news())
            found = gather(mine, script_call("scheduler.step()", anywhere=True))
            prepared.step(scheduler, mean_metric(found), *rest, **named)

        return averaged

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {**each.settle().state_dict(), "steps": each.steps, "ahead": each.ahead}
            for each in self._prepared
        ]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from a saved state; nothing is to be loaded where either run has no schedulers."""
        if states and self._prepared and len(states) != len(self._prepared):
            raise UsageError(
                f"this state was saved with {len(states)} schedulers, but session.prepare() got "
                f"{len(self._prepared)}: pass the same schedulers in the same order"
            )
        for each, state in zip(self._prepared, states, strict=False):
            each.pace.load_state_dict(state)
            each.saved, each.ahead = state["steps"], state.get("ahead", 0)


def mean_metric(found: Sequence[tuple[float, int, int]]) -> float:
    """The mean metric of all workers by examples: of evaluation since the last call, or else of training.

    `found`: of each worker the metric, and how many examples of both it has had.
    """
    for kind in (1, 2):
        if any(each[kind] for each in found):
            return float(weighted_mean([(each[0], each[kind]) for each in found]))
    return float(weighted_mean([(each[0], 1) for each in found]))


def _nested(scheduler: Any) -> list[LRScheduler]:
    """A scheduler and those that it steps, as SequentialLR and ChainedScheduler do."""
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(found for each in inner for found in _nested(each))]


def _replace_step(scheduler: LRScheduler, step: Callable[..., None]) -> None:
    """Replaces `step` by a class of its own: an attribute would be saved in the scheduler's `state_dict`."""
    cls = type(scheduler)

    def plain(self: LRScheduler, _: Any) -> Any:  # copies and pickles are of the original class
        return copyreg.__newobj__, (cls,), self.__dict__  # type: ignore[attr-defined]

    scheduler.__class__ = type(
        cls.__name__, (cls,), {"step": step, "__module__": cls.__module__, "__reduce_ex__": plain}
    )
