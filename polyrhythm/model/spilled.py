"""SpilledParameters: keeps the parameters of a model in a file while a script builds it.

A worker of a divided model needs a part of it, and which part is known when all of it is built. So that the
whole need not fit a worker, parameters are written to a file and their memory is freed as soon as others are
made. An operation of torch on such a parameter reads it again before it runs: a script computes what it would
compute in memory, with the same random numbers in the same order.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from polyrhythm.core.errors import UsageError

RESIDENT = 32 << 20  # bytes of parameters that stay in memory, besides those that an operation uses
SMALL = 1 << 12  # bytes: shorter parameters are never written to the file
# Methods by which others use the memory of a tensor without operations, or give it other memory.
_LENDING = frozenset(
    {
        "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_",
        "set_", "resize_", "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__",
    }
)  # fmt: skip

_NAMING = torch.ops.aten.detach.default, torch.ops.aten.alias.default  # operations that use no memory


class SpilledParameters:
    """The parameters that a script makes from `start` to `stop`, in memory or in a file."""

    def __init__(self, resident: int = RESIDENT) -> None:
        self._limit, self._held = resident, 0  # bytes in memory
        # It has no name, so that nothing is left of it.
        self._file = tempfile.TemporaryFile(prefix="polyrhythm-")  # noqa: SIM115
        self._end = 0  # of what the file has
        self._pages: dict[int, _Page] = {}  # by the address of the storage
        self._resident: dict[int, None] = {}  # those in memory, the latest used one last
        self._modes = _Paging(self), _Lending(self)
        self._new: Callable[..., Any] | None = None

    def start(self) -> None:
        """From now on parameters are kept here, and operations may use them."""
        _spilled.set(self)
        original = self._new = nn.Parameter.__new__

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            made: Any = original(cls, *args, **kwargs)
            self.adopt(made)
            return made

        nn.Parameter.__new__ = new  # type: ignore[method-assign]
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """New parameters are not kept here. Operations may use those that are under `paging` only."""
        if self._new is None:
            return
        current = _get_current_dispatch_mode(), _get_current_function_mode()  # type: ignore[no-untyped-call]
        if current != self._modes:
            raise UsageError(
                "session.prepare() was called inside a mode of torch that began after pr.init(), and until "
                "then parameters are kept in a file, because memory is limited: end the mode before"
            )
        for mode in self._modes:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        nn.Parameter.__new__, self._new = self._new, None  # type: ignore[method-assign]

    @contextmanager
    def paging(self) -> Iterator[None]:
        """A context in which operations may use the parameters, after `stop`."""
        with self._modes[0], self._modes[1]:
            yield

    def close(self, dropped: Iterable[Tensor]) -> None:
        """Reads all parameters into memory, but for those that nobody needs here: these become NaN.

        Memory that something else shares with a dropped parameter is read, too.
        """
        self.stop()
        for tensor in dropped:
            if tensor.untyped_storage()._cdata in self._pages:
                tensor.data = torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape)
        for key in self._pages.keys() - self._resident.keys():
            self._pages[key].read(self._file.fileno())
        self._pages.clear()
        self._file.close()
        _spilled.set(None)

    # --- called by the modes ------------------------------------------------------------------------

    def adopt(self, value: Any) -> None:
        """Keeps the memory of a parameter here, if it is ordinary memory and worth it."""
        with _directly():
            if type(value) is nn.Parameter and _ordinary(value):
                storage = value.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size >= SMALL and storage.resizable() and key not in self._pages:
                    self._pages[key], self._end = _Page(storage, self._end), self._end + size
                    self._resident[key], self._held = None, self._held + size
                    self._evict({key})

    def use(self, values: Any, writes: bool) -> None:
        """Reads what an operation uses."""
        with _directly():
            keys = self._keys(values)
            for key in keys:
                self._fetch(key)
                self._pages[key].changed |= writes
            self._evict(keys)

    def lend(self, values: Any) -> None:
        """Reads tensors into memory, where they stay."""
        with _directly():
            for key in self._keys(values):
                self._fetch(key)
                self._forget(key)

    def _keys(self, values: Any) -> set[int]:
        leaves = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
        return {each.untyped_storage()._cdata for each in leaves if _ordinary(each)} & self._pages.keys()

    def _fetch(self, key: int) -> None:
        if key not in self._resident:
            self._pages[key].read(self._file.fileno())
            self._held += self._pages[key].nbytes
        self._resident.pop(key, None)
        self._resident[key] = None

    def _forget(self, key: int) -> None:
        """A parameter in memory stays there."""
        del self._resident[key]
        self._held -= self._pages.pop(key).nbytes

    def _evict(self, needed: set[int]) -> None:
        """Frees the memory of parameters that were not used for the longest time."""
        for key in list(self._resident) if self._held > self._limit else ():
            if key in needed:
                continue
            if not self._pages[key].write(self._file.fileno()):
                self._forget(key)  # nobody has it any more
            else:
                del self._resident[key]
                self._held -= self._pages[key].nbytes
            if self._held <= self._limit:
                break


_spilled: ContextVar[SpilledParameters | None] = ContextVar("spilled", default=None)


def spilling() -> bool:
    """True while a model is built whose parameters are kept in a file."""
    return _spilled.get() is not None


def paging() -> AbstractContextManager[None]:
    """A context in which operations may use the parameters of a model that is not prepared yet."""
    mine = _spilled.get()
    return nullcontext() if mine is None else mine.paging()


class _Page:
    """The memory of a parameter, and its place in the file."""

    def __init__(self, storage: torch.UntypedStorage, offset: int) -> None:
        self.nbytes, self._offset = storage.nbytes(), offset
        # It also keeps the address from being used again.
        self._weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.changed = True  # since it was written

    def read(self, file: int) -> None:
        if (storage := self._storage()) is not None:
            storage.resize_(self.nbytes)
            _transfer(os.preadv, file, storage, self._offset)
            self.changed = False

    def write(self, file: int) -> bool:
        """Writes it and frees its memory; False if nobody has it any more."""
        if (storage := self._storage()) is None:
            return False
        if self.changed:
            _transfer(os.pwritev, file, storage, self._offset)
        storage.resize_(0)
        return True

    def _storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)


class _Paging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads the parameters that an operation uses, also in a backward pass."""

    def __init__(self, spilled: SpilledParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spilled = spilled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NAMING:
            self._spilled.use((args, kwargs), writes=func._schema.is_mutable)
        return func(*args, **(kwargs or {}))


class _Lending(TorchFunctionMode):
    """Leaves in memory what others use without operations, and keeps the new memory of a parameter."""

    def __init__(self, spilled: SpilledParameters) -> None:
        super().__init__()
        self._spilled = spilled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LENDING:
            self._spilled.lend((args, kwargs))
        made = func(*args, **(kwargs or {}))
        if name == "__set__":  # p.data = ...
            self._spilled.adopt(args[0])
        return made


@contextmanager
def _directly() -> Iterator[None]:
    """A context in which no mode sees the functions of torch."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def _ordinary(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _transfer(move: Callable[..., int], file: int, storage: torch.UntypedStorage, offset: int) -> None:
    # Memory that numpy has seen could not be freed.
    view = memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    while len(view):
        moved = move(file, [view], offset)
        if not moved:
            raise OSError(f"the file with the parameters of the model ends at byte {offset}")
        view, offset = view[moved:], offset + moved
