"""SavedTensors: reads a file in safetensors format tensor by tensor. The library would map all of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.session.result import DTYPES


class SavedTensors:
    """The tensors of a file. OSError or ValueError if it is not one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
            if not 0 < length <= size - 8:
                raise ValueError("it is not a file in safetensors format")
            entries: dict[str, Any] = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        self._first = 8 + length
        if self._first + max((each["data_offsets"][1] for each in entries.values()), default=0) > size:
            raise ValueError("its end is missing")
        self._entries = entries

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._first + entry["data_offsets"][0])
            view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
            while view and (count := file.readinto(view)):
                view = view[count:]
        return tensor
