"""How every loop is compiled: those in this folder, those in `dense`, and those of `row_loops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled on its first call, kept on disk for the next process, and run without Python's lock.

    Without `fastmath`: sums and products round as in torch, so both roads give the same bits.
    """

    def made(cache: bool) -> Function:
        return cast(Function, njit(cache=cache, nogil=True, error_model="numpy")(function))

    try:
        return made(cache=True)
    except RuntimeError:  # neither this folder nor the user's can be written: every process compiles anew
        return made(cache=False)


def part(function: Function) -> Function:
    """Compiled as a part of each loop that calls it, where a call would cost more than what it does."""
    return cast(Function, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def _trailing_zeros(context: Any, number: Any) -> Any:
    """How many zeros a 64-bit number ends in: one instruction, which Python has no word for."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), code


trailing_zeros: Any = intrinsic(_trailing_zeros)
