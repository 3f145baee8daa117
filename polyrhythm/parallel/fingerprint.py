"""Fingerprints of models: equal only if `torch.export` sees the same program, on other parameters.

A fingerprint has the attributes of all modules, the code of their classes, and what that code reads: globals,
closures and defaults. What belongs to installed packages is one object for all nodes of a simulation, and
compared by identity. What is not known to be comparable is refused.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.parallel.trees import flatten_call

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_UNREAD = {"__annotations__", "__dict__", "__doc__", "__module__", "__weakref__"}  # of a class
_DATACLASS = {"__init__", "__repr__", "__eq__", "__hash__", "__dataclass_fields__", "__dataclass_params__"}
# Code that uses one of these may read anything.
_DYNAMIC = {"__import__", "compile", "eval", "exec", "globals", "locals", "open", "vars"}
_REFLECTIVE = {"builtins", "ctypes", "gc", "importlib", "inspect", "sys", "types"}
# What these return is not part of the program: the environment, the time, random numbers, the rank.
_OUTSIDE = {
    "datetime",
    "os",
    "polyrhythm",
    "posix",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
    "uuid",
}
_OUTSIDE_NAMES = {"environ", "get_rank", "getenv"}
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS += [str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1])]
_INSTALLED = tuple(f"{folder}/" for folder in _FOLDERS)


class Incomparable(Exception):
    """A model has something of which two copies cannot be compared."""


def fingerprint(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What `torch.export` could see of a model and of a call; raises Incomparable."""
    leaves, spec = flatten_call(args, kwargs)
    try:
        made = _Fingerprint(model)
        made.tokens += [spec, *_modes()]
        for leaf in leaves:
            made.tensor(leaf) if isinstance(leaf, Tensor) else made.add(leaf)
        made.add(model)
    except RecursionError:
        raise Incomparable("a model that is nested too deeply") from None
    return made.tokens


def _modes() -> list[Any]:
    """The settings of torch that change what the same code computes."""
    modes = [torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()]
    modes += [torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()]
    for device in ("cpu", "cuda", "mps", "xpu"):
        modes += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
    return modes


class _Fingerprint:
    """Writes down objects one after another; one that comes again is a number."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._held: list[Any] = []  # so that no identity is used twice
        # Values of parameters and buffers do not matter; those of other tensors become constants.
        self._tensors = {id(each) for each in (*model.parameters(), *model.buffers())}

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self.tokens += [type(value), repr(value)]
        elif self._is_new(id(value)):
            self._held.append(value)
            self._contents(value)

    def _is_new(self, key: Any) -> bool:
        known = key in self._numbers
        self.tokens.append(self._numbers.setdefault(key, len(self._numbers)))
        return not known

    def _contents(self, value: Any) -> None:
        kind = type(value)
        if kind in (tuple, list):
            self._all(kind, value)
        elif kind in (dict, OrderedDict):
            self._all(kind, [each for item in value.items() for each in item])
        elif kind in (set, frozenset) and all(type(each) in _PLAIN for each in value):
            self._all(kind, sorted(value, key=repr))
        elif kind in (Tensor, nn.Parameter) and id(value) in self._tensors:
            self.tensor(value)
            self.add(vars(value))
        elif isinstance(value, type):
            self._class(value)
        elif kind is types.FunctionType:
            self._function(value)
        elif kind is types.MethodType:
            self._all(kind, (value.__self__, value.__func__))
        elif kind in (staticmethod, classmethod):
            self._all(kind, (value.__func__,))
        elif kind is property:
            self._all(kind, (value.fget, value.fset, value.fdel))
        elif kind is functools.partial:
            self._all(kind, (value.func, value.args, value.keywords))
        elif kind is weakref.ReferenceType:
            self._all(kind, (value(),))
        elif _is_its_attributes(value):
            self._all("object", (kind, vars(value)))
        elif kind is types.BuiltinFunctionType and isinstance(value.__self__, types.ModuleType | None):
            _check_inside(value.__module__ or "")
            if value.__name__ in _DYNAMIC:
                raise Incomparable(f"the function {value.__name__}")
            self.tokens.append(value)
        else:
            raise Incomparable(f"a {kind.__name__}")

    def _all(self, kind: Any, values: Iterable[Any]) -> None:
        held = list(values)
        self.tokens += [kind, len(held)]
        for each in held:
            self.add(each)

    def tensor(self, value: Tensor) -> None:
        """What capture fixes of a tensor, and which other tensors share its memory."""
        if value.layout is not torch.strided:
            raise Incomparable("a tensor that is not dense")
        self.tokens += [type(value), value.shape, value.stride(), value.storage_offset(), value.dtype]
        self.tokens += [value.device, value.requires_grad, value.is_conj(), value.is_neg()]
        self._is_new(("storage", value.untyped_storage()._cdata))

    def _class(self, cls: type) -> None:
        if _is_installed(sys.modules.get(cls.__module__)):
            self.tokens.append(cls)
            return
        self._all(type(cls), (cls.__qualname__, *cls.__bases__))
        unread = _UNREAD | _DATACLASS if dataclasses.is_dataclass(cls) else _UNREAD
        for name, value in vars(cls).items():
            if name not in unread:
                self._all(name, (value,))

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        installed = code.co_filename.startswith(_INSTALLED)
        _check_inside(function.__module__ or "")
        if installed and not function.__closure__:
            self.tokens.append(function)
            return
        self.tokens.append(code)  # compared by its instructions and constants
        self._all("defaults", (function.__defaults__, function.__kwdefaults__, vars(function)))
        try:
            self._all("closure", (cell.cell_contents for cell in function.__closure__ or ()))
        except ValueError:
            raise Incomparable("a closure over a variable that has no value") from None
        read, names = _names(code)
        if not installed and (outside := names & _OUTSIDE_NAMES):
            raise Incomparable(f"code with the name {min(outside)}")
        for name in () if installed else sorted(read):
            if name in function.__globals__:
                self.tokens.append(name)
                self._global(function.__globals__[name], names)
            elif name in _DYNAMIC:
                raise Incomparable(f"code that calls {name}")

    def _global(self, value: Any, names: frozenset[str]) -> None:
        """A global. Of a module that is not installed, the attributes with names that the code has."""
        if not isinstance(value, types.ModuleType):
            self.add(value)
            return
        _check_inside(value.__name__)
        computed = "__getattr__" in vars(value) or type(value) is not types.ModuleType
        if value.__name__.partition(".")[0] in _REFLECTIVE:
            raise Incomparable(f"code that uses {value.__name__}")
        if _is_installed(value):
            self.tokens.append(value)
        elif computed or names & {"getattr", "__dict__"}:
            raise Incomparable(f"code that may read all of {value.__name__}")
        elif self._is_new((id(value), names)):
            for name in sorted(names & vars(value).keys()):
                self.tokens.append(name)
                self._global(vars(value)[name], names)


@functools.cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code reads, and all names in it."""
    read, names = set[str](), set(code.co_names)
    for each in dis.get_instructions(code):
        if each.opname in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            raise Incomparable(f"code with the instruction {each.opname}")
        if each.opname.startswith("LOAD") and ("GLOBAL" in each.opname or "NAME" in each.opname):
            read.add(str(each.argval))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            read, names = read.union(_names(inner)[0]), names.union(_names(inner)[1])
    return frozenset(read), frozenset(names)


def _check_inside(module: str) -> None:
    if module.partition(".")[0] in _OUTSIDE or module.startswith("torch.distributed"):
        raise Incomparable(f"code that uses {module}")


def _is_installed(module: types.ModuleType | None) -> bool:
    if (file := getattr(module, "__file__", None)) is not None:
        return str(file).startswith(_INSTALLED)
    return module is not None and module.__name__ in sys.builtin_module_names


def _is_its_attributes(value: Any) -> bool:
    """True for objects that have no state besides their attributes."""
    plain = dataclasses.is_dataclass(value) or isinstance(value, nn.Module)
    slots = any(vars(each).get("__slots__") for each in type(value).__mro__)
    return plain and not slots and not isinstance(value, torch.jit.ScriptModule)
