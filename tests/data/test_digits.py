"""The digits in the package: the very bytes of the source, and a split that never changes."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import numpy as np
import torch

from polyrhythm.data import digits


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def test_digits_file_has_the_hashes_of_its_source() -> None:
    with files("polyrhythm.data").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = stored["images"], stored["labels"]
    assert images.dtype == labels.dtype == np.uint8
    assert images.shape == (1797, 8, 8)
    assert sha256(images) == "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    assert sha256(labels) == "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"


def test_digits_shapes_dtypes_and_value_ranges() -> None:
    for part, size in zip(digits(), (1437, 360), strict=True):
        images, labels = part.tensors
        assert images.shape == (size, 1, 8, 8) and images.dtype == torch.float32
        assert labels.shape == (size,) and labels.dtype == torch.int64
        assert (images.min(), images.max()) == (0, 1)
        assert labels.unique().tolist() == list(range(10))


def test_the_split_never_changes() -> None:
    train, test = digits()
    assert (
        sha256(train.tensors[1].numpy().astype(np.uint8))
        == "53f898fb81bedc1960a35a7518e140c110357f1d9c819e15be7eb86813d86b98"
    )
    assert (
        sha256((test.tensors[0] * 16).numpy().astype(np.uint8))
        == "3e513a101193c0514d97a60d151570d7d1ab8837d20c6d5a76ad044e42edf840"
    )


def test_digits_train_and_test_sets_partition_the_images() -> None:
    with files("polyrhythm.data").joinpath("digits.npz").open("rb") as file:
        whole = sorted(image.tobytes() for image in np.load(file)["images"])
    parts = torch.cat([part.tensors[0] for part in digits()])
    assert sorted(image.tobytes() for image in (parts * 16).numpy().astype(np.uint8)) == whole


def test_digits_returns_the_same_tensors_on_every_call() -> None:
    assert digits()[0].tensors[0] is digits()[0].tensors[0]
