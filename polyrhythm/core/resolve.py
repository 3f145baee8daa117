"""How a strategy travels between processes.

A strategy's text names classes, and a process that never imported the user's script does not know those of
the user. So what travels is the text, which holds the values of the fields, and the class path of each name
in it that is not built in. The traits travel with them: the coordinator needs those, and never the class.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from polyrhythm.core.errors import UnknownName, UsageError
from polyrhythm.core.grammar import Configured
from polyrhythm.core.registry import is_builtin, parse, registered
from polyrhythm.core.strategy import Strategy, Traits

SCRIPT = "__polyrhythm_script__"  # the module name of a script that is imported instead of run
_SCRIPTS = ("__main__", SCRIPT)
HINT = "define your own in the script before polyrhythm.init(), or name its module with --import"


@dataclass(frozen=True)
class ResolvedStrategy:
    """A strategy whose classes are known in some process, for those that may not know them."""

    text: str
    traits: Traits
    classes: Mapping[str, str] = field(default_factory=dict)  # the class path of each name not built in
    notes: tuple[str, ...] = ()  # what a person should know about it in this run

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """Plain values, for messages."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> ResolvedStrategy:
        return msgspec.convert(dict(plain), ResolvedStrategy)


def resolved(strategy: Strategy, notes: tuple[str, ...] = ()) -> ResolvedStrategy:
    """The form of a strategy that travels."""
    for each in _configured(strategy):
        known = registered(each.kind).get(each.name)
        if known is None or class_path(known) != class_path(type(each)):
            raise UsageError(
                f"{type(each).__qualname__} has no name of its own, so other processes cannot find it; set "
                'name = "mine" in the class'
            )
    return ResolvedStrategy(str(strategy), strategy.traits, class_paths(strategy), notes)


def load(text: str, classes: Mapping[str, str] = MappingProxyType({})) -> Strategy:
    """The strategy of this text, with the classes at these paths; raises UnknownName."""
    for key, path in classes.items():
        kind, name = key.split(" ")
        module = path.partition(":")[0]
        if name not in registered(kind) and module not in _SCRIPTS:
            with contextlib.suppress(ImportError):  # then the name is unknown, which `parse` reports
                importlib.import_module(module)
    with hinted():
        strategy = parse(text)
    found = class_paths(strategy)
    for key, path in classes.items():
        if key not in found or not _same_path(found[key], path):
            raise UsageError(
                f"the {key} is {found.get(key, 'built in')} here and {path} where the run began; all hosts "
                "need the same code"
            )
    return strategy


@contextlib.contextmanager
def hinted() -> Iterator[None]:
    """Adds to the error for an unknown name how a user makes a name known."""
    try:
        yield
    except UnknownName as error:
        raise UnknownName(f"{error}; {HINT}") from None


def class_paths(strategy: Strategy) -> dict[str, str]:
    """The class path of each name in a strategy's text that is not built in, by kind and name."""
    return {
        f"{each.kind} {each.name}": class_path(type(each))
        for each in _configured(strategy)
        if not is_builtin(type(each))
    }


def class_path(cls: type) -> str:
    """Module and qualified name of a class; the module of a script is `__main__`."""
    return f"{'__main__' if cls.__module__ in _SCRIPTS else cls.__module__}:{cls.__qualname__}"


def _same_path(one: str, other: str) -> bool:
    """True if two paths are of one class. A script on one host may be a module on another."""
    (module, name), (other_module, other_name) = one.split(":"), other.split(":")
    return name == other_name and (module == other_module or "__main__" in (module, other_module))


def _configured(strategy: Strategy) -> Iterator[Configured]:
    for part in strategy.parts:
        yield part
        if part.codec is not None:
            yield part.codec
