"""How quantizers walk over every number of a vector, by one of two roads that give the same bits.

`compiled` is for tensors on the CPU: loops of numba, one pass from the gradient and the residual to the code.
`plain` is for every other device, and for those who have no numba: tensor operations, and five times slower
on a CPU. Both have the same functions. Nothing in here is imported before a codec is used.

**Packing.** Several small digits share a byte, as digits of one number: 2 of radix 16, 5 of radix 3, 8 of
radix 2. Digits that share a byte are far apart: a chunk is cut into so many equal planes, and byte j holds
the j-th digit of each. So both directions are vector instructions. Of the last chunk, the planes are short.

**Drawing.** A number is rounded up or down by a hash of the stream and of its own index, 31 bits of it, so
that a draw depends neither on the order of the work nor on the device. (It repeats after 2**32 numbers.)

**Adding up.** Sums are taken in 64 bits, in an order of their own: halves of a chunk are added until one
number is left, then halves of the row of these.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from polyrhythm.compress.kernels import missing

if TYPE_CHECKING:
    from torch import Tensor

BITS = 512  # numbers in a chunk of 8 to a byte
TRITS = 1280  # of 5 to a byte
SUMS = 512  # of those that are added up together


def road(tensor: Tensor) -> ModuleType:
    """The module to work on this tensor with."""
    from polyrhythm.compress.kernels.dense import plain

    return (_compiled() if tensor.device.type == "cpu" else None) or plain


@cache
def _compiled() -> ModuleType | None:
    """The compiled road, if numba is here. If not, says so, once."""
    if why := missing(checksums=False):
        warnings.warn(f"quantizers are about five times slower on a CPU without {why}", stacklevel=2)
        return None
    from polyrhythm.compress.kernels.dense import compiled

    return compiled


def size(count: int, chunk: int, places: int) -> int:
    """How many bytes `count` digits take, `places` to a byte."""
    whole, rest = divmod(count, chunk)
    return whole * -(-chunk // places) + -(-rest // places)
