"""The compiled backend, for tensors on the CPU: the same functions as in `plain`, and the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyrhythm.compress.kernels.dense import SUMS, loops, plain, rice_loops
from polyrhythm.core.errors import WireError

_MASKS: dict[torch.dtype, Any] = {
    torch.float32: np.int32(0x7FFFFFFF),
    torch.float64: np.int64(0x7FFFFFFFFFFFFFFF),
}
_MAGIC: dict[torch.dtype, Any] = {
    torch.float32: np.float32(1.5 * 2.0**23),
    torch.float64: np.float64(1.5 * 2.0**52),
}


def _number(dtype: torch.dtype, value: float) -> Any:
    """A number of the type that the loops work on."""
    return type(_MAGIC[dtype])(value)


def _array(vector: Tensor) -> Any:
    """The memory of a vector, also of one that requires gradients."""
    return vector.detach().numpy()


def _between(dtype: torch.dtype, most: int) -> tuple[Any, Any]:
    least, largest = plain.units_between(dtype, most)
    return _number(dtype, least), _number(dtype, largest)


def _bits(values: Tensor) -> tuple[Any, Any]:
    """The same memory as integers, and the mask of all bits except the sign."""
    mask = _MASKS[values.dtype]
    return _array(values).view(mask.dtype), mask


def integers(
    values: Tensor,
    residual: Tensor | None,
    block: int,
    top: int,
    seed: int | None,
    units: Tensor,
    body: Tensor,
) -> None:
    source = values if residual is None else residual
    loops.integers(
        _array(values), _array(source), residual is not None, *_bits(source), block, top,
        _MAGIC[values.dtype], *_between(values.dtype, top),
        seed is not None, np.uint64(seed or 0), units.numpy(), body.numpy(),
    )  # fmt: skip


def add_integers(units: Tensor, body: Tensor, into: Tensor, scale: float, block: int, top: int) -> None:
    loops.add_integers(units.numpy(), body.numpy(), _array(into), _number(into.dtype, scale), block, top)


def floats(values: Tensor, residual: Tensor | None, block: int, powers: Tensor, body: Tensor) -> None:
    source = values if residual is None else residual
    loops.floats(
        _array(values), _array(source), residual is not None, *_bits(source), block,
        _number(values.dtype, 1.0), *plain.limits(values.dtype), powers.numpy(), body.numpy(),
    )  # fmt: skip


def add_floats(powers: Tensor, body: Tensor, into: Tensor, scale: float, block: int) -> None:
    loops.add_floats(powers.numpy(), body.numpy(), _array(into), _number(into.dtype, scale), block)


def largest_float(body: Tensor) -> int:
    return int(loops.largest_byte(body.numpy(), np.uint8(0x7F)))


def signs(values: Tensor, residual: Tensor | None, zeros: bool, body: Tensor) -> float:
    source = values if residual is None else residual
    limit = _number(values.dtype, torch.finfo(values.dtype).smallest_normal if zeros else 0.0)
    if zeros:
        limit = np.nextafter(_number(values.dtype, 0.0), limit)
    sums = np.empty(-(-len(values) // SUMS), np.float64)
    whole = loops.signs(
        _array(values), _array(source), residual is not None, limit, sums, body.numpy()
    )  # fmt: skip
    return whole / max(1, len(values))


def add_signs(body: Tensor, into: Tensor, unit: float) -> None:
    loops.add_signs(body.numpy(), _array(into), _number(into.dtype, unit))


def sizes(values: Tensor) -> tuple[float, float]:
    most, squares = loops.sizes(
        _array(values), *_bits(values), np.empty(-(-len(values) // SUMS), np.float64)
    )  # fmt: skip
    kind = _MASKS[values.dtype].dtype
    return float(np.array([most], kind).view(_array(values).dtype)[0]), squares


def trits(values: Tensor, unit: float, seed: int, body: Tensor) -> None:
    one, unit = _number(values.dtype, 1.0), _number(values.dtype, unit)
    loops.trits(_array(values), one / unit, np.uint64(seed), body.numpy())


def add_trits(body: Tensor, into: Tensor, unit: float) -> None:
    loops.add_trits(body.numpy(), _array(into), _number(into.dtype, unit))


def levels(values: Tensor, block: int, most: int, seed: int, units: Tensor) -> Tensor:
    whole = torch.empty(len(values), dtype=torch.int16)
    loops.levels(
        _array(values), *_bits(values), block, most,
        *_between(values.dtype, most), np.uint64(seed), units.numpy(), whole.numpy(),
    )  # fmt: skip
    return whole


def add_levels(units: Tensor, whole: Tensor, into: Tensor, scale: float, block: int) -> None:
    loops.add_levels(units.numpy(), whole.numpy(), _array(into), _number(into.dtype, scale), block)


def rice(whole: Tensor, block: int) -> tuple[Tensor, Tensor]:
    shifts = torch.empty(-(-len(whole) // block), dtype=torch.uint8)
    planes, bits = rice_loops.shifts_of(whole.numpy(), block, shifts.numpy())
    low, unary = np.empty(planes, np.uint8), np.empty(-(-bits // 64), np.uint64)
    rice_loops.write(whole.numpy(), block, shifts.numpy(), low, unary)
    return shifts, torch.from_numpy(np.concatenate([low, unary.view(np.uint8)[: -(-bits // 8)]]))


def unrice(shifts: Tensor, body: Tensor, count: int, block: int, most: int) -> Tensor:
    last = count - (len(shifts) - 1) * block if count else 0
    planes = int(shifts[:-1].long().sum()) * -(-block // 8) + int(shifts[-1:].long().sum()) * -(-last // 8)
    low, unary, whole = body[:planes].numpy(), body[planes:].numpy(), np.empty(count + 8, np.int16)
    found = rice_loops.unary_runs(unary, count, whole.view(np.uint16))
    if found != count or (len(unary) and not unary[-1]):
        raise WireError(f"a code of {count} levels that holds {found}")
    level = rice_loops.read(shifts.numpy(), low, block, most, whole.view(np.uint16)[:count], whole[:count])
    if level > most:
        raise WireError(f"a code with level {level} of {most}")
    return torch.from_numpy(whole)[:count]
