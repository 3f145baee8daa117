"""Reader for data sets in MNIST format (Fashion-MNIST, KMNIST): four idx files, plain or gzipped.

An idx file is a big-endian header and raw bytes: two zero bytes, the type (8: unsigned bytes), the number
of dimensions, each dimension as 32 bits, then the values. Files are not trusted: the sizes in the header are
checked against the size of the file before memory is allocated.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polyrhythm.core.errors import UsageError

FOLDER = Path("/usr/share/datasets/fashion-mnist")
SIDE, CLASSES = 28, 10
DEFLATE_LIMIT = 1032  # the largest possible compression ratio of deflate


def mnist(folder: Path | str | None = None) -> tuple[TensorDataset, TensorDataset]:
    """The train and test sets in `folder`: images (1, 28, 28) from 0 to 1, and labels 0 to 9.

    Without a folder: Fashion-MNIST in the folder of the Debian package.
    """
    return _load(FOLDER if folder is None else Path(folder).resolve())


@cache  # 188 MB of floats: all workers of a simulation share one copy
def _load(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    return _part(folder, "train"), _part(folder, "t10k")


def _part(folder: Path, part: str) -> TensorDataset:
    image_file = _find(folder, f"{part}-images-idx3-ubyte")
    label_file = _find(folder, f"{part}-labels-idx1-ubyte")
    labels = _read(label_file)
    images = _read(image_file, SIDE, SIDE)
    if len(images) != len(labels):
        raise UsageError(
            f"{label_file}: {len(labels)} labels, but {image_file.name} has {len(images)} images"
        )
    if int(labels.max()) >= CLASSES:
        raise UsageError(f"{label_file}: has label {int(labels.max())}; labels must be 0 to {CLASSES - 1}")
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise UsageError(
        f"{folder}: no {name} or {name}.gz there; get the data with `apt-get install dataset-fashion-mnist`, "
        "or pass --data DIR with the four files of MNIST or Fashion-MNIST"
    )


def _read(path: Path, *shape: int) -> Tensor:
    """The bytes of an idx file whose items have this shape."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return _parse(path, cast(BinaryIO, file), path.stat().st_size * DEFLATE_LIMIT, shape)
        with path.open("rb") as file:
            return _parse(path, file, path.stat().st_size, shape)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _parse(path: Path, file: BinaryIO, most: int, shape: tuple[int, ...]) -> Tensor:
    header = struct.Struct(f">4B{1 + len(shape)}I")
    start = file.read(header.size)
    if len(start) < header.size:
        raise UsageError(f"{path}: ends within its header; not an idx file")
    *magic, count = header.unpack(start)[:5]
    found = header.unpack(start)[5:]
    if magic != [0, 0, 8, 1 + len(shape)]:
        raise UsageError(
            f"{path}: starts with {bytes(magic).hex()}, not 0000080{1 + len(shape)}; wrong kind of idx file"
        )
    if found != shape or count == 0:
        wanted = " x ".join(["N", *map(str, shape)])
        raise UsageError(f"{path}: holds {' x '.join(map(str, (count, *found)))} values; must be {wanted}")
    size = count * math.prod(shape)
    if header.size + size > most:
        raise UsageError(
            f"{path}: its header promises {size} values, more than the file can hold; cut short?"
        )
    values = bytearray(file.read(size))
    if len(values) < size:
        raise UsageError(f"{path}: its header promises {size} values, but it holds {len(values)}; cut short?")
    if file.read(1):  # in a gzipped file, reading to the end also verifies the checksum
        raise UsageError(f"{path}: has more data after the {size} values its header promises")
    return torch.frombuffer(values, dtype=torch.uint8).view(count, *shape)
