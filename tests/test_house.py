"""The house: who may import whom, how large a thing may be, and what strategies may touch.

Strategies, codecs and the coordinator touch the world only through Node and their arguments. Otherwise no
simulation or replay could be trusted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyrhythm

ROOT = Path(polyrhythm.__file__).parent
PACKAGES = ("strategies", "compress", "coordination")
FORBIDDEN = (
    *("socket", "ssl", "select", "selectors", "asyncio", "threading", "multiprocessing", "subprocess"),
    *("time", "random", "os", "greenlet", "numpy.random", "torch.distributed", "torch.manual_seed"),
    *("polyrhythm.wire", "polyrhythm.worlds", "polyrhythm.launch"),
    "importlib",
    *(BUILTINS := ("__import__", "exec", "eval")),  # ways around this test
)


def package_of(path: Path) -> str:
    return ".".join(["polyrhythm", *path.parent.relative_to(ROOT).parts])


def imported_names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """The dotted name of each thing that a statement imports, in a module of this package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parents = package.split(".")
    source = parents[: len(parents) + 1 - node.level] if node.level else []
    return [".".join([*source, *filter(None, [node.module]), alias.name]) for alias in node.names]


def names_used(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Every dotted name that a module imports or reaches through an import, however it is spelled."""
    local = {name: name for name in BUILTINS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, name in zip(node.names, imported_names(node, package), strict=True):
                yield node.lineno, name
                # `import a.b` binds a; `import a.b as c` binds c to a.b
                whole = alias.asname or isinstance(node, ast.ImportFrom)
                first = alias.name.partition(".")[0]
                local[alias.asname or first] = name if whole else first
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            if first in local:
                yield node.lineno, local[first] + dot + rest


def violations(text: str, package: str = "polyrhythm.strategies") -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in sorted(set(names_used(ast.parse(text), package)))
        if name.startswith("torch.rand") or any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN)
    ]


@pytest.mark.parametrize(
    "path",
    [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_strategies_and_codecs_import_no_forbidden_module(path: Path) -> None:
    assert violations(path.read_text(), package_of(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import socket",
        "import os.path",
        "import json, time",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ntorch.distributed.barrier()",
        "from polyrhythm import wire",
        "from polyrhythm.worlds.processes.node import Processes",
        "from .. import launch",
        "from ..wire.frames import read",
        "def f():\n    import random",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import threading",
        "import torch\nx = torch.rand(3)",
        "import torch as t\nx = t.randint_like(y, 3)",
        "from torch import randperm",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.random.seed()",
        "import numpy as np\nnp.random.rand(3)",
        "__import__('socket')",
        "import importlib",
    ],
)
def test_dependency_check_rejects_forbidden_imports(text: str) -> None:
    assert violations(text)


@pytest.mark.parametrize(
    "text",
    [
        "import math\nimport torch\nx = torch.zeros(3)",
        "from polyrhythm.core.node import Node\nfrom ..strategy import Strategy",
        "from polyrhythm.collectives.arithmetic import reduce",
        "def step(node, replica):\n    time = node.now()\n    node.time.random(time)",
        "import oslo, timeit_like",
        "noise = torch.empty(3).uniform_(generator=generator)",
    ],
)
def test_dependency_check_accepts_allowed_imports(text: str) -> None:
    assert violations(text) == []


# --- who may import whom ----------------------------------------------------------------------------

# Each room may import the rooms of the lines above it. `wire` imports `core` only.
LAYERS = (
    {"core"},
    {"model", "wire", "record", "data"},
    {"collectives"},
    {"compress"},
    {"strategies", "parallel"},
    {"session"},
    {"coordination"},
    {"worlds"},
    {"launch"},
    {"lab", "integrations", "optim"},
    {"cli"},
)
RANK = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported_rooms(text: str, package: str) -> set[str]:
    """The rooms that a module of this package imports when it runs, lazily or not."""
    tree = ast.parse(text)
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in typing:
            names = imported_names(node, package)
            rooms |= {name.split(".")[1] for name in names if name.startswith("polyrhythm.")}
    return rooms & RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    below = {"core"} if room == "wire" else {other for other in RANK if RANK[other] < RANK[room]}
    assert imported_rooms(path.read_text(), package_of(path)) <= below | {room}


@pytest.mark.parametrize(
    "text",
    [
        "import polyrhythm.wire.frame",
        "from polyrhythm import wire",
        "from polyrhythm.wire.frame import Part",
        "from ... import wire",
        "from ...wire import frame",
        "def f():\n    from ...wire.frame import Part",
    ],
)
def test_every_way_to_import_a_room_is_seen(text: str) -> None:
    assert imported_rooms(text, "polyrhythm.strategies.server") == {"wire"}


# --- how large a thing may be -----------------------------------------------------------------------


def too_large(path: Path) -> list[str]:
    """Modules over 400 lines, classes over 300, constructors over 8 arguments."""
    text = path.read_text()
    tree, found = ast.parse(text), []
    if (lines := text.count("\n")) > 400:
        found.append(f"{lines} lines")
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > 300:
            found.append(f"class {node.name}: {lines} lines")
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                count = len(method.args.posonlyargs + method.args.args + method.args.kwonlyargs) - 1
                if count > 8:
                    found.append(f"{node.name}(): {count} arguments")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_classes_and_constructors_stay_small(path: Path) -> None:
    assert too_large(path) == []


def test_a_large_module_is_found_whatever_its_first_line_says(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Batches that belong together."""\n' + "x = 1\n" * 400)
    assert too_large(path) == ["401 lines"]


def test_class_names_have_one_meaning() -> None:
    """No two public classes of the package share a name."""
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
