"""An example batch is what the loader yields, and taking it changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from polyrhythm.core.errors import UsageError
from polyrhythm.parallel.example import example_batch, first_rows, model_inputs, repeated_rows, rows_of

DATA = TensorDataset(torch.arange(20).float().view(10, 2), torch.arange(10))


class Noisy(TensorDataset):
    """Augments its examples with all three generators."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(1) + random.random() + np.random.rand(), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_the_first_examples_are_collated() -> None:
    x, y = example_batch(DataLoader(DATA, batch_size=4, shuffle=True))
    assert y.tolist() == [0, 1, 2, 3] and x.shape == (4, 2)
    assert example_batch(DataLoader(DATA, batch_size=4, collate_fn=len)) == 4
    assert len(example_batch(DataLoader(DATA, batch_size=16))[0]) == 10  # there are no more
    assert example_batch(DataLoader(Stream(), batch_size=3)).tolist() == [0, 1, 2]
    assert example_batch(DataLoader(DATA, batch_size=None))[1] == 0
    sampler = BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    assert len(example_batch(DataLoader(DATA, batch_sampler=sampler))[0]) == 5


def test_an_example_changes_no_random_state() -> None:
    noisy = Noisy(*DATA.tensors)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(noisy, batch_size=4, shuffle=True, generator=generator)

    def states() -> Any:
        drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        return drawn, generator.get_state().tolist()

    before = states()
    example_batch(loader)
    assert states() == before


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="no examples"):
        example_batch(DataLoader([], batch_size=2))  # type: ignore[arg-type]


class Takes(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, labels: Any = None) -> None: ...


class TakesTwo(nn.Module):
    def forward(self, x: Any, y: Any) -> None: ...


class TakesMany(nn.Module):
    def forward(self, *values: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs"),
    [
        (Takes(), "x", "x", {}),
        (Takes(), ("x", "y"), "x", {}),
        (Takes(), ["x", "y"], "x", {}),
        (Takes(), ("x", "mask", "y"), "x", {}),
        (Takes(), ("x",), "x", {}),
        (TakesTwo(), ("x", "y", "z"), "xy", {}),
        (TakesMany(), ("x", "y", "z"), "xy", {}),
        (Takes(), {"x": 1, "labels": 2, "index": 3}, "", {"x": 1, "labels": 2}),
    ],
)
def test_a_model_takes_its_part_of_a_batch(model: nn.Module, batch: Any, args: str, kwargs: Any) -> None:
    assert model_inputs(model, batch) == (tuple(args), kwargs)


def test_a_dict_without_a_key_of_forward_is_refused() -> None:
    with pytest.raises(UsageError, match="takes none of the keys of a batch: index, image"):
        model_inputs(Takes(), {"index": 1, "image": 2})


def test_rows() -> None:
    table, mask = torch.zeros(6, 3), torch.ones(3, 3)
    (x, one), kwargs = first_rows(((table, 1), {"mask": mask}), 2)
    assert x.shape == (2, 3) and one == 1 and kwargs["mask"].shape == (3, 3)
    (x, _), kwargs = repeated_rows(((torch.arange(3), 1), {"mask": mask[:2]}), 7)
    assert x.tolist() == [0, 1, 2, 0, 1, 2, 0] and kwargs["mask"].shape == (2, 3)
    assert rows_of(((1, {"x": [table]}), {})) == 6
    with pytest.raises(UsageError, match="no tensor"):
        rows_of(((1,), {}))
    assert isinstance(table, Tensor)
