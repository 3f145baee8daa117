"""DealtBatches: the batches of a loader that one worker predicts.

Batches are dealt: each worker takes the next ones when it needs some, few at a time and fewer towards the
end, so a fast worker takes more and all finish together. They stay whole, because the bits of an output
depend on the batch that it is computed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from polyrhythm.core.errors import UsageError
from polyrhythm.core.key_value import KeyValue
from polyrhythm.session.context import WorldContext
from polyrhythm.session.data import SharedLoader
from polyrhythm.session.evaluation import EvaluationLoader
from polyrhythm.session.order import ENDLESS, SampledOrder, copy_of, order_of
from polyrhythm.session.random_states import OwnNumbers

LONGEST = 16  # batches that a worker takes at a time
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_END = object()


class LoadedBatch(NamedTuple):
    """A batch of the loader by its number."""

    number: int
    examples: int
    content: Any


def whole_loader(loader: Any) -> DataLoader[Any]:
    """The loader that a script wants predictions for, undivided. UsageError if its order is random."""
    if isinstance(loader, SharedLoader | EvaluationLoader):
        loader = loader.loader
    if not isinstance(loader, DataLoader):
        raise UsageError(f"session.predict() takes a DataLoader, not {type(loader).__name__}")
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    if not isinstance(loader.dataset, IterableDataset) and any(isinstance(s, _RANDOM) for s in samplers):
        raise UsageError(
            "session.predict() returns outputs in the order of the loader, and this one shuffles, so nobody "
            "could tell which output belongs to which example: make a DataLoader with shuffle=False"
        )
    return loader


class Deal:
    """Numbers from 0 on, of which each is given to one worker."""

    def __init__(self, context: WorldContext | None, name: str, count: int, workers: int) -> None:
        """`count`: how many there are, or ENDLESS. Without a context all are for this worker."""
        self._context, self._key, self._count, self._workers = context, name, count, workers
        self._next = 0  # the first that was not dealt, as far as this worker knows

    @property
    def over(self) -> bool:
        """True if all are dealt, as far as this worker knows."""
        return self._next >= self._count

    def take(self) -> range:
        """The next ones for this worker; empty if all are dealt."""
        size = 1  # at the end of a stream, which nobody knows, others should not have to wait
        if self._count < ENDLESS:
            size = max(1, min(LONGEST, (self._count - self._next) // (4 * self._workers)))
        if self._context is None:
            end = self._next + size
        else:
            end = self._context.request(KeyValue("add", self._key, number=size)).number
        self._next = end
        return range(end - size, min(end, self._count))


class DealtBatches:
    """Loads batches of one loader for this worker."""

    def __init__(self, loader: DataLoader[Any], seed: int, processes: bool) -> None:
        self._loader, self._processes = loader, processes
        self.order = order_of(loader, seed, processes)
        self._epoch = self.order.epoch(0)
        self._own = OwnNumbers(seed)  # a DataLoader draws a number, and the script shall not notice
        torchs = type(loader.sampler).__module__.startswith("torch.")  # others may count something else
        counted = isinstance(self.order, SampledOrder) and self.order.splits and torchs
        self.count = len(self.order) if counted else ENDLESS  # the number of batches, once it is known

    @property
    def identity(self) -> str:
        """What workers compare, to be sure that they predict on the same batches."""
        return f"{self.order.identity}, {self.order.digest(0)}"

    def load(self, numbers: Sequence[int], deal: Deal) -> Iterator[LoadedBatch]:
        """Those of the batches with these numbers that this worker is dealt."""
        queue: deque[int] = deque()
        drawn: deque[tuple[int, int]] = deque()

        def fill() -> bool:
            if not queue and not deal.over:
                queue.extend(numbers[place] for place in deal.take())
            return bool(queue)

        def draw() -> Iterator[Any]:
            while fill():
                number = queue.popleft()
                batch = self._epoch.get(number)
                if batch is None:
                    self.count = self._epoch.count
                    return
                drawn.append((number, len(batch)))
                yield batch

        if not fill():
            return
        if not isinstance(self.order, SampledOrder):
            for loaded in draw():
                yield LoadedBatch(*drawn.popleft(), loaded.batch)
            return
        collate = self._loader.collate_fn
        copy = copy_of(
            self._loader, self._processes, persistent_workers=False, batch_sampler=draw(), collate_fn=collate
        )
        with self._own:
            batches = iter(copy)
        while True:
            fill()  # outside the context: in simulation other workers may run meanwhile
            with self._own:
                batch = next(batches, _END)
            if batch is _END:
                return
            yield LoadedBatch(*drawn.popleft(), batch)
