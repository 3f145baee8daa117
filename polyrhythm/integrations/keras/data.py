"""The training data of `fit` as a loader that a session can share, and as what Keras iterates over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import torch
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from polyrhythm.core.errors import UsageError
from polyrhythm.session.random_states import OwnNumbers
from polyrhythm.session.seeds import mix

KINDS = "NumPy arrays, torch tensors, a keras.utils.PyDataset or a torch DataLoader"


def training_loader(arguments: dict[str, Any]) -> DataLoader[Any]:
    """A loader of the data that `fit` was called with, with the batches that Keras would make."""
    x = arguments["x"]
    if isinstance(x, DataLoader):
        shuffle: Any = False  # it has an order of its own
    elif isinstance(x, keras.utils.PyDataset) or data_adapters.array_data_adapter.can_convert_arrays(
        (x, arguments["y"], arguments["sample_weight"])
    ):
        shuffle = arguments["shuffle"]
    else:
        raise UsageError(f"fit(x={type(x).__name__}) cannot be shared among workers: train on {KINDS}")
    names = ("x", "y", "sample_weight", "batch_size", "class_weight")
    adapter = data_adapters.get_data_adapter(**{each: arguments[each] for each in names}, shuffle=shuffle)
    if isinstance(x, DataLoader):
        loader = x
    elif isinstance(x, keras.utils.PyDataset):
        loader = _by_batch(adapter, shuffle)
    else:
        theirs = adapter.get_torch_dataloader()
        rows = _Rows(theirs.dataset, len(keras.tree.flatten(x)[0]))
        loader = DataLoader(rows, batch_sampler=theirs.batch_sampler, collate_fn=theirs.collate_fn)
    try:
        len(loader)
    except TypeError:
        raise UsageError(
            f"fit(x={type(x).__name__}) has no length and cannot be shared among workers: train on {KINDS} "
            "with a length"
        ) from None
    return loader


def _by_batch(adapter: Any, shuffle: bool) -> DataLoader[Any]:
    """The batches of a PyDataset. Each counts as one example: only the PyDataset knows how many it has."""
    batches = _PyBatches(adapter)
    sampler = RandomSampler(batches) if shuffle else SequentialSampler(batches)
    return DataLoader(batches, batch_sampler=BatchSampler(sampler, 1, drop_last=False), collate_fn=_only)


class _Rows(Dataset[Any]):
    """Arrays as Keras gives them out, batch by batch, with their length."""

    def __init__(self, arrays: Any, count: int) -> None:
        self.__getitems__ = arrays.__getitems__
        self._count = count

    def __len__(self) -> int:
        return self._count


class _PyBatches(Dataset[Any]):
    """The batches of a PyDataset, as tensors."""

    def __init__(self, adapter: Any) -> None:
        self._adapter, self.dataset = adapter, adapter.py_dataset

    def __len__(self) -> int:
        count = self.dataset.num_batches
        if count is None:
            raise TypeError("endless")
        return int(count)

    def __getitem__(self, index: int) -> Any:
        batch = self._adapter._standardize_batch(self.dataset[index])
        return keras.tree.map_structure(lambda each: None if each is None else torch.as_tensor(each), batch)


def _only(batches: list[Any]) -> Any:
    return batches[0]


class SharedBatches(DataAdapter):  # type: ignore[misc]
    """What Keras iterates over in a run: this worker's batches of `loader`.

    `count`: how many Keras asks for, at most. It stops there without asking for one more, but the loader must
    learn that the epoch is over. `seed`: all workers call the methods of a PyDataset with the same random
    numbers, so that one that shuffles itself has the same order everywhere.
    """

    def __init__(self, loader: Any, count: int, dataset: Any, seed: int) -> None:
        self._loader, self._count = loader, count
        self._numbers = OwnNumbers(mix("keras", seed))
        self._dataset = dataset if isinstance(dataset, _PyBatches) else None
        self._open: Iterator[Any] | None = None

    def get_torch_dataloader(self) -> SharedBatches:
        return self

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)  # an epoch begins with its first batch: Keras makes iterators ahead
        for batch in batches:
            self._open = batches
            yield batch
        self._open = None

    @property
    def num_batches(self) -> int:
        return self._count

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None

    def on_epoch_begin(self) -> None:
        if self._dataset is not None:
            with self._numbers:
                self._dataset.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._open is not None:
            next(self._open, None)
            self._open = None
        if self._dataset is not None:
            with self._numbers:
                self._dataset.dataset.on_epoch_end()


def first_batch(loader: DataLoader[Any]) -> Any:
    """A batch to build the model by. It changes no random number that the script draws."""
    with OwnNumbers(0):
        return next(iter(loader))


def first_tensor(data: Any) -> torch.Tensor:
    """The first tensor of a batch: its rows are the examples."""
    found: torch.Tensor = next(each for each in keras.tree.flatten(data) if each is not None)
    return found
