"""The batches of each epoch in the order in which a single process would see them.

All workers draw the same order from the seed of the run, so no indexes are sent. Batches are drawn when they
are needed, because a sampler may be endless.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import STREAM
from polyrhythm.session.dataset_identity import identity_of
from polyrhythm.session.random_states import OwnNumbers
from polyrhythm.session.seeds import mix

Indexes = Sequence[int]  # the examples of one batch
B = TypeVar("B", bound=Sized)

BLOCK = 1 << 16  # examples that are drawn at a time
KEPT = 16  # blocks that are kept
HASHED = 8  # batches by which the orders of two workers are compared
ENDLESS = 1 << 62  # the number of batches of an epoch that does not say how many it has


class Epoch(Generic[B]):
    """The batches of one epoch, drawn in blocks.

    Only the latest blocks are kept. For an earlier batch, which another worker has returned, the epoch is
    drawn again.
    """

    def __init__(
        self, draw: Callable[[], Iterator[Sequence[B]]], expected: int, kept: int = KEPT, digest: str = ""
    ) -> None:
        self._draw, self._most = draw, kept
        self.digest = digest  # a hash of its first batches, where it is known already
        self.count = expected  # of batches; exact once all are drawn
        self._begin()

    def _begin(self) -> None:
        self._source = self._draw()
        self._blocks: list[Sequence[B]] = []
        self._first = self._end = 0  # the batches that are kept

    def get(self, number: int) -> B | None:
        """A batch by its number; None if the epoch has fewer."""
        if number < self._first:
            self._begin()
        while number >= self._end:
            block = next(self._source, None)
            if block is None:
                self.count = self._end
                return None
            self._blocks.append(block)
            self._end += len(block)
            if len(self._blocks) > self._most:
                self._first += len(self._blocks.pop(0))
        first = self._first
        for block in self._blocks:
            if number < first + len(block):
                return block[number - first]
            first += len(block)
        return None

    def __iter__(self) -> Iterator[B]:
        for number in itertools.count():
            batch = self.get(number)
            if batch is None:
                return
            yield batch


class Order(ABC):
    """The batches of each epoch of a loader."""

    splits = False  # the examples of a batch may be divided among workers
    fixed = True  # all epochs have the same order, as far as that can be known
    drop_last = False  # incomplete batches are dropped
    batch_size = 1

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader, self._seed = loader, seed
        self._drawn: dict[int, Epoch[Any]] = {}  # the latest two epochs

    def __len__(self) -> int:
        """The number of batches of an epoch. TypeError if they are not counted, as from a DataLoader."""
        return len(self._loader)

    def latest(self, default: int) -> int:
        """The last epoch drawn so far."""
        return max(self._drawn, default=default)

    def epoch(self, number: int) -> Epoch[Any]:
        """The batches of an epoch."""
        if number not in self._drawn:
            self._drawn = {old: self._drawn[old] for old in sorted(self._drawn)[-1:]}
            self._drawn[number] = self._draw(_order_seed(self._seed, number))
        return self._drawn[number]

    def before(self, number: int) -> int:
        """How many batches the epochs before this one have had, if all are as long as a known one."""
        count = self.count(number)
        if count == ENDLESS:
            count = self.count(number - 1)
        return 0 if count == ENDLESS else number * count

    def count(self, number: int) -> int:
        """How many batches an epoch has, as far as it is known."""
        return self._drawn[number].count if number in self._drawn else ENDLESS

    def forget(self, number: int) -> None:
        """Draws an epoch again when it is needed again: until then its sampler may change."""
        self._drawn.pop(number, None)

    def digest(self, number: int) -> str:
        """A hash of the first batches of an epoch; empty if they cannot be compared."""
        return ""

    @functools.cached_property
    def identity(self) -> str:
        """What can be seen of the training set cheaply."""
        return identity_of(self._loader)

    @abstractmethod
    def _draw(self, seed: int) -> Epoch[Any]:
        """An epoch, with random numbers from this seed."""

    def _expected(self) -> int:
        try:
            return len(self)
        except TypeError:
            return ENDLESS


# What all workers of a simulation have in common is cached. With many of them each has few batches per epoch.


@functools.lru_cache(maxsize=2)
def _order_seed(seed: int, epoch: int) -> int:
    return mix("order", seed, epoch)


# Libraries whose loaders change no batches: the session keeps the position, and trainers move to devices.
_KNOWN = ("torchdata.", "accelerate.")


class SampledOrder(Order):
    """The order of a map-style dataset: lists of indexes, from the sampler."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        super().__init__(loader, seed)
        batches = loader.batch_sampler
        if batches is None:
            raise UsageError(
                "the DataLoader has batch_size=None and cannot be shared among workers; give it a batch size"
            )
        for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
                raise UsageError(
                    "the DataLoader has a DistributedSampler, and session.prepare() would divide its part "
                    "again: use shuffle=True or a plain sampler"
                )
        self._batches = batches
        self.batch_size = int(getattr(batches, "batch_size", None) or 1)
        # A custom batch sampler has a reason for its batches, so only those of torch's own are regrouped.
        self.splits = type(batches) is BatchSampler
        self.fixed = isinstance(getattr(batches, "sampler", None), SequentialSampler)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        # Samplers of torch draw the same order again from the same seed. Others may count their epochs.
        self._repeatable = self.splits and type(loader.sampler).__module__.startswith("torch.")

    @property
    def examples(self) -> int:
        """The examples of an epoch, if batches may be divided."""
        assert isinstance(self._batches, BatchSampler)
        count = len(self._batches.sampler)  # type: ignore[arg-type]
        return count // self.batch_size * self.batch_size if self._batches.drop_last else count

    def forget(self, number: int) -> None:
        if self._repeatable:
            super().forget(number)

    def digest(self, number: int) -> str:
        drawn = self.epoch(number)
        return drawn.digest or _digest(tuple(map(tuple, itertools.islice(drawn, HASHED))))

    def _draw(self, seed: int) -> Epoch[Indexes]:
        batches = self._batches
        if type(batches) is BatchSampler and _permutes(batches.sampler):
            order, digest = _shuffled(len(batches.sampler), batches.batch_size, batches.drop_last, seed)
            return Epoch(lambda: iter([order]) if order else iter([]), len(order), digest=digest)
        generator = getattr(self._loader.sampler, "generator", None)
        own = generator if isinstance(generator, torch.Generator) else None
        return Epoch(
            lambda: _blocks(batches, OwnNumbers(seed, own), BLOCK // self.batch_size + 1), self._expected()
        )


@functools.lru_cache(maxsize=2)
def _digest(batches: tuple[Indexes, ...]) -> str:
    return _hash(batches)


def _hash(batches: Iterable[Indexes]) -> str:
    return hashlib.sha256(repr([list(batch) for batch in batches]).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _shuffled(examples: int, batch_size: int, drop_last: bool, seed: int) -> tuple[list[Indexes], str]:
    """The batches of a DataLoader with `shuffle=True`, which draws from torch only, and their hash."""
    sampler = BatchSampler(RandomSampler(range(examples)), batch_size, drop_last)
    own = OwnNumbers(seed, python=False)
    order = [batch for block in _blocks(sampler, own, examples + 1) for batch in block]
    return order, _hash(order[:HASHED])


def _blocks(sampler: Iterable[Indexes], own: OwnNumbers, size: int) -> Iterator[list[Indexes]]:
    """The batches of a sampler that draws from the global generators, in blocks of this many."""
    with own:
        batches = iter(sampler)
    while True:
        with own:
            # A range of consecutive rows may be long, and needs no list.
            found: Iterator[Indexes] = (
                batch if isinstance(batch, range) else list(batch)
                for batch in itertools.islice(batches, size)
            )
            block = list(found)
        if block:
            yield block
        if len(block) < size:
            return


def _permutes(sampler: object) -> TypeGuard[RandomSampler]:
    """True for the sampler of a DataLoader with `shuffle=True`: it permutes all examples."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.generator is None
        and sampler.num_samples == len(sampler.data_source)
    )


class Loaded:
    """A batch of a stream; its length is the number of its examples."""

    def __init__(self, batch: Any, examples: int) -> None:
        self.batch, self._examples = batch, examples

    def __len__(self) -> int:
        return self._examples


class StreamedOrder(Order):
    """The order of an IterableDataset: its batches, loaded. Each worker reads the whole stream."""

    def __init__(self, loader: DataLoader[Any], seed: int, processes: bool) -> None:
        super().__init__(loader, seed)
        batched = loader.batch_size is not None
        self.batch_size = loader.batch_size or 1
        self._stream = copy_of(
            loader,
            processes,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=_Counted(loader.collate_fn) if batched else loader.collate_fn,
        )

    def digest(self, number: int) -> str:
        first = self.epoch(number).get(0)
        seen = hashlib.sha256()
        for each in pytree.tree_leaves(None if first is None else first.batch):
            seen.update(_seen(each))
        return STREAM + seen.hexdigest()[:16]

    def _draw(self, seed: int) -> Epoch[Loaded]:
        return Epoch(lambda: self._load(OwnNumbers(seed)), self._expected(), kept=1)

    def _load(self, own: OwnNumbers) -> Iterator[list[Loaded]]:
        with own:
            batches = iter(self._stream)
        while True:
            try:
                with own:
                    batch = next(batches)
            except StopIteration:
                return
            if self._stream.batch_size is None:
                yield [Loaded(batch, _examples(batch))]
            else:
                yield [Loaded(batch[1], int(batch[0]))]


def _seen(value: Any) -> bytes:
    """What can be compared of a part of a batch."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value if isinstance(value, str | bytes | int | float | None) else type(value)).encode()


class _Counted:
    """Collates a batch, and counts its examples. A class, because loader processes may have to pickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> tuple[int, Any]:
        return len(examples), self._collate(examples)


def _examples(batch: Any) -> int:
    """The number of examples of a batch that the dataset has made: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        return _examples(next(iter(batch.values()), 0))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and batch:
        return _examples(batch[0])
    return 1


def order_of(loader: DataLoader[Any], seed: int, processes: bool = True) -> SampledOrder | StreamedOrder:
    """The order of the batches of a loader."""
    cls = type(loader)
    if cls.__iter__ is not DataLoader.__iter__ and not cls.__module__.startswith(_KNOWN):
        raise UsageError(
            f"{cls.__name__} has an __iter__ of its own, which session.prepare() cannot divide: pass a plain "
            "DataLoader to prepare(), and change its batches in collate_fn or in the loop"
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise UsageError(
            f"this {type(loader).__name__} has loaded a position of its own, which workers cannot share: "
            "save session.state_dict(), and load it after session.prepare()"
        )
    if isinstance(loader.dataset, IterableDataset):
        return StreamedOrder(loader, seed, processes)
    return SampledOrder(loader, seed)


def copy_of(loader: DataLoader[Any], processes: bool, **changed: Any) -> DataLoader[Any]:
    """A DataLoader that loads as this one does; `processes`: it may start worker processes."""
    workers = loader.num_workers if processes else 0
    started: dict[str, Any] = {
        "num_workers": workers,
        "timeout": loader.timeout,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    common = {"pin_memory": loader.pin_memory, "worker_init_fn": loader.worker_init_fn}
    return DataLoader(loader.dataset, **{**common, **(started if workers else {}), **changed})
