"""Flat tensors as bytes, and a pool of memory to receive them in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyrhythm.core.errors import UsageError
from polyrhythm.wire.frame import DTYPES, Part

_POOL_BLOCKS, _POOL_BYTES = 4, 1 << 25  # a pool over both limits frees its smallest blocks


@dataclass
class Buffer:
    """A flat tensor: its dtype, its bytes, and its arena and offset if it is in shared memory."""

    dtype: str
    view: memoryview
    arena: int = -1
    offset: int = 0


def parts_of(buffers: Sequence[Buffer], shared: bool = False) -> list[Part]:
    """Describes buffers in a header: by reference if they are in an arena and arenas are `shared`."""
    parts = []
    for buffer in buffers:
        size = DTYPES.get(buffer.dtype)
        if size is None or buffer.view.nbytes % size:
            raise UsageError(f"{buffer.view.nbytes} bytes do not make a tensor of dtype {buffer.dtype}")
        place = (buffer.arena, buffer.offset) if shared and buffer.arena >= 0 else (-1, 0)
        parts.append(Part(buffer.dtype, buffer.view.nbytes // size, *place))
    return parts


def shapes(parts: Sequence[Part]) -> list[tuple[str, int]]:
    return [(part.dtype, part.count) for part in parts]


def copy(target: memoryview, source: memoryview) -> None:
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL


def is_inside(view: memoryview, memory: memoryview | None) -> bool:
    """True if all bytes of a view are in this memory."""
    if memory is None or not view.nbytes:
        return not view.nbytes
    first, start = (np.frombuffer(each, np.uint8).ctypes.data for each in (view, memory))
    return bool(start <= first and first + view.nbytes <= start + memory.nbytes)


class Pool:
    """Reusable memory for inline tensors: touching fresh pages costs more than copying the bytes."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> memoryview:
        with self._lock:
            for at, memory in enumerate(self._free):
                if nbytes <= memory.nbytes <= 4 * nbytes:
                    return self._free.pop(at)
        return uninitialized(nbytes)

    def release(self, memory: memoryview | None) -> None:
        if memory is not None:
            with self._lock:
                self._free.append(memory)
                self._free.sort(key=len)
                while len(self._free) > _POOL_BLOCKS and sum(map(len, self._free)) > _POOL_BYTES:
                    del self._free[0]


def uninitialized(nbytes: int) -> memoryview:
    """Allocates memory without filling it with zeros."""
    return np.empty(nbytes, np.uint8).data
