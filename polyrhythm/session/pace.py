"""Pace: how many steps of a single process one step of a worker's scheduler stands for.

A script steps its scheduler once per batch, once every few batches or once per epoch. N workers share the
batches, so each of them takes 1/N of the steps, and outside lockstep a fast one takes more than a slow one. A
prepared scheduler is therefore advanced, at each `scheduler.step()` between two batches, to where it would be
in a single process after as many batches as the run has used:

    steps += (batches used by the run since the last call) / (batches of this worker since the last call)

In lockstep that is N, and what is left in the last round of an epoch. Otherwise the number of the batch in
the order of a single process says how far the run is; a scheduler that is stepped once per batch is also
advanced when the worker gets its next batch, so each batch is trained with the rate that it has in a single
process. A call after an epoch, or at the last batch of each epoch, is one step, as alone. A script that
accumulates gradients has batches left over at the end of an epoch, fewer than alone: they are one step if it
takes one there, and none if it counts from 0 in the next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol


class Count(NamedTuple):
    """How much a loader has given out since this process began."""

    own: int = 0  # batches of this worker
    run: int = 0  # batches that a single process would have had by now
    examples: int = 0  # of this worker; borrowed ones do not count

    def minus(self, other: Count) -> Count:
        return Count(*(one - two for one, two in zip(self, other, strict=True)))


class Progress:
    """How far the run is in its training data, as the loader of one worker sees it."""

    def __init__(self) -> None:
        self.count = Count()
        self.iterating = False  # the script is between two batches of an epoch
        self.epochs = 0  # of which this worker has had batches
        self.given = 0  # batches of the present epoch
        self.used = 0  # of them by the whole run, when this worker got its last one
        self._start: int | None = None  # the position from which `run` counts; None: the next epoch's first
        self.ahead = 0  # batches of the run that this worker had not seen when it was saved
        self.on_batch: list[Callable[[], None]] = []  # called before each batch

    def begin(self) -> None:
        self.iterating, self.given = True, 0

    def give(self, position: int, first: int, examples: int) -> None:
        """The script gets a batch.

        `position`: how many batches a single process would have had; `first`: those before this epoch.
        """
        own, run, before = self.count
        if self._start is None:
            self._start = first - run
        self.epochs += not self.given
        self.given += 1
        self.used = position - first
        self.count = Count(own, max(run, position - self._start), before)
        for each in self.on_batch:
            each()
        self.count = Count(own + 1, self.count.run, before + examples)

    def undo(self, count: Count) -> None:
        """The script has only looked at the batches of this epoch, before which the count was this."""
        self.count = count
        self.epochs -= bool(self.given)

    def leave(self, run: int) -> None:
        """The script has left an epoch early, and only what all workers have used of it counts."""
        self.count = self.count._replace(run=max(self.count.run, run))
        self._start = None

    def position(self, count: Count) -> int | None:
        """The position in the run to save for a count; None at the beginning of an epoch."""
        return None if self._start is None else self._start + count.run

    def resume(self, position: int | None, reached: int, within: bool) -> None:
        """Continues from a position, `within` an epoch or not; `reached`: the position of the run."""
        self._start = None if position is None else position - self.count.run
        self.ahead = 0 if position is None else max(0, reached - position)
        self.epochs = -1 if within else 0


class Paced(Protocol):
    """A training loader."""

    progress: Progress

    def __len__(self) -> int: ...

    def trained(self) -> Count:
        """The count without batches that the script has got and not trained on."""


class Pace:
    """How many steps of a single process one `scheduler.step()` of this worker stands for."""

    def __init__(self, loaders: Sequence[Paced]) -> None:
        self._loaders = loaders  # more may come
        self._last: list[Count] = []  # of each loader at the last call
        self._due = Fraction(0)  # of a step
        self._leader: int | None = None  # the loader whose batches are one step each
        self._at_ends: bool | None = None  # calls come at the last batch of each epoch; None: no call so far
        self._every = 0  # batches of this worker from one call to the next, inside an epoch
        self._used = 0  # batches of the epoch by the whole run, at the last call
        self._resumed: list[Count] = []  # of each loader, as the run had reached it when it was saved

    def _before(self) -> list[Count]:
        return self._last + [Count()] * (len(self._loaders) - len(self._last))

    def news(self) -> list[Count]:
        """What each loader has given since the last call; this is the call."""
        before, self._last = self._before(), [each.progress.count for each in self._loaders]
        return [now.minus(then) for now, then in zip(self._last, before, strict=True)]

    def steps(self) -> int:
        """Called at each `scheduler.step()`."""
        news, leader, self._leader = self.news(), self._leader, None
        own = max((each.own for each in news), default=0)
        if not own:
            return 1
        at = [each.own for each in news].index(own)
        progress = self._loaders[at].progress
        if not progress.iterating and not (own == 1 and at == leader):  # else it is of the last batch
            return 1  # once per epoch
        begins = self._at_ends is None and progress.epochs <= 1
        self._at_ends = (begins or self._at_ends is True) and _whole(self._loaders[at])
        if self._at_ends:
            return 1
        every, used, run = self._every, self._used, news[at].run
        self._used = progress.used
        if own < every and _whole(self._loaders[at]):  # what accumulation has left over is a step, too
            steps, self._due = math.ceil(self._due + Fraction(run, every)), Fraction(0)
            return steps
        if own > every == progress.given:  # it counts from 0 in each epoch, and drops what is left over
            whole = used + run - progress.used  # batches of the epoch before
            self._due += whole // every - used // every + Fraction(progress.used, every)
        else:
            self._due += Fraction(run, own)
            self._every, self._leader = own, at if own == 1 else None
        steps = int(self._due)
        self._due -= steps
        return steps

    def catch_up(self, loader: Paced) -> int:
        """Called before a worker outside lockstep gets a batch: the steps of other workers' batches since."""
        if self._leader is None or self._loaders[self._leader] is not loader:
            return 0
        last, now = self._last[self._leader], loader.progress.count
        if last.own != now.own or now.run - 1 <= last.run:
            return 0
        self._last[self._leader] = last._replace(run=now.run - 1)
        return now.run - 1 - last.run

    def state_dict(self) -> dict[str, Any]:
        news = zip(self._loaders, self._before(), strict=True)
        return {
            "news": [list(loader.trained().minus(then)) for loader, then in news],
            "due": list(self._due.as_integer_ratio()),
            "leader": self._leader,
            "at_ends": self._at_ends,
            "every": [self._every, self._used],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        progress = [loader.progress for loader in self._loaders]
        self._last = [
            each.count.minus(Count(*news)) for each, news in zip(progress, state["news"], strict=False)
        ]
        self._resumed = [each.count._replace(run=each.count.run + each.ahead) for each in progress]
        self._due = Fraction(*state["due"])
        self._leader, self._at_ends = state["leader"], state["at_ends"]
        self._every, self._used = state.get("every", (0, 0))

    def begin(self) -> None:
        """The scheduler is another than the one that was saved: it begins where the run was then."""
        self._last, self._due, self._leader = self._resumed, Fraction(0), None


def _whole(loader: Paced) -> bool:
    """True if the script has had all batches of an epoch of more than one."""
    try:
        return loader.progress.given >= len(loader) > 1
    except TypeError:  # a stream
        return False
