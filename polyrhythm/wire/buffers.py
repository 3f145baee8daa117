"""Flat tensors as the wire sees them, and the memory that they are received in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyrhythm.core.errors import UsageError
from polyrhythm.wire.frame import DTYPES, Part

_KEPT, _SPARE = 4, 1 << 25  # pieces of memory, or as many as have so many bytes


@dataclass
class Buffer:
    """A flat tensor as the wire sees it: its dtype, its bytes, and where it lies if in shared memory."""

    dtype: str
    view: memoryview
    arena: int = -1
    offset: int = 0


def parts_of(buffers: Sequence[Buffer], shared: bool = False) -> list[Part]:
    """Buffers as a header names them: by reference if they lie in memory that is `shared`."""
    parts = []
    for buffer in buffers:
        size = DTYPES.get(buffer.dtype)
        if size is None or buffer.view.nbytes % size:
            raise UsageError(f"{buffer.view.nbytes} bytes are no tensor of dtype {buffer.dtype}")
        place = (buffer.arena, buffer.offset) if shared and buffer.arena >= 0 else (-1, 0)
        parts.append(Part(buffer.dtype, buffer.view.nbytes // size, *place))
    return parts


def shape(parts: Sequence[Part]) -> list[tuple[str, int]]:
    return [(part.dtype, part.count) for part in parts]


def copy(target: memoryview, source: memoryview) -> None:
    if source.nbytes:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))  # releases the GIL


class Pool:
    """Memory for inline tensors, used again because first touching fresh pages costs more than the copy."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        with self._lock:
            for at, memory in enumerate(self._free):
                if nbytes <= memory.nbytes <= 4 * nbytes:
                    return self._free.pop(at)
        return fresh(nbytes)

    def give(self, memory: memoryview | None) -> None:
        if memory is not None:
            with self._lock:
                self._free.append(memory)
                self._free.sort(key=len)
                while len(self._free) > _KEPT and sum(map(len, self._free)) > _SPARE:
                    del self._free[0]


def fresh(nbytes: int) -> memoryview:
    """Memory that is not filled with zeros first."""
    return np.empty(nbytes, np.uint8).data
