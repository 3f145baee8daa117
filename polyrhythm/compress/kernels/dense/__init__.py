"""The kernels of quantizers: two backends with the same functions, which give the same bits.

`compiled` is for tensors on the CPU: numba loops, one pass from the gradient and the residual to the code.
`plain` is for other devices, and for installations without numba: tensor operations, five times slower on a
CPU. Nothing in here is imported before a codec is used.

**Packing.** Several small digits share a byte, as digits of one number: 2 of radix 16, 5 of radix 3, 8 of
radix 2. A chunk is divided into that many equal planes, and byte j holds the j-th digit of each plane, so
that packing and unpacking can be vectorized. In the last chunk the planes are shorter.

**Stochastic rounding.** A number is rounded up or down by 31 bits of a hash of the stream and of its index,
so the result depends neither on the order of the work nor on the device. (It repeats after 2**32 numbers.)

**Sums** are taken in 64 bits in a fixed order: the halves of a chunk are added until one number is left, then
the halves of the row of these.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from polyrhythm.core.extras import missing

if TYPE_CHECKING:
    from torch import Tensor

BITS = 512  # numbers in a chunk that is packed 8 to a byte
TRITS = 1280  # in one that is packed 5 to a byte
SUMS = 512  # in one that is summed


def backend(tensor: Tensor) -> ModuleType:
    """The module with the kernels for this tensor."""
    from polyrhythm.compress.kernels.dense import plain

    return (_compiled() if tensor.device.type == "cpu" else None) or plain


@cache
def _compiled() -> ModuleType | None:
    """The compiled backend; None, with one warning, if numba is missing."""
    if why := missing(checksums=False):
        warnings.warn(f"quantizers are about five times slower on a CPU without {why}", stacklevel=2)
        return None
    from polyrhythm.compress.kernels.dense import compiled

    return compiled


def packed_size(count: int, chunk: int, places: int) -> int:
    """The bytes of `count` digits, `places` to a byte."""
    whole, rest = divmod(count, chunk)
    return whole * -(-chunk // places) + -(-rest // places)
