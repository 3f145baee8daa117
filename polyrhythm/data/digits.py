"""1,797 handwritten digits, included in the package, so that a first run needs no download.

The images are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak
(1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAIN = 1437  # four fifths


@cache  # all workers of a simulation share one copy
def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training set of 1,437 digits and the test set of 360: images (1, 8, 8) from 0 to 1, labels 0 to 9.

    >>> train, test = digits()
    >>> len(train), len(test), train[0][0].shape
    (1437, 360, torch.Size([1, 8, 8]))
    """
    with (
        files("polyrhythm.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        images = torch.from_numpy(stored["images"]).float().div_(16).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"]).long()
    # NumPy guarantees that the streams of RandomState never change; torch does not.
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    train, test = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
