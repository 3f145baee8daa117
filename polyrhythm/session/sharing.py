"""How the batches of an epoch are shared among workers.

All workers draw the same order of batches (see `order`), so no indexes are sent.

- Workers in lockstep divide the order into rounds of one batch per worker. The examples of an incomplete last
  round are divided evenly; with `drop_last=True` some workers get full batches, and the others none. A worker
  that gets none borrows examples whose gradient is scaled by 0, so that it can take part in the step. No
  example is dropped or counted twice.
- Other workers lease batches from the coordinator as they go: a fast worker takes more, and each example is
  still used once per epoch.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from polyrhythm.core.lease import Lease
from polyrhythm.core.strategy import Strategy
from polyrhythm.session.order import Order, SampledOrder

Place = tuple[int, int]  # an epoch, and a round of it
DUE = 1024  # rounds that are assigned to a worker at a time where the coordinator counts them


class ScaledBatch(NamedTuple):
    """One batch of a worker, and the factor by which its gradient is scaled: 0 if the batch is borrowed.

    It is a list of indexes, or a batch of a stream.
    """

    batch: Any
    scale: float
    position: int  # how many batches a single process would have had when the run has had this one


class Position(NamedTuple):
    """Where a loader is: the epoch, how many batches of it this worker has trained on, and the sharing's own.

    `shared` is empty in lockstep, where epoch and batches say it all. `run` is where the schedules of this
    worker are (see `Progress.position`), and `reached` where the run is.
    """

    epoch: int
    batches: int
    shared: dict[str, Any]
    run: int | None = None
    reached: int = 0


class Sharing(ABC):
    """Decides which batches of an epoch one worker gets."""

    borrows = False  # True if the worker may get examples of another worker, which do not count
    apart = 1  # workers whose batches the position of a batch does not tell

    @abstractmethod
    def length(self, order: Order) -> int:
        """About how many batches the worker gets in an epoch."""

    def shortage(self, order: Order, strategy: Strategy) -> str:
        """A note for the person if there are too few batches; "" if not."""
        return ""

    def begin(self, epoch: int) -> int | None:
        """Called before an epoch. Returns its number, or None if it is over for this worker."""
        return epoch

    @abstractmethod
    def batches(
        self, order: Order, epoch: int, start: int, untrained: Callable[[], int]
    ) -> Iterator[ScaledBatch]:
        """The batches of an epoch for this worker, without the first `start`, which it has trained on.

        `untrained`: how many batches the script has and has not trained on.
        """

    def used(self, samples: int) -> None:
        """Called when the script gets a batch with so many examples that count."""

    def end(self, complete: bool) -> None:
        """Called after an epoch in which the worker trained; not `complete` if the script left it early."""

    def peeked(self, given: int) -> None:
        """Called instead if the script left it early and had not trained on the `given` batches."""

    def trained(self, given: bool) -> None:
        """Called later: whether the script has trained on what it was given before it left."""

    def position(self, untrained: int) -> dict[str, Any]:
        """What the next run needs to continue here."""
        return {}

    def reached(self, order: Order, shared: dict[str, Any]) -> int:
        """How many batches the run had at a position, if some of them may be unknown to this worker."""
        return 0

    def resume(self, position: Position) -> None:
        """Continues from a position that was saved."""


class Coordination(Protocol):
    """The requests of `LeasedSharing` to the coordinator, for one loader of one worker."""

    def take(self, epoch: int, batches: int, unseen: int) -> Lease | None:
        """The next batches of an epoch; `batches`: how many it has, `unseen`: leased and not trained on."""

    def give_back(self, leases: list[Lease], peeked: bool) -> None:
        """Returns batches that this worker will not train on."""

    def position(self) -> dict[str, Any]:
        """Which batches of each epoch have been leased by now."""

    def resume(self, position: Position, held: list[Lease]) -> None:
        """Continues from a position; returns when all workers have."""


class LeasedSharing(Sharing):
    """Leases batches from the coordinator, a few at a time."""

    def __init__(self, workers: int, coordinator: Coordination) -> None:
        self.apart = self._workers = workers
        self._coordinator = coordinator
        self._given: list[tuple[int, int]] = []  # epoch and number of each batch that the script has got
        self._ahead: deque[tuple[int, int]] = deque()  # leased, and not given to the script yet

    def length(self, order: Order) -> int:
        return math.ceil(len(order) / self._workers)

    def shortage(self, order: Order, strategy: Strategy) -> str:
        """Some workers get no batch, and a script may use the last loss after its loop."""
        try:
            batches = len(order)
        except TypeError:
            return ""  # a stream that does not say
        if not 0 < batches < self._workers:
            return ""
        examples = order.examples if isinstance(order, SampledOrder) and order.splits else 0
        size = examples // self._workers
        smaller = f"batch_size={size} or less, or " if size else ""
        return (
            f"the training loader has {batches} batches for {self._workers} workers: under {strategy} some "
            f"get none in an epoch; use {smaller}--workers {batches}"
        )

    def batches(
        self, order: Order, epoch: int, start: int, untrained: Callable[[], int]
    ) -> Iterator[ScaledBatch]:
        drawn = order.epoch(epoch)
        for held, number in tuple(self._ahead):  # when the run was saved
            yield ScaledBatch(order.epoch(held).get(number), 1.0, order.before(held) + number + 1)
        while (lease := self._take(epoch, drawn.count, untrained())) is not None:
            numbers = range(lease.first, lease.end)
            self._ahead += [(lease.epoch, number) for number in numbers]
            for number in numbers:
                batch = order.epoch(lease.epoch).get(number)
                if batch is None:  # the epoch is shorter than its sampler said, or did not say
                    self._ahead = deque(each for each in self._ahead if each < (lease.epoch, number))
                    break
                yield ScaledBatch(batch, 1.0, order.before(lease.epoch) + number + 1)

    def _take(self, epoch: int, batches: int, untrained: int) -> Lease | None:
        del self._given[: len(self._given) - untrained]  # an epoch may be endless
        return self._coordinator.take(epoch, batches, untrained + len(self._ahead))

    def used(self, samples: int) -> None:
        self._given.append(self._ahead.popleft())

    def end(self, complete: bool) -> None:
        if not complete:
            self._give_back(self._ahead, peeked=False)
        self._given, self._ahead = [], deque()

    def peeked(self, given: int) -> None:
        self._give_back(self._ahead, peeked=True)
        self._given, self._ahead = self._given[len(self._given) - given :], deque()

    def trained(self, given: bool) -> None:
        if not given:
            self._give_back(self._given, peeked=True)
        self._given = []

    def _give_back(self, batches: Iterable[tuple[int, int]], peeked: bool) -> None:
        self._coordinator.give_back(_leases(batches), peeked)

    def position(self, untrained: int) -> dict[str, Any]:
        held = [*self._given[len(self._given) - untrained :], *self._ahead]
        return {**self._coordinator.position(), "held": held}

    def reached(self, order: Order, shared: dict[str, Any]) -> int:
        leased: dict[int, int] = shared["leased"]
        return max((order.before(epoch) + count for epoch, count in leased.items()), default=0)

    def resume(self, position: Position) -> None:
        self._ahead = deque((epoch, number) for epoch, number in position.shared["held"])
        self._coordinator.resume(position, _leases(self._ahead))


def _leases(batches: Iterable[tuple[int, int]]) -> list[Lease]:
    """Consecutive batches as one lease each."""
    leases: list[Lease] = []
    for epoch, number in batches:
        last = leases[-1] if leases else None
        if last is not None and (last.epoch, last.end) == (epoch, number):
            leases[-1] = Lease(epoch, last.first, last.count + 1)
        else:
            leases.append(Lease(epoch, number, 1))
    return leases


class LockstepSharing(Sharing):
    """Divides an epoch into rounds of one batch per worker.

    `averaged_with` are the ranks over which gradients are averaged, all by default.
    """

    def __init__(self, rank: int, workers: int, averaged_with: Sequence[int] | None = None) -> None:
        self._rank, self._workers = rank, workers
        self._averaged_with = range(workers) if averaged_with is None else averaged_with
        self.borrows = workers > 1

    def length(self, order: Order) -> int:
        if not isinstance(order, SampledOrder) or not order.splits:
            return math.ceil(len(order) / self._workers)
        return math.ceil(order.examples / (self._workers * order.batch_size))

    def batches(
        self, order: Order, epoch: int, start: int, untrained: Callable[[], int]
    ) -> Iterator[ScaledBatch]:
        """One batch per round, with the scale that makes a plain mean over workers the mean over examples.

        In a complete round it is 1. A worker with n of the round's examples has n * workers / examples,
        because its batch mean stands for n examples and the mean over workers divides by their number.
        """
        rounds = self._divided(order, epoch) if order.splits else self._whole(order, epoch)
        yield from itertools.islice(rounds, start, None)

    def _whole(self, order: Order, epoch: int) -> Iterator[ScaledBatch]:
        """Rounds of batches that stay as they are."""
        batches, position = iter(order.epoch(epoch)), order.before(epoch)
        while round_ := list(itertools.islice(batches, self._workers)):
            mine = self._rank < len(round_)
            position += len(round_)
            yield ScaledBatch(
                round_[self._rank if mine else 0], self._scale([len(each) for each in round_]), position
            )

    def _divided(self, order: Order, epoch: int) -> Iterator[ScaledBatch]:
        """Rounds whose examples are divided."""
        indexes, used = (index for batch in order.epoch(epoch) for index in batch), 0
        for number in itertools.count():
            examples = list(itertools.islice(indexes, self._workers * order.batch_size))
            if not examples:
                return
            batches = self._divide(examples, order, (epoch, number))
            used += len(examples)
            yield ScaledBatch(
                batches[self._rank if self._rank < len(batches) else 0],
                self._scale([len(each) for each in batches]),
                order.before(epoch) + math.ceil(used / order.batch_size),
            )

    def _divide(self, examples: list[int], order: Order, place: Place) -> list[list[int]]:
        """The batches of a round, of the workers that get one: all of the same size, if possible."""
        sharing, fewest = self._workers, math.ceil(len(examples) / order.batch_size)
        if order.drop_last:  # the script wants full batches
            sharing = fewest
        elif len(examples) < self._workers * order.batch_size:
            # At least two examples per worker, if possible: BatchNorm cannot train on one.
            sharing = min(sharing, max(fewest, len(examples) // 2))
        return [examples[rank::sharing] for rank in range(sharing)]

    def _scale(self, counts: Sequence[int]) -> float:
        """The scale of this worker's gradient in a round; `counts`: the examples of each worker with some."""
        if self._rank >= len(counts):
            return 0.0
        together = sum(counts[rank] for rank in self._averaged_with if rank < len(counts))
        return counts[self._rank] * len(self._averaged_with) / together


class CohortPlace(NamedTuple):
    """The place of a worker in the cohort that shares an epoch."""

    rank: int
    workers: int
    epoch: int


class CohortSharing(LockstepSharing):
    """Lockstep sharing among workers that may die and be replaced: the cohort is fixed for each epoch.

    `join(epoch)` returns the worker's place, or None if the epoch is over. `due(examples)` reports how many
    more examples are for this worker alone; a negative number if it leaves some unused.
    """

    def __init__(
        self, workers: int, join: Callable[[int], CohortPlace | None], due: Callable[[int], None]
    ) -> None:
        super().__init__(0, workers)
        self._join, self._due = join, due
        self._unused = 0  # examples of this epoch for this worker that it has not used yet
        self._joined: int | None = None  # an epoch that was begun to look at it, and not trained in

    def begin(self, epoch: int) -> int | None:
        if epoch == self._joined:
            return epoch
        place = self._join(epoch)
        if place is None:
            return None
        self._rank, self._workers, self._joined = place.rank, place.workers, place.epoch
        self._averaged_with = range(place.workers)
        return place.epoch

    def batches(
        self, order: Order, epoch: int, start: int, untrained: Callable[[], int]
    ) -> Iterator[ScaledBatch]:
        batches = super().batches(order, epoch, start, untrained)
        # The batches of a stream are loaded already: one at a time.
        while some := list(itertools.islice(batches, DUE if isinstance(order, SampledOrder) else 1)):
            more = sum(len(each.batch) for each in some if each.scale)
            self._unused += more
            self._due(more)
            yield from some

    def used(self, samples: int) -> None:
        self._unused -= samples

    def end(self, complete: bool) -> None:
        self._joined = None
        self._return_unused()

    def peeked(self, given: int) -> None:
        self._return_unused()

    def trained(self, given: bool) -> None:
        if given:
            self._joined = None

    def _return_unused(self) -> None:
        if self._unused:
            self._due(-self._unused)
            self._unused = 0
