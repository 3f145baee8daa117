"""Modules: each simulated node has its own copies of the script and of the modules beside it, like a process.

A process has one table of modules, `sys.modules`, so it holds the copies of one node at a time; they are
swapped when a fiber of another node continues. The strategies and codecs that the copies define are swapped
too. Installed packages, polyrhythm and compiled modules are shared by all nodes.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from polyrhythm.core.codec import Codec
from polyrhythm.core.registry import load_builtins
from polyrhythm.core.strategy import Strategy

_REGISTRIES: tuple[dict[str, Any], ...] = (Strategy.registry, Codec.registry)
_INSTALLED = ("site-packages", "dist-packages")


class ModuleTable:
    """One node's own modules, and the classes that they have registered."""

    def __init__(self) -> None:
        self.names = {"__main__"}
        self.modules: dict[str, ModuleType] = {}
        self.classes: list[dict[str, Any]] = [{} for _ in _REGISTRIES]


class OwnModules:
    """Swaps the modules that come from `places`: the folder of the script, the current one, PYTHONPATH."""

    def __init__(self, places: Sequence[Path]) -> None:
        ours = find_spec("polyrhythm")
        assert ours is not None and ours.origin is not None
        self._places = [each.resolve() for each in places]
        self._shared = [
            Path(ours.origin).parent,
            *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        ]
        load_builtins()
        self._caller = self._owner = ModuleTable()  # whose modules are in `sys.modules`
        self._caller.names |= {name for name, module in [*sys.modules.items()] if self._owns_module(module)}
        self._registered = [0 for _ in _REGISTRIES]  # classes that are not of a node
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Python calls this before it imports a module; the module itself is found by others."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and self._owns(spec):
            self._owner.names.add(name)

    def install(self, table: ModuleTable) -> None:
        """Called before code of a node runs."""
        before = self._owner
        if table is before:
            return
        for name in before.names:
            if (module := sys.modules.pop(name, None)) is not None:
                before.modules[name] = module
        for number, registry in enumerate(_REGISTRIES):
            if len(registry) > self._registered[number]:
                mine = {name: cls for name, cls in registry.items() if cls.__module__ in before.names}
                before.classes[number] = mine
                for name in mine:
                    del registry[name]
                self._registered[number] = len(registry)
            registry.update(table.classes[number])
        sys.modules.update(table.modules)
        self._owner = table

    def restore(self) -> None:
        """Restores the modules from before the simulation."""
        self.install(self._caller)
        sys.meta_path.remove(self)

    def _owns_module(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)
        return isinstance(spec, ModuleSpec) and self._owns(spec)

    def _owns(self, spec: ModuleSpec) -> bool:
        """True for Python code, and namespace packages, in one of the places."""
        folders = spec.submodule_search_locations
        where = spec.origin if spec.has_location else next(iter(folders), None) if folders else None
        if where is None or (spec.has_location and not where.endswith(".py")):
            return False
        path = Path(where)
        return (
            any(path.is_relative_to(each) for each in self._places)
            and not any(path.is_relative_to(each) for each in self._shared)
            and not any(part in _INSTALLED for part in path.parts)
        )
