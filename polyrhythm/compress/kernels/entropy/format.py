"""What the writer and the reader of sparse messages share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyrhythm.core.errors import WireError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAGIC, VERSION = b"Sp", 1
SIGNS, PULSES, TRITS, HALF, SINGLE, DOUBLE = range(6)
LARGEST_TAU = 2.0**100  # so that no multiple of it is infinite
JOINS = (0, 2, 4, 6, 8)  # a block consists of 2**join fine ones
WRONG = (  # by the number that the compiled loops return
    "",
    "a block has more entries than parameters",
    "a Rice parameter is out of range",
    "blocks are longer than the message",
    "the entries are not as many as the header says",
    "a block ends within a number",
    "an index is beyond the end",
    "a block has bytes or bits that mean nothing",
    "a byte is not five digits of base 3",
)


def plane_size(mode: int, length: int, count: int) -> int:
    """The bytes of the plane of values."""
    return ((count + 7) // 8, (count + 7) // 8, (length + 4) // 5, 2 * count, 4 * count, 8 * count)[mode]


def times(values: Array, exponent: int) -> Array:
    """values · 2^exponent."""
    import numpy as np

    if abs(exponent) > 100:  # the power itself may be beyond the range, though the product is not
        return np.ldexp(values, exponent)
    product: Array = values * values.dtype.type(2.0**exponent)
    return product


def read_only(array: Array) -> Array:
    """A read-only view: google_crc32c takes no other."""
    view = array.view()
    view.flags.writeable = False
    return view


def refused(why: str) -> WireError:
    return WireError(f"not a sparse message: {why}")
