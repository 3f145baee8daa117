"""Selects entries of a vector, such as the `count` largest, and turns them into messages and back.

A sample of the magnitudes gives a threshold that a few more than `count` entries reach. One pass collects
these, and of them exactly the `count` largest are kept, of equal ones the first. So the vector is never
sorted. Zeros and NaN are never selected. Tensors that are not on the CPU are processed by tensor operations
on their device, with the same result.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyrhythm.compress.kernels import load
from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    Array = np.ndarray[Any, Any]

SMALL = 1 << 14  # vectors up to this length are not sampled


def compiled(tensor: Tensor) -> bool:
    """True if the compiled loops can process this tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def largest(values: Tensor, count: int, *, plus: Tensor | None = None, exact: bool = True) -> Tensor:
    """Adds `plus` to the values, then returns the ascending indexes of the `count` largest magnitudes.

    Without `exact` there may be fewer: the sample's threshold is used even if too few entries reach it.
    """
    if not compiled(values):
        if plus is not None:
            values.add_(plus)
        return _largest_on_device(values, count, exact)
    import torch

    array = values.detach().numpy()
    return torch.from_numpy(_largest(array, None if plus is None else plus.detach().numpy(), count, exact))


def _largest(values: Array, plus: Array | None, count: int, exact: bool) -> Array:
    import numpy as np

    scan, kind = load().scan, values.dtype.type
    stride, rank = _aim(len(values), count)
    if not rank:
        if plus is not None:
            values += plus
        return np.empty(0, np.int64)
    magnitudes = np.empty(len(values) // stride, values.dtype)
    scan.sample(values, values if plus is None else plus, plus is not None, stride, magnitudes)
    found = _above(values, plus, _least(magnitudes, rank), 2 * count)
    if len(found) < count and exact and stride > 1:
        found = _above(values, None, _least(values, count), 2 * count)
    kept = scan.keep_largest(_keys(values[found]), found, count, 8 * kind(0).itemsize)
    return found[:kept]


def _aim(length: int, count: int) -> tuple[int, int]:
    """The distance between samples, and the rank of the sample that becomes the threshold."""
    if length <= SMALL or count >= length // 4:
        return 1, min(count, length)
    # With 256 of the wanted entries in the sample, the threshold is right within a few percent. More than one
    # sample in every 64 numbers would cost as much as the pass itself.
    stride = max(length // max(SMALL, 256 * length // max(count, 1)), 64 if count * 64 < length else 1, 1)
    expected = count / stride
    return stride, min(math.ceil(expected + 3 * math.sqrt(expected) + 2), length // stride)


def _least(values: Array, rank: int) -> Any:
    """The rank-th largest magnitude, but more than zero."""
    kind = values.dtype.type
    keys = _keys(values)
    key, _ = load().scan.largest_keys(keys, rank, 8 * keys.itemsize)
    least = keys.dtype.type(max(int(key), 1)).view(kind)
    return least if math.isfinite(least) else kind(math.inf)


def _keys(values: Array) -> Array:
    """The bits of floats: without the sign, they are ordered like the magnitudes."""
    return values.view({4: "uint32", 8: "uint64"}[values.itemsize])


def _above(values: Array, plus: Array | None, least: Any, guess: int) -> Array:
    scan = load().scan
    if plus is None:
        return gathered(len(values), guess, lambda start, found: scan.above(values, least, start, found))[0]
    return gathered(
        len(values), guess, lambda start, found: scan.add_above(values, plus, least, start, found)
    )[0]


def gathered(length: int, guess: int, scan: Callable[..., tuple[int, int]], *kinds: str) -> tuple[Array, ...]:
    """All that a pass finds: indexes, and further arrays of these dtypes.

    `scan(start, indexes, ...)` fills arrays, and returns how many elements it filled and where it stopped.
    """
    import numpy as np

    room, start = min(guess, length) + 2 * load().scan.CHUNK, 0
    pieces: list[list[Array]] = []
    while start < length or not pieces:
        arrays = [np.empty(room, kind) for kind in ("int64", *kinds)]
        count, start = scan(start, *arrays)
        pieces.append([array[:count] for array in arrays])
        room = min(4 * room, length + 2 * load().scan.CHUNK)
    return tuple(pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True)))


def _largest_on_device(values: Tensor, count: int, exact: bool) -> Tensor:
    import torch

    magnitudes = values.abs().nan_to_num_(nan=0.0, posinf=math.inf)
    stride, rank = _aim(len(values), count)
    if not rank:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    size = len(values) // stride
    picked = magnitudes[_places(size, stride).to(values.device)] if stride > 1 else magnitudes
    found = (magnitudes >= _nonzero(picked.topk(rank).values[-1])).nonzero().view(-1)
    if len(found) < count and exact and stride > 1:
        found = (magnitudes >= _nonzero(magnitudes.topk(count).values[-1])).nonzero().view(-1)
    if len(found) <= count:
        return found
    left = magnitudes[found]
    least = left.topk(count).values[-1]
    ties = (left == least).cumsum(0) <= count - (left > least).sum()
    return found[(left > least) | ((left == least) & ties)]


def _nonzero(least: Tensor) -> Tensor:
    """At least the smallest number above zero."""
    import torch

    return least.clamp(min=5e-324 if least.dtype == torch.float64 else 1e-45)


def _places(size: int, stride: int) -> Tensor:
    """The indexes that `scan.sample` takes."""
    import numpy as np
    import torch

    counter = np.arange(size, dtype=np.uint64)
    spread = ((counter * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)).astype(np.int64)
    return torch.from_numpy(np.arange(size, dtype=np.int64) * stride + spread % stride)


# From tensors to messages and back. Compiled loops and tensor operations give the same bits.


def pack(values: Tensor, indexes: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """The message of values[indexes], and the values that a reader gets."""
    import torch

    from polyrhythm.compress.kernels import entropy

    picked = values.detach()[indexes].cpu().numpy()
    code, got = entropy.pack_values(len(values), indexes.cpu().numpy(), picked, half)
    return torch.from_numpy(code), torch.from_numpy(got).to(values.device)


def take(values: Tensor, indexes: Tensor, got: Tensor) -> None:
    """values[indexes] -= got."""
    if compiled(values):
        load().scan.take(values.detach().numpy(), indexes.numpy(), got.numpy())
    else:
        values.index_add_(0, indexes, got, alpha=-1)


def pulses(residual: Tensor, plus: Tensor, tau: float, many: bool) -> tuple[Tensor, int]:
    """residual += plus; subtracts pulses of ±tau where it reaches tau. Their message, and how many."""
    import torch

    from polyrhythm.compress.kernels import entropy

    indexes, times = (_pulses if compiled(residual) else _pulses_on_device)(residual, plus, tau, many)
    return torch.from_numpy(entropy.pack_pulses(len(residual), indexes, times, tau)), len(indexes)


def _pulses(residual: Tensor, plus: Tensor, tau: float, many: bool) -> tuple[Array, Array]:
    array, more = residual.detach().numpy(), plus.detach().numpy()
    kind, scan = array.dtype.type, load().scan

    def scanned(start: int, indexes: Array, times: Array) -> tuple[int, int]:
        found: tuple[int, int] = scan.threshold(array, more, kind(tau), many, start, indexes, times)
        return found

    indexes, times = gathered(len(array), len(array) // 32, scanned, "int32")
    return indexes, times


def _pulses_on_device(residual: Tensor, plus: Tensor, tau: float, many: bool) -> tuple[Array, Array]:
    import torch

    residual.add_(plus)
    indexes = (residual.abs() >= tau).nonzero().view(-1)
    values = residual[indexes]
    times = values.sign()
    if many:
        times *= (values.abs() / tau).clamp_(max=float(load().scan.MOST)).trunc_()
    residual.index_add_(0, indexes, times * tau, alpha=-1)
    return indexes.cpu().numpy(), times.to(torch.int32).cpu().numpy()


def add(code: Tensor, into: Tensor, scale: float = 1.0) -> None:
    """Adds the values of a message, times `scale`; WireError if it is invalid."""
    import torch

    from polyrhythm.compress.kernels import entropy

    if code.dtype != torch.uint8 or code.dim() != 1:
        raise WireError(f"a sparse message is bytes, not {code.dtype}")
    if compiled(into):
        entropy.add(code.cpu().numpy(), into.detach().numpy(), scale)
        return
    kind = {torch.float32: "float32", torch.float64: "float64"}[into.dtype]
    indexes, values = entropy.unpack(code.cpu().numpy(), len(into), kind)
    values *= values.dtype.type(scale)
    into.index_add_(0, torch.from_numpy(indexes).to(into.device), torch.from_numpy(values).to(into.device))


def count(code: Tensor, into: Tensor, tau: float) -> None:
    """Adds the number of pulses of ±tau in a message; WireError if it has anything else."""
    import torch

    from polyrhythm.compress.kernels import entropy

    if code.dtype != torch.uint8 or code.dim() != 1:
        raise WireError(f"a sparse message is bytes, not {code.dtype}")
    if compiled(into):
        entropy.count(code.cpu().numpy(), into.numpy(), tau)
    else:
        indexes, times = entropy.unpack_pulses(code.cpu().numpy(), len(into), tau)
        into.index_add_(0, torch.from_numpy(indexes).to(into.device), torch.from_numpy(times).to(into.device))


def merged(codes: Sequence[Tensor], length: int, tau: float) -> Tensor:
    """One message with the sum of the pulses of ±tau in these messages."""
    import torch

    from polyrhythm.compress.kernels import entropy

    counts = torch.zeros(length, dtype=torch.int32)
    for code in codes:
        count(code, counts, tau)
    indexes = counts.nonzero().view(-1)
    return torch.from_numpy(entropy.pack_pulses(length, indexes.numpy(), counts[indexes].numpy(), tau))


def add_counts(base: Tensor, counts: Tensor, tau: float, into: Tensor) -> int:
    """into = base + tau · counts. Returns the largest |count|, or less than twice of it."""
    if compiled(base) and compiled(into) and base.dtype == into.dtype:
        array = base.detach().numpy()
        kind = array.dtype.type
        return int(load().scan.add_counts(array, counts.numpy(), kind(tau), into.detach().numpy()))
    into.copy_(base + counts.to(base.dtype) * tau)
    return int(counts.abs().max()) if len(counts) else 0


def single(number: float) -> float:
    """The nearest 32-bit float, as a message carries it."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def warm(dtype: torch.dtype) -> None:
    """Compiles, or loads from disk, all that sparse codecs need for numbers of this dtype."""
    import torch

    from polyrhythm.compress.kernels import entropy

    vector, other = torch.ones(SMALL + 1, dtype=dtype), torch.ones(SMALL + 1, dtype=dtype)
    for half in (False, True):
        largest(vector, 3)
        indexes = largest(vector, 3, plus=other)
        code, got = pack(vector, indexes, half)
        take(vector, indexes, got)
        add(code, other)
    for tau, many in ((1.0, False), (0.5, True)):  # trits, then pulses
        add(pulses(vector, other, tau, many)[0], other)
    vector.zero_()[7] = 1
    code = pulses(vector, other.zero_(), 1.0, False)[0]  # signs
    add(code, other)
    entropy.unpack(code.numpy(), len(other), other.numpy().dtype)


def warm_counts(dtype: torch.dtype) -> None:
    """The same for `count` and `add_counts`."""
    import torch

    ones = torch.ones(SMALL + 1, dtype=dtype)
    counts = torch.zeros(SMALL + 1, dtype=torch.int32)
    one = torch.zeros_like(ones)
    one[7] = 1.0
    for values, tau, many in ((ones, 1.0, False), (ones, 0.5, True), (one, 1.0, False)):
        count(pulses(torch.zeros_like(ones), values, tau, many)[0], counts, tau)
    add_counts(ones, counts, 0.5, one)
