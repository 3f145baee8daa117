"""The idx reader: what it reads, and one line for everything that may be wrong with a file."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyrhythm.core.errors import UsageError
from polyrhythm.data import mnist

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(*shape: int, values: bytes) -> bytes:
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape) + values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set of three images to train on and two to test on; some files plain, some gzipped."""
    (tmp_path / IMAGES).write_bytes(idx(3, 28, 28, values=bytes([0] * 784 + [255] * 784 + [51] * 784)))
    (tmp_path / f"{LABELS}.gz").write_bytes(gzip.compress(idx(3, values=bytes([7, 0, 9]))))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(2, 28, 28, values=bytes(2 * 784))))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(2, values=bytes([1, 2])))
    return tmp_path


def test_mnist_reads_plain_and_gzipped_files(folder: Path) -> None:
    train, test = mnist(folder)
    images, labels = train.tensors
    assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
    assert images.flatten(1).mean(1).tolist() == pytest.approx([0, 1, 0.2])
    assert labels.tolist() == [7, 0, 9] and labels.dtype == torch.int64
    assert len(test) == 2


def test_mnist_returns_the_same_dataset_on_every_call(folder: Path) -> None:
    assert mnist(folder)[0] is mnist(str(folder))[0]


def test_a_missing_folder_tells_how_to_get_the_data(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^\S+nowhere: .*apt-get install dataset-fashion-mnist.*--data DIR.*$"
    ):
        mnist(tmp_path / "nowhere")


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Changes the images file."""
    return lambda folder: (folder / IMAGES).write_bytes(change((folder / IMAGES).read_bytes())) and None


def gzipped(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replaces the images file by a gzipped one, changed after compression."""

    def damage(folder: Path) -> None:
        content = (folder / IMAGES).read_bytes()
        (folder / IMAGES).unlink()
        (folder / f"{IMAGES}.gz").write_bytes(change(gzip.compress(content)))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged(lambda b: b""), "ends within its header"),
        (damaged(lambda b: b[:15]), "ends within its header"),
        (damaged(lambda b: b"\x1f" + b[1:]), "starts with 1f000803, not 00000803"),
        (damaged(lambda b: b[:2] + b"\x0d" + b[3:]), "starts with 00000d03, not 00000803"),
        (
            damaged(lambda b: idx(3, 28, 27, values=bytes(3 * 28 * 27))),
            "3 x 28 x 27 values; must be N x 28 x 28",
        ),
        (damaged(lambda b: idx(0, 28, 28, values=b"")), "0 x 28 x 28 values"),
        (damaged(lambda b: idx(2**32 - 1, 28, 28, values=b"")), "more than the file can hold"),
        (damaged(lambda b: b[:-1]), "more than the file can hold"),
        (damaged(lambda b: b + b"\0"), "has more data after the 2352 values"),
        (damaged(lambda b: idx(2, 28, 28, values=bytes(2 * 784))), "has 2 images"),
        (gzipped(lambda b: b[:-9]), "cannot be read"),
        (gzipped(lambda b: b[:-8] + bytes(4) + b[-4:]), "cannot be read: CRC check failed"),
        (gzipped(lambda b: b"not gzip"), "cannot be read: Not a gzipped file"),
        (gzipped(lambda b: gzip.compress(idx(2**32 - 1, 28, 28, values=b""))), "more than the file can hold"),
        (gzipped(lambda b: gzip.compress(idx(4, 28, 28, values=bytes(784)))), "holds 784; cut short?"),
    ],
)
def test_a_corrupt_file_is_named_in_one_line(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(UsageError) as caught:
        mnist(folder)
    assert message in str(caught.value)
    assert IMAGES in str(caught.value) and "\n" not in str(caught.value)


def test_mnist_refuses_a_label_out_of_range(folder: Path) -> None:
    (folder / f"{LABELS}.gz").write_bytes(gzip.compress(idx(3, values=bytes([1, 2, 10]))))
    with pytest.raises(UsageError, match="has label 10; labels must be 0 to 9"):
        mnist(folder)
