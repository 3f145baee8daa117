"""Values that the scripts of all workers exchange: `session.gather`, `mean` and `barrier`; and `save`.

They travel through the coordinator, which knows who is alive: this works under every strategy, and costs
training nothing. A message of the coordinator is small, so large values go in several pieces.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from polyrhythm.core.errors import UsageError
from polyrhythm.core.requests import Gather
from polyrhythm.model.packing import pack, unpack
from polyrhythm.session.context import WorldContext
from polyrhythm.session.places import Call

_REPLY = 1 << 19  # bytes of values in one reply


class Exchange:
    """The exchanges of one node with all workers, which must begin the same ones in the same order."""

    def __init__(self, context: WorldContext, workers: int) -> None:
        self._context, self._piece = context, max(1, _REPLY // workers)
        self.last = -1  # the number of the last gather, equal on all workers

    def gather(self, value: Any, call: Call, epochs: int = 0, steps: int = 0) -> list[Any]:
        """The values of all workers that are alive, by rank.

        `epochs`, `steps`: that this worker has begun and taken.
        """
        whole = _encoded(value)
        request = Gather(call.point, b"", call.path, epochs, steps)
        found = self._round(request, len(whole).to_bytes(8) + whole[: self._piece])
        longest = max(int.from_bytes(first[:8]) for first in found)
        parts = [[first[8:]] for first in found]
        for start in range(self._piece, longest, self._piece):
            more = self._round(request, whole[start : start + self._piece])
            if len(more) != len(parts):
                raise UsageError(f"a worker died at {call.point}; start again, or exchange smaller values")
            for part, piece in zip(parts, more, strict=True):
                part.append(piece)
        return [_decoded(b"".join(part)) for part in parts]

    def _round(self, request: Gather, piece: bytes) -> list[bytes]:
        found = self._context.request(msgspec.structs.replace(request, value=piece))
        self.last = found.number
        return found.values


def checked(value: Any, name: str) -> Any:
    """A value that can be sent: numbers, texts, None, tensors, and lists, tuples and dicts of these."""
    value = value.item() if isinstance(value, np.generic) else value
    try:
        pack(value)
    except TypeError:
        raise UsageError(
            f"{name} takes numbers, texts, tensors, and lists, tuples and dicts of these, not "
            f"{type(value).__name__}"
        ) from None
    return value.detach() if isinstance(value, Tensor) else value


def checked_weight(weight: Any) -> float:
    """The weight of a value in a mean."""
    weight = weight.item() if isinstance(weight, np.generic | Tensor) else weight
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UsageError(f"session.mean() takes a weight of 0 or more, such as the examples, not {weight!r}")
    return weight


def weighted_mean(pairs: Sequence[tuple[Any, float]]) -> Any:
    """The mean of values by their weights; a value of weight 0, even NaN, does not count.

    Numbers are added without rounding, tensors in 64 bits and in rank order: all workers get the same bits.
    """
    counted = [(value, weight) for value, weight in pairs if weight]
    if not counted:
        raise UsageError("session.mean() has nothing to average: the weight is 0 on all workers")
    first = counted[0][0]
    if any(isinstance(value, Tensor) != isinstance(first, Tensor) for value, _ in counted):
        raise UsageError(
            "session.mean() got a tensor on one worker and a number on another; give all the same"
        )
    if not isinstance(first, Tensor):
        return _mean_of_numbers(counted)
    shapes = sorted({tuple(value.shape) for value, _ in counted})
    if len(shapes) > 1:
        raise UsageError(
            f"session.mean() got tensors of shapes {shapes[0]} and {shapes[1]}; give it equal shapes, or use "
            "session.gather()"
        )
    wide = torch.complex128 if first.is_complex() else torch.float64
    total = sum(value.to(wide) * weight for value, weight in counted) / sum(weight for _, weight in counted)
    exact = first.is_floating_point() or first.is_complex()
    return total.to(first.dtype if exact else torch.get_default_dtype())


def _mean_of_numbers(pairs: Sequence[tuple[Any, float]]) -> float:
    for value, _ in pairs:
        if not isinstance(value, int | float):
            raise UsageError(f"session.mean() takes a number or a tensor, not {value!r}")
    if not all(math.isfinite(value) for value, _ in pairs):
        return float(sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs))
    exact = [(Fraction(value), Fraction(weight)) for value, weight in pairs]
    return float(sum(value * weight for value, weight in exact) / sum(weight for _, weight in exact))


def save_atomically(value: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` that leaves either the old file or the whole new one."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def inode_of(path: str | os.PathLike[str]) -> int:
    """The inode of a file; 0 if it is gone: another worker may have renamed it."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return 0


def _encoded(value: Any) -> bytes:
    text, *tensors = pack(value)
    flat = [(str(each.dtype).removeprefix("torch."), _bytes(each)) for each in tensors]
    return msgspec.msgpack.encode((_bytes(text), flat))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _decoded(whole: bytes) -> Any:
    text, flat = msgspec.msgpack.decode(whole, type=tuple[bytes, list[tuple[str, bytes]]])
    return unpack([_tensor("uint8", text), *(_tensor(*each) for each in flat)])


def _tensor(dtype: str, content: bytes) -> Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind)
