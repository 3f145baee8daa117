"""What the documents say is so: tables, links, examples and code."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import polyrhythm as pr
import polyrhythm.compress.codecs
import polyrhythm.strategies
from polyrhythm.core.registry import describe
from tests.support.rows import OWN

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
assert OWN  # imported for the strategy and the codec of an example, which documents name


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def modules() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for package in (polyrhythm.strategies, polyrhythm.compress.codecs)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]


def test_strategies_named_in_the_readme_can_be_parsed() -> None:
    """Every strategy with fields or a codec that is written in code means something."""
    names = "|".join(row.name for row in describe())
    texts = re.findall(rf"`((?:{names})[:+][^`]+)`", README)
    assert len(texts) >= 10
    for text in texts:
        if not re.fullmatch(r"[\w-]+:[a-z_]+", text):  # in the table the field has its name, not a value
            pr.parse(text)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_docstring_examples_of_strategies_and_codecs_pass(module: ModuleType) -> None:
    """The examples in the docstrings of strategies and codecs give what they say, and each has one."""
    registered = [*pr.Strategy.registry.values(), *pr.Codec.registry.values()]
    named = [each for each in registered if each.__module__ == module.__name__]
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted >= 2 * len(named)


def test_python_blocks_compile() -> None:
    """The README's Python is Python."""
    found = blocks(README, "python")
    assert any("class BlockMomentum" in block for block in found)
    for block in found:
        ast.parse(block)


def test_readme_shows_the_example_of_an_own_strategy() -> None:
    """The strategy and the codec of the README are those of the example, word for word, and short."""
    example = (ROOT / "examples" / "own_strategy.py").read_text(encoding="utf-8")
    classes = ("class BlockMomentum", "class Turns")
    shown = [block for block in blocks(README, "python") if any(name in block for name in classes)]
    assert len(shown) == 2
    assert all(block in example for block in shown)
    assert len([line for line in shown[0].splitlines() if line]) < 60


def test_readme_commands_name_existing_files_and_strategies() -> None:
    """Files in the README's commands are there, and its strategies mean something."""
    commands = [
        shlex.split(line[2:], comments=True)
        for block in blocks(README, "console")
        for line in block.splitlines()
    ]
    assert len(commands) >= 6
    for command in commands:
        for option, value in pairwise(command):
            if option == "--strategy":
                pr.parse(value)
        for word in command:
            if word.startswith("examples/"):
                assert (ROOT / word).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits.py", "own_strategy.py"])
def test_examples_on_digits_train_as_their_docstring_says(name: str, tmp_path: Path) -> None:
    """Each command in it works as written; other examples need data that has to be fetched first."""
    example = ROOT / "examples" / name
    for line in (ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or "").splitlines():
        if line.startswith(("python ", "polyrhythm ")):
            words = [str(example) if word == f"examples/{name}" else word for word in shlex.split(line)]
            words = words[1:] if words[0] == "python" else ["-m", *words]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                env=environment,
                check=False,
            )
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_begin_with_how_to_start_them(example: Path) -> None:
    """The commands in an example's docstring name this file and options it knows, and so does its --help."""
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    commands = [
        shlex.split(line) for line in text.splitlines() if line.startswith(("python ", "polyrhythm "))
    ]
    assert len(commands) >= 2
    done = subprocess.run(
        [sys.executable, str(example), "--help"],
        capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for command in commands:
        assert f"examples/{example.name}" in command
        rest = command[command.index("--") + 1 :] if "--" in command else []
        own = rest if command[0] == "polyrhythm" else command[2:]
        assert all(option in done.stdout for option in own if option.startswith("--"))
        if "--strategy" in command:
            pr.parse(command[command.index("--strategy") + 1])


def names_in_the_code() -> set[str]:
    """All classes of the package, all functions and methods, and `Class.name` for what a class defines."""
    found: set[str] = set()
    for path in (ROOT / "polyrhythm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                found.add(node.name)
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                found.update(f"{node.name}.{method.name}" for method in methods)
    return found


@pytest.mark.parametrize("name", ["architecture.md", "decisions.md", "testing.md"])
def test_files_classes_and_methods_named_in_the_docs_exist(name: str) -> None:
    """In code quotes: `room/file.py`, `Class`, `Class.method` and `method()`."""
    known = names_in_the_code() | {"Tensor.backward"}
    text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / name).read_text("utf-8"), flags=re.M | re.S)
    missing = []
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w/]+(/|\.py)", quoted):
            places = (ROOT, ROOT / "polyrhythm", ROOT / "tests" / "golden")
            if not any((place / quoted).exists() for place in places):
                missing.append(quoted)
        elif re.fullmatch(r"_?[A-Z]\w*[a-z]\w*(\.\w+)?|[a-z_]+\(\)", quoted):
            bare = quoted.removesuffix("()")
            if bare not in known and not hasattr(torch.optim, bare):
                missing.append(quoted)
    assert missing == []
