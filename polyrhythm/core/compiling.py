"""How loops are compiled by numba: those of codecs and those of `optim.sparse_sgd_loops`.

Importing numba takes half a second, so only modules with loops import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from polyrhythm.core.compile_note import compile_note
from polyrhythm.core.interrupts import held

insert: Any = cgutils.get_or_insert_function
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled on its first call, kept on disk for the next process, and run without Python's lock.

    Without `fastmath`: sums and products round as in torch, so both backends give the same bits. Ctrl-C takes
    effect when compilation ends; during it, it would be lost.
    """

    def made(cache: bool) -> Function:
        dispatcher: Any = njit(cache=cache, nogil=True, error_model="numpy")(function)
        _announced(dispatcher._compiler, cache)
        return cast(Function, _interruptible(dispatcher))

    try:
        return made(cache=True)
    except RuntimeError:  # no cache folder can be written to: every process compiles for itself
        return made(cache=False)


def part(function: Function) -> Function:
    """Inlined into each loop that calls it, where a call would cost more than the work."""
    return cast(Function, njit(nogil=True, error_model="numpy", forceinline=True)(function))


def _interruptible(dispatcher: Any) -> Any:
    """Holds signals back while this dispatcher compiles, or loads from its cache on disk."""
    compile = dispatcher.compile

    @wraps(compile)
    def compile_held(signature: Any) -> Any:
        with held():
            return compile(signature)

    dispatcher.compile = compile_held
    return dispatcher


def _announced(compiler: Any, cache: bool) -> None:
    """Has a person told before this compiles; it is not called for what is in the cache."""
    compile = compiler.compile

    @wraps(compile)
    def compile_announced(*args: Any) -> Any:
        compile_note.say(cache)
        return compile(*args)

    compiler.compile = compile_announced


def _trailing_zeros(context: Any, number: Any) -> Any:
    """The number of zero bits that a 64-bit number ends in: one instruction, which Python lacks."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), code


trailing_zeros: Any = intrinsic(_trailing_zeros)


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Fetches an element of a vector into the cache in the background. Only speed depends on it."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        call = insert(builder.module, kind, "llvm.prefetch.p0i8")
        near = builder.bitcast(builder.gep(data, [arguments[1]]), place)
        # For reading, into the nearest cache, as data.
        builder.call(call, [near, *(ir.Constant(number, each) for each in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), code


prefetch: Any = intrinsic(_prefetch)
