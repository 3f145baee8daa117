"""Balance: divides the examples of each round by the speeds of the workers, with `--balance`.

A round has as many examples as without it, one batch per worker, so the gradient of the union, the steps of
an epoch and all schedules stay the same. Only the division changes: a worker that computes three times as
fast gets three times as many. Its gradient is scaled as in any uneven round (see `sharing`).

Each worker measures its seconds per example. After the first few steps, and then every `EVERY` steps, all
workers exchange what they have measured and compute the same division. A DataLoader draws batches ahead, some
workers further than others, so a division begins at the first round that no worker has drawn.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyrhythm.core.requests import ShowNote
from polyrhythm.session.context import WorldContext
from polyrhythm.session.order import Order
from polyrhythm.session.part import Parts
from polyrhythm.session.places import Call, script_call
from polyrhythm.session.sharing import LockstepSharing, Place

FIRST = 5  # steps before the first exchange
EVERY = 32  # steps between two exchanges
GAIN = 0.05  # a division changes if rounds become shorter by this share: noise shall not change it
LEAST = 2  # examples of a worker: BatchNorm cannot train on one

Gather = Callable[[Any, Call], list[Any]]  # the values of all workers, by rank; and where it is called
START: Place = (0, 0)
WHOLE = (
    "--balance divides batches by the speeds of workers, but those of this DataLoader stay as they are, "
    "because it has a batch sampler of its own or reads a stream: give it batch_size=, or leave out --balance"
)


class Division(NamedTuple):
    """The share of a round that each worker gets."""

    shares: list[float]
    starts: list[Place]  # of each loader: the first round that is divided so

    def start(self, loader: int) -> Place:
        return self.starts[loader] if loader < len(self.starts) else START


class Balance:
    """The speed of this worker, and the divisions that all workers have agreed on.

    `gather` exchanges a value with all workers. It is called after the same steps on each.
    """

    def __init__(
        self,
        context: WorldContext,
        parts: Parts,
        workers: int,
        gather: Gather,
    ) -> None:
        self._context, self._parts, self._workers, self._gather = context, parts, workers, gather
        self._noted = context.me.rank != 0
        self._divisions = [Division([1 / workers] * workers, [])]
        self._sharings: list[BalancedSharing] = []
        self._seconds, self._examples = 0.0, 0  # of this worker at the last step
        self._measured: list[float] = []  # seconds per example, in each step since the last exchange
        self._left = FIRST  # steps until the next exchange

    def sharing(self, rank: int, averaged_with: Sequence[int] | None) -> LockstepSharing:
        """The sharing of the next loader."""
        self._sharings.append(BalancedSharing(rank, self._workers, averaged_with, self, len(self._sharings)))
        return self._sharings[-1]

    def shares(self, loader: int, place: Place) -> list[float] | None:
        """How a round of a loader is divided; None: evenly."""
        begun = (each for each in reversed(self._divisions) if place >= each.start(loader))
        shares = next(begun, self._divisions[0]).shares
        return shares if min(shares) < max(shares) else None

    def on_batch(self, examples: int, usual: int) -> None:
        """The script has got a batch of so many examples, where the usual number is another."""
        self._context.workload = max(examples, 1) / usual

    def after_step(self) -> None:
        """Called after each step of the first optimizer."""
        meter = self._parts.first.driver.meter
        seconds, examples = meter.compute_s - self._seconds, meter.samples - self._examples
        self._seconds, self._examples = meter.compute_s, meter.samples
        if examples > 0:
            self._measured.append(seconds / examples)
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._agree()

    def _agree(self) -> None:
        # The median, because a step may include an evaluation, or the compilation of the model.
        mine = statistics.median(self._measured) if self._measured else 0.0
        self._measured = []
        here = script_call("optimizer.step()", anywhere=True)
        found = self._gather([mine, [each.drawn for each in self._sharings]], here)
        shares = by_speed([seconds for seconds, _ in found], self._divisions[-1].shares)
        if shares is None:
            return
        drawn = list(zip(*(places for _, places in found), strict=True))  # by loader and worker
        ahead = [each for each in self._divisions if any(min(p) < each.start(n) for n, p in enumerate(drawn))]
        past = max(0, len(self._divisions) - len(ahead) - 1)  # those that no worker will draw with again
        self._divisions = [*self._divisions[past:], Division(shares, [max(each) for each in drawn])]
        if not self._noted:
            self._noted = True
            low, high = (f"{each * self._workers:.2f}" for each in (min(shares), max(shares)))
            text = f"balance: workers get {low} to {high} times batch_size, by their measured speeds"
            self._context.request(ShowNote(text))

    def state_dict(self) -> dict[str, Any]:
        """What the next run needs to divide as this one would."""
        return {
            "divisions": [list(each) for each in self._divisions],
            "measured": list(self._measured),
            "left": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._divisions = [
            Division(shares, [(epoch, number) for epoch, number in starts])
            for shares, starts in state["divisions"]
        ]
        self._measured, self._left = list(state["measured"]), state["left"]


def planned_balance(context: WorldContext, parts: Parts, workers: int, gather: Gather) -> Balance | None:
    """The balance of a run that was asked for one."""
    return Balance(context, parts, workers, gather) if context.plan.balance and workers > 1 else None


class BalancedSharing(LockstepSharing):
    """Lockstep sharing in which the examples of a round are divided by the speeds of the workers."""

    def __init__(
        self, rank: int, workers: int, averaged_with: Sequence[int] | None, balance: Balance, loader: int
    ) -> None:
        super().__init__(rank, workers, averaged_with)
        self._balance, self._loader = balance, loader
        self._batch_size = 1
        self.drawn = START  # the round after the last one that was drawn

    def _divide(self, examples: list[int], order: Order, place: Place) -> list[list[int]]:
        self._batch_size = order.batch_size
        self.drawn = place[0], place[1] + 1
        shares = self._balance.shares(self._loader, place)
        if shares is None or len(examples) < LEAST * self._workers:
            return super()._divide(examples, order, place)
        ends = itertools.accumulate(counts(len(examples), shares), initial=0)
        return [examples[start:end] for start, end in itertools.pairwise(ends)]

    def used(self, samples: int) -> None:
        self._balance.on_batch(samples, self._batch_size)


def by_speed(seconds: Sequence[float], shares: Sequence[float]) -> list[float] | None:
    """The shares with which all workers need the same time for a round; None to keep the present ones.

    `seconds`: of each worker per example; 0 if it is not known.
    """
    if min(seconds) <= 0:
        return None
    round_s = 1 / sum(1 / each for each in seconds)  # of a round with one example, divided by speed
    now = max(share * each for share, each in zip(shares, seconds, strict=True))
    return [round_s / each for each in seconds] if round_s < (1 - GAIN) * now else None


def counts(examples: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the shares, at least `LEAST` each; their sum is `examples`."""
    spare = examples - LEAST * len(shares)
    wanted = [max(share * examples - LEAST, 0.0) for share in shares]
    scale = spare / sum(wanted) if spare else 0.0
    found = [int(each * scale) for each in wanted]
    rest = sorted(range(len(shares)), key=lambda rank: found[rank] - wanted[rank] * scale)
    for rank in rest[: spare - sum(found)]:  # the largest fractions, and of equal ones the lower rank
        found[rank] += 1
    return [LEAST + each for each in found]
