"""What the documents say is so: links, examples, and every code block of README and docs."""

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
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import polyrhythm as pr
import polyrhythm.compress.codecs
import polyrhythm.strategies
from polyrhythm.core.registry import describe
from tests.support.code_blocks import ROOT, Command, Reader, blocks, pages, run_script
from tests.support.rows import OWN

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GENERATED = {  # pages that `make docs` makes from the code
    **{f"docs/strategies/{name}.md": name for name in ["index", *pr.Strategy.registry]},
    **{f"docs/codecs/{name}.md": name for name in ["index", *pr.Codec.registry]},
    "docs/composition.md": "",
}
assert OWN  # imported for the strategy and the codec of an example, which documents name


def modules() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for package in (polyrhythm.strategies, polyrhythm.compress.codecs)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]


def text_of(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


# The pages that a newcomer begins with.
QUICK = (
    "README.md",
    "docs/tutorial/1-one-script.md",
    "docs/tutorial/2-two-workers.md",
    "docs/how-to/convert-a-script.md",
)


@pytest.mark.parametrize("name", QUICK)
def test_code_blocks_of_documents_run(name: str, tmp_path: Path) -> None:
    """Every block is run or checked, in order; a kind of block that nobody runs fails."""
    Reader(tmp_path).read(text_of(name), slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a page may train many models
@pytest.mark.parametrize(
    "name", [name for name in PAGES if name not in QUICK or any(b.slow for b in blocks(text_of(name)))]
)
def test_all_code_blocks_of_documents_run(name: str, tmp_path: Path) -> None:
    """The other pages, and those with blocks that take long or need a compiler, from beginning to end."""
    Reader(tmp_path).read(text_of(name), slow=True)


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```console\n$ polyrhythm nonsense\n```\n", "ended with 2"),
        ("```console\n$ rm -r /\n```\n", "nobody runs rm"),
        ("```console\noutput\n```\n", "is no command"),
        ("```bash\nls\n```\n", "nobody runs bash"),
        ("```\nls\n```\n", "has no language"),
        ('```python title="train.py"\nx = 1\n```\n', "no command uses"),
        ("```python\nraise ValueError(1)\n```\n", "1"),
        ("```console\n$ polyrhythm --version\n```\n\n```text\npolyphony 1.0\n```\n", "not in the output"),
        ("```console\n$ make nothing\n```\n", "no target"),
        ("```console\n$ python -m benchmarks nothing\n```\n", "no benchmark"),
    ],
)
def test_code_blocks_that_are_wrong_are_found(page: str, error: str, tmp_path: Path) -> None:
    """The test above can fail."""
    with pytest.raises((AssertionError, ValueError), match=error):
        Reader(tmp_path).read(page, slow=False)


@pytest.mark.parametrize("name", PAGES)
def test_strategies_named_in_documents_can_be_parsed(name: str) -> None:
    """Every strategy with fields or a codec that is written in code means something."""
    names = "|".join(row.name for row in describe())
    for text in re.findall(rf"`((?:{names})[:+][^`]+)`", text_of(name)):
        if not re.fullmatch(r"[\w-]+:[a-z_]+", text) or text.endswith("auto"):  # a field, not a value
            pr.parse(text)


def test_readme_is_short() -> None:
    """People finish it."""
    assert len(text_of("README.md").split()) <= 800


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_in_the_docs_lead_to_files(name: str) -> None:
    """Every relative link leads to a file, and its anchor to a heading there.

    Pages of the site may link to pages that are generated. The README may not: it is read without the site.
    """
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        where = page.relative_to(ROOT).as_posix()
        made = where in GENERATED or where.startswith("docs/reference/")
        assert page.exists() or (made and name != "README.md"), target
        if anchor and where in PAGES:
            assert anchor in {slug(line) for line in text_of(where).splitlines() if line.startswith("#")}, (
                target
            )


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    words = re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower())
    return re.sub(r"\s+", "-", words)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_docstring_examples_of_strategies_and_codecs_pass(module: ModuleType) -> None:
    """The examples in the docstrings of strategies and codecs give what they say, and each has one."""
    registered = [*pr.Strategy.registry.values(), *pr.Codec.registry.values()]
    named = [each for each in registered if each.__module__ == module.__name__]
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted >= 2 * len(named)


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
def test_examples_begin_with_how_to_start_them(example: Path, tmp_path: Path) -> None:
    """The commands in an example's docstring name this file and options it knows, and so does its --help."""
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    commands = [
        shlex.split(line) for line in text.splitlines() if line.startswith(("python ", "polyrhythm "))
    ]
    assert len(commands) >= 2
    shown = Command(run_script, [str(example), "--help"], tmp_path).end(0)
    for command in commands:
        assert f"examples/{example.name}" in command
        rest = command[command.index("--") + 1 :] if "--" in command else []
        own = rest if command[0] == "polyrhythm" else command[2:]
        assert all(option in shown for option in own if option.startswith("--"))
        if "--strategy" in command:
            pr.parse(command[command.index("--strategy") + 1])


@cache
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


@pytest.mark.parametrize(
    "name", [name for name in PAGES if re.match(r"docs/(architecture|testing|decisions/)", name)]
)
def test_files_classes_and_methods_named_in_the_docs_exist(name: str) -> None:
    """In code quotes: `room/file.py`, `Class`, `Class.method` and `method()`."""
    known = names_in_the_code() | {"Tensor.backward"}
    text = re.sub(r"^```.*?^```$", "", text_of(name), flags=re.M | re.S)
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
