"""How every loop is compiled: those in this folder, in `dense`, and in `optim.sparse_sgd_loops`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from polyrhythm.core.interrupts import held

insert: Any = cgutils.get_or_insert_function
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled on its first call, kept on disk for the next process, and run without Python's lock.

    Without `fastmath`: sums and products round as in torch, so both roads give the same bits.
    Ctrl-C waits for the end of the compilation, where it would otherwise be lost.
    """

    def made(cache: bool) -> Function:
        dispatcher = njit(cache=cache, nogil=True, error_model="numpy")(function)
        return cast(Function, _interruptible(dispatcher))

    try:
        return made(cache=True)
    except RuntimeError:  # neither this folder nor the user's can be written: every process compiles anew
        return made(cache=False)


def part(function: Function) -> Function:
    """Compiled as a part of each loop that calls it, where a call would cost more than what it does."""
    return cast(Function, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def _interruptible(dispatcher: Any) -> Any:
    """Holds signals while this dispatcher compiles, or loads what it has kept on disk."""
    compile = dispatcher.compile

    @wraps(compile)
    def compile_held(signature: Any) -> Any:
        with held():
            return compile(signature)

    dispatcher.compile = compile_held
    return dispatcher


def _trailing_zeros(context: Any, number: Any) -> Any:
    """How many zeros a 64-bit number ends in: one instruction, which Python has no word for."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), code


trailing_zeros: Any = intrinsic(_trailing_zeros)


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Has an element of a vector brought near while something else goes on. Nothing depends on it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        call = insert(builder.module, kind, "llvm.prefetch.p0i8")
        near = builder.bitcast(builder.gep(data, [arguments[1]]), place)
        # To read; as near as can be; data, not instructions.
        builder.call(call, [near, *(ir.Constant(number, each) for each in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), code


prefetch: Any = intrinsic(_prefetch)
