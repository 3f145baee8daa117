"""What can be seen of a training set cheaply, to compare it between workers.

Workers divide the batches of one order, so all must have the same training set. If each worker draws a split
of its own, examples that one worker keeps for validation are trained on by others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

SEEN = 64  # elements of a tensor of labels


def identity_of(loader: DataLoader[Any]) -> str:
    """The kind and length of the training set, and a hash of the examples that were chosen for it.

    Examples are not read, but for a few labels that are in memory.
    """
    dataset = loader.dataset
    chosen = getattr(loader.sampler, "indices", None)  # of a SubsetRandomSampler
    seen = hashlib.sha256(b"" if chosen is None else _numbers(chosen))
    for each in _seen(dataset):
        seen.update(each)
    return f"{type(dataset).__name__} of {_length(dataset)} examples ({seen.hexdigest()[:8]})"


def _seen(dataset: Any) -> Iterator[bytes]:
    yield f"{type(dataset).__name__} {_length(dataset)};".encode()
    if isinstance(dataset, Subset):
        yield _numbers(dataset.indices)
        yield from _seen(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _seen(part)
    elif isinstance(dataset, TensorDataset):
        yield repr([(tuple(each.shape), each.dtype) for each in dataset.tensors]).encode()
        for each in dataset.tensors:  # not of numbers that machines may round differently
            if not each.is_floating_point() and not each.is_complex() and each.dim():
                few = each[:: max(1, len(each) // SEEN)].detach().cpu()
                yield few.to(torch.int64).numpy().tobytes()


def _length(dataset: Any) -> str:
    return str(len(dataset)) if isinstance(dataset, Sized) else "unknown"


def _numbers(indices: Any) -> bytes:
    numbers = np.asarray(indices)
    return numbers.astype("<i8").tobytes() if numbers.dtype.kind in "iu" else repr(indices).encode()
