"""Where the strategies and codecs of users come from: modules that are named, and installed plug-ins.

A plug-in is a package with entry points; the name of each is the name of its strategy or codec:

    [project.entry-points."polyrhythm.strategies"]
    mine = "my_package.strategies:Mine"

    [project.entry-points."polyrhythm.codecs"]
    round = "my_package.codecs:Round"

The names are in the metadata of the package. Its modules are imported when a name is used: most of them
import torch, which takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {"strategy": "polyrhythm.strategies", "codec": "polyrhythm.codecs"}


@cache
def plugins(kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of installed packages, by name."""
    from importlib import metadata

    group = GROUPS.get(kind)  # splits are built in
    return {each.name: each for each in metadata.entry_points(group=group)} if group else {}


def load_plugin(kind: str, name: str) -> None:
    """Imports the plug-in of this name, if there is one; that registers its class."""
    entry = plugins(kind).get(name)
    if entry is None:
        return
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(f"the plug-in {_described(entry)} failed: {_reason(error)}") from None
    if getattr(found, "name", None) != name or getattr(found, "kind", None) != kind:
        raise UsageError(
            f"the plug-in {_described(entry)} is not a {kind} with this name; change its entry point"
        )


def load_plugins(kind: str) -> list[str]:
    """Imports all plug-ins; returns a line for each that failed."""
    failures = []
    for name in plugins(kind):
        try:
            load_plugin(kind, name)
        except UsageError as error:
            failures.append(str(error))
    return failures


def search(folder: Path | None) -> None:
    """Lets modules be imported from this folder and the current one, like scripts do."""
    places = [str(each.resolve()) for each in (folder, Path()) if each is not None]
    if folder is not None and places[0] not in sys.path:
        sys.path.insert(0, places[0])
    if places[-1] not in sys.path:
        sys.path.append(places[-1])


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that define strategies and codecs; raises UsageError if one cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise no_module(name) from None
            raise UsageError(f"--import {name} failed: {_reason(error)}") from None
        except Exception as error:
            raise UsageError(f"--import {name} failed: {_reason(error)}") from None


def check_modules(names: Sequence[str]) -> None:
    """Raises UsageError if a module does not exist, as far as that is known without importing any."""
    for name in names:
        first = name.partition(".")[0]
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"--import takes the name of a module, such as my_package.strategies, not {name!r}"
            )
        if first not in sys.modules and importlib.util.find_spec(first) is None:
            raise no_module(name)


def no_module(name: str) -> UsageError:
    return UsageError(
        f"there is no module {name} to import; it must be beside the script, in this folder or on PYTHONPATH"
    )


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a Python file as a module of this name; the file's own errors pass through."""
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _described(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name}" if entry.dist is not None else ""
    return f"{entry.name} = {entry.value}{package}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
