"""SharedLoader: the training loader of a worker, which gives out its share of the batches.

One iteration over a training loader is one epoch. These rules say what else a script may do with it:

- A script that takes some batches, leaves the loop and does not train on them has only looked: the epoch has
  not begun, and the next iteration has all of its batches. Whether it trains is seen by its backward passes.
- There is one iteration at a time. A new one ends the one before; to go on with the older one is an error.
- To evaluate on a training loader is an error, because each worker would see only a part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from polyrhythm.core.errors import UsageError
from polyrhythm.session.given import GivenBatch
from polyrhythm.session.order import Order, SampledOrder, copy_of, order_of
from polyrhythm.session.pace import Count, Progress
from polyrhythm.session.random_states import OwnNumbers
from polyrhythm.session.sharing import Position, Sharing

AHEAD = 2  # batches that a trainer may draw before it puts the model into training mode
SAMPLED = 1 << 14  # `SharedLoader.sample` chooses from so many batches at most

EVALUATED = (
    "this loader divides the training data among workers, and is used to evaluate: pass it as "
    "session.prepare(..., evaluate=loader), or use a DataLoader that was not passed to prepare()"
)
OLDER = (
    "a loader that was passed to session.prepare() has one iteration at a time, and a newer one has begun: "
    "make a second DataLoader, and pass it to prepare() too if it is for training"
)
NO_TRAINING = (
    "a training loader was read to its end without a backward pass: in a run each worker sees only its "
    "share; for something about all of the data use a DataLoader that was not passed to session.prepare()"
)
FOREIGN = (
    "this state was not saved by a loader of a run (a StatefulDataLoader saves another in a single process): "
    "load what the loader that session.prepare() returned has saved, or use session.state_dict()"
)


class Training:
    """What a shared loader must know of the training. The default: the script trains on each batch."""

    passes = 0  # backward passes and steps so far
    evaluates = False  # all models are in evaluation mode

    def begin(self) -> None:
        """The script begins an epoch."""

    def on_give(self, loader: SharedLoader, examples: int, counts: bool) -> None:
        """The script gets a batch of a loader; not `counts` if it is borrowed."""

    def on_batch(self, samples: int, batch: GivenBatch) -> None:
        """The script gets a batch, of whose examples so many count."""
        self.passes += 1
        batch.done = True

    def on_end(self) -> None:
        """The script has read the loader to its end, or has left it."""

    def settle(self) -> None:
        """Marks the batches that the script has trained on."""

    def on_unused(self, samples: int) -> None:
        """The script has not trained on these examples after all."""

    def on_drawn(self, epoch: int, digest: str, data: str) -> None:
        """This worker trains on an epoch of this training set, in the order with this hash."""

    def on_resumed(self, epoch: int, batches: int) -> None:
        """Workers in lockstep continue from this batch of an epoch."""

    def note(self, text: str) -> None:
        """Tells the person something, once."""


class _Iteration:
    """One iteration of the script over the loader."""

    def __init__(self, passes: int, progress: Progress) -> None:
        self.passes = passes  # of the training when it began
        self.given = 0  # batches
        self._batches: deque[GivenBatch] = deque()  # the last ones, which may not be done
        self.begun = progress.count  # when it began
        self.digest = ""  # of the order of the epoch, until the other workers have been compared

    def give(self, batch: GivenBatch) -> None:
        self._drop()
        self._batches.append(batch)
        self.given += 1

    @property
    def untrained(self) -> Sequence[GivenBatch]:
        """The batches that the script has got and not trained on."""
        self._drop()
        return self._batches

    def _drop(self) -> None:
        while self._batches and self._batches[0].done:
            self._batches.popleft()


class _Drawn(NamedTuple):
    """A batch that is drawn and not given to the script yet."""

    examples: int
    scale: float
    position: int  # see `ScaledBatch`


class SharedLoader(DataLoader[Any]):
    """Iterates over this worker's batches; otherwise behaves like the DataLoader it wraps.

    `processes`: the DataLoader may start worker processes.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sharing: Sharing,
        seed: int,
        training: Training | None = None,
        processes: bool = True,
    ) -> None:
        # Not the constructor of DataLoader: all of its attributes are those of `loader`.
        self.loader = loader
        self.epoch = 0
        self.begun = 0  # epochs that the script has begun, also before it resumed
        self._left_early = False  # the script did not finish the last epoch that it trained on
        self.empty = False  # the last iteration had no batch
        self.watch: Callable[[Any], None] | None = None  # called with each batch
        # Called with a function to call before training on a batch: for loops that draw batches ahead.
        self.defer: Callable[[Callable[[], None]], None] = lambda count: count()
        self.order: Order = order_of(loader, seed, processes)
        self._sharing, self._training = sharing, training or Training()
        self._start = 0  # batches of this epoch that were trained on before the run was resumed
        self.iteration: _Iteration | None = None  # open
        self._looked: _Iteration | None = None  # ended before the script trained
        self._resumed = False
        self.progress = Progress()
        self._prefetched: deque[_Drawn] = deque()
        self._inner = self._make_inner(processes)
        self._DataLoader__initialized = True  # from here on DataLoader refuses to change what it refuses

    def _make_inner(self, processes: bool) -> DataLoader[Any] | None:
        if not isinstance(self.order, SampledOrder):
            return None
        return copy_of(
            self.loader, processes, batch_sampler=_Batches(self), collate_fn=self.loader.collate_fn
        )

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, as in an unpickled copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self._sharing.length(self.order)

    # --- iterating ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._end(complete=False)  # one that is still open
        self._settle()
        self._training.begin()
        mine = self.iteration = _Iteration(self._training.passes, self.progress)
        self.progress.begin()
        complete = False
        try:
            for batch in self._load():
                self._give(mine, batch)
                if self.watch is not None:
                    self.watch(batch)
                yield batch
                if self.iteration is not mine:
                    raise UsageError(OLDER)
                self._check_use(mine)
            self._check_use(mine)
            complete = True
        finally:
            if self.iteration is mine:
                self._end(complete)

    def _load(self) -> Iterator[Any]:
        if self._inner is None:
            return (each.batch for each in self._batches())
        if not self._resumed:
            return iter(self._inner)
        self._resumed = False
        with OwnNumbers(0):  # a DataLoader draws a number for each iteration, and this one has begun before
            return iter(self._inner)

    def _batches(self) -> Iterator[Any]:
        """The batches of this worker in the current epoch: lists of indexes, or loaded batches."""
        self.begun = self.epoch + 1
        epoch = self._sharing.begin(self.epoch)
        if epoch is None:
            return
        if epoch != self.epoch:
            self.epoch, self._start, self.begun = epoch, 0, epoch + 1
        if self.iteration is not None:
            self.iteration.digest = self.order.digest(epoch)
        for batch, scale, position in self._sharing.batches(self.order, epoch, self._start, self._untrained):
            self._prefetched.append(_Drawn(len(batch), scale, position))
            yield batch

    def indexes(self) -> Iterator[Sequence[int]]:
        """The examples of each batch of this worker in the current epoch."""
        return self._batches()

    def _give(self, iteration: _Iteration, content: Any) -> None:
        """The script gets the next batch."""
        examples, scale, position = self._prefetched.popleft()
        samples, first = examples if scale else 0, self.order.before(self.epoch)
        self._training.on_give(self, examples, counts=scale > 0)
        batch = GivenBatch(content, scale, self.progress.count)
        iteration.give(batch)

        def count() -> None:
            self.progress.give(position, first, samples)
            self._training.on_batch(samples, batch)

        self.defer(count)
        self._sharing.used(samples)

    def _check_use(self, iteration: _Iteration) -> None:
        """Called when the script wants another batch."""
        if self._training.passes != iteration.passes:
            self._compare(iteration)
        elif not torch.is_grad_enabled() or (iteration.given > AHEAD and self._training.evaluates):
            raise UsageError(EVALUATED)

    def _compare(self, iteration: _Iteration) -> None:
        """Has the order and the training set compared with those of the other workers, once."""
        if iteration.digest:
            self._training.on_drawn(self.epoch, iteration.digest, self.order.identity)
            iteration.digest = ""

    def _untrained(self) -> int:
        """How many batches the script has got and not trained on."""
        self._training.settle()
        last = self.iteration or self._looked
        return 0 if last is None else len(last.untrained)

    def trained(self) -> Count:
        """The progress without batches that the script has got and not trained on."""
        self._training.settle()
        last = self.iteration or self._looked
        if last is None or not last.untrained:
            return self.progress.count
        before: Count = last.untrained[0].before
        return before

    def _end(self, complete: bool) -> None:
        """The open iteration is over."""
        ended, self.iteration = self.iteration, None
        if ended is None:
            return
        self._prefetched.clear()
        self._training.on_end()
        self.progress.iterating = False
        self.empty = complete and not ended.given
        trained = self._training.passes != ended.passes
        if trained:
            self._compare(ended)
        if complete or trained:
            if not trained and ended.given:
                self._training.note(NO_TRAINING)
            self._left_early = not complete
            self._sharing.end(complete)
            self._finish_epoch(left=None if complete else ended)
        else:
            self._looked = ended
            self._sharing.peeked(ended.given)

    def _settle(self) -> None:
        """Decides whether the last iteration, which the script left before it trained, was an epoch."""
        looked, self._looked = self._looked, None
        if looked is None:
            return
        trained = self._training.passes != looked.passes
        self._sharing.trained(trained)
        if trained:
            self._compare(looked)
            self._finish_epoch(left=looked)
        else:
            self._training.on_unused(self.progress.count.examples - looked.begun.examples)
            self.progress.undo(looked.begun)
            self.order.forget(self.epoch)

    @property
    def left_early(self) -> bool:
        """True if the script did not finish the last epoch."""
        looked = self._looked  # and trained afterwards?
        return self._left_early or (looked is not None and self._training.passes != looked.passes)

    def _finish_epoch(self, left: _Iteration | None) -> None:
        """The next iteration is the next epoch; `left`: the script has left this one early."""
        if left is not None:  # the others leave it after as many batches, unless the script is unusual
            used, batches = left.given * self._sharing.apart, self.order.count(self.epoch)
            self.progress.leave(left.begun.run + min(used, batches))
        self.epoch += 1
        self._start = 0

    # --- saving -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, which `session.state_dict()` has too."""
        if self.iteration is None:
            self._settle()
        untrained = self._untrained()
        given = 0 if self.iteration is None else self.iteration.given
        shared, run = self._sharing.position(untrained), self.progress.position(self.trained())
        reached = self._sharing.reached(self.order, shared)
        return Position(self.epoch, self._start + given - untrained, shared, run, reached)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues there: the next iteration has the batches of the epoch that were left."""
        if not {"epoch", "batches", "shared"} <= set(state) <= set(Position._fields):
            raise UsageError(FOREIGN)
        self._end(complete=False)
        self._settle()
        position = Position(**state)
        self.epoch, self._start = position.epoch, position.batches
        self._resumed = self._start > 0
        self.progress.resume(position.run, position.reached, within=self._resumed)
        if position.shared:
            self._sharing.resume(position)
        else:
            self._training.on_resumed(position.epoch, position.batches)

    # --- for BatchNorm ------------------------------------------------------------------------------

    def sample(self, most: int) -> Iterator[Any]:
        """Up to `most` batches, evenly spaced over the epoch drawn last, in the order of a single process.

        They are not counted or leased, and the order of training does not change.
        """
        drawn = self.order.epoch(self.order.latest(default=self.epoch))
        if not isinstance(self.order, SampledOrder):
            raise UsageError("batch_norm=recompute cannot read a stream again; use batch_norm=mean")
        found = [batch for number, batch in zip(range(SAMPLED), drawn, strict=False)]
        batches = [batch for batch in found if len(batch) > 1] or found
        count = min(most, len(batches))
        chosen: list[Any] = [batches[number * len(batches) // count] for number in range(count)]
        return iter(DataLoader(self.loader.dataset, batch_sampler=chosen, collate_fn=self.loader.collate_fn))

    @property
    def splits(self) -> bool:
        """True if the examples of a batch may be divided among workers."""
        return self.order.splits

    @property
    def borrows(self) -> bool:
        """True if the worker may get examples of another worker, which do not count."""
        return self._sharing.borrows


class _Batches:
    """The batch sampler of the inner DataLoader."""

    def __init__(self, shared: SharedLoader) -> None:
        self.shared = shared

    def __iter__(self) -> Iterator[Any]:
        return self.shared.indexes()
