"""Runs the code blocks of a Markdown page as a reader would: in order, in one folder.

- ```` ```python title="train.py" ```` is a file. A command or a Python block of the page must use it.
- ```` ```python ```` is run, and sees the names of the Python blocks above it.
- ```` ```toml ```` is a file if it has a title. Otherwise it must be a part of a file that we know.
- ```` ```console ```` has one command a line, after `$ `. With a name before the `$` each host has a folder
  of its own, and all of them are on the loopback interface.
- ```` ```text ```` is output of the commands in the console block above it; numbers may differ.

`<!-- test: continues tutorial/1-one-script.md -->` gives a page the files of another one.

A comment above a block says what else to do: `<!-- test: slow -->` (leave it to the slow tests), `exit 2`
(the commands end with this code), `worker local:8` (run it on two simulated workers), `given model,
optimizer` (it needs these names), `in examples/x.py` (it is a part of that file, which other tests run),
`compiles` (it shows the form of a call), `not output`.

What is not run here is at least checked: targets of make, extras of pip, the environment that is activated,
names of benchmarks. A command or a
language that is not known is an error, so that no block is left out.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import polyrhythm as pr
from polyrhythm.cli.entry import main as polyrhythm_main
from polyrhythm.worlds.cluster import Cluster

ROOT = Path(__file__).parents[2]
LIMIT = 600.0  # seconds for a command, on a busy machine
BLOCK = re.compile(
    r"^(?:<!-- test: (?P<test>[^\n]*?) -->\n+)?"
    r"(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
PROMPT = re.compile(r"(?P<host>\w*)\$ (?P<command>.*)")
ADDRESS = re.compile(r"\b(?:10|192)(?:\.\d+){3}:\d+|\bhost\w:\d+")
CONTINUES = re.compile(r"<!-- test: continues (\S+) -->")
FENCE = re.compile(r"^ *```", re.MULTILINE)
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    test: str
    text: str
    line: int

    @property
    def slow(self) -> bool:
        return "slow" in self.test.split(", ")


def blocks(page: str) -> list[Block]:
    """All code blocks of a page; an error if a fence belongs to none of them."""
    found = []
    for match in BLOCK.finditer(page):
        language, *rest = match["info"].split(maxsplit=1)
        title = re.search(r'title="([^"]+)"', rest[0]) if rest else None
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = page.count("\n", 0, match.start("text"))
        found.append(Block(language, title[1] if title else "", match["test"] or "", text, line))
    assert len(FENCE.findall(page)) == 2 * len(found), "a code block has no language, or does not end"
    return found


class Reader:
    """A reader with a page and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "page"}
        self.files: set[str] = set()  # written, and not used yet
        self.output = ""  # of the commands of the last console block
        self.seen = False  # if there was such a block, and it was run
        self._waiting: list[tuple[Command, int]] = []
        self._address = ""
        self._host("")

    def read(self, page: str, slow: bool) -> None:
        """Runs all blocks, but those marked slow only if `slow`."""
        previous = os.getcwd()
        os.chdir(self.folder)
        try:
            for other in CONTINUES.findall(page):
                for block in blocks((ROOT / "docs" / other).read_text(encoding="utf-8")):
                    if block.title:
                        self._write(block)
            self.files.clear()
            for block in blocks(page):
                if block.slow and not slow:
                    self.seen &= block.language != "console"
                    continue
                try:
                    getattr(self, f"_{block.language}")(block)
                except AttributeError as error:
                    if error.name != f"_{block.language}":
                        raise
                    raise AssertionError(f"line {block.line}: nobody runs {block.language}") from None
                except Exception as error:
                    error.add_note(f"in the block at line {block.line}:\n{block.text}")
                    raise
        finally:
            os.chdir(previous)
            for command, _ in self._waiting:
                command.kill()
        assert not self.files or (not slow and any(block.slow for block in blocks(page))), (
            f"no command uses {self.files}"
        )

    # --- one method for each language ---------------------------------------------------------------

    def _python(self, block: Block) -> None:
        compile(block.text, f"line {block.line}", "exec")
        if block.test == "compiles":
            return
        if block.test.startswith("in "):
            assert block.text in (ROOT / block.test[3:]).read_text(encoding="utf-8"), (
                "the example has changed"
            )
        elif block.title:
            self._write(block)
        elif block.test.startswith("worker "):
            strategy = block.test.removeprefix("worker ").split(", ")[0]
            made = compile(block.text, f"line {block.line}", "exec")
            pr.simulate(lambda: exec(made, given()), workers=2, strategy=strategy)
        else:
            if block.test.startswith("given "):
                known = given()
                self.names |= {name: known[name] for name in block.test[6:].split(", ")}
            self._use(block.text)
            exec(compile(block.text, f"line {block.line}", "exec"), self.names)

    def _toml(self, block: Block) -> None:
        content = tomllib.loads(block.text)
        if block.title:
            self._write(block)
            return
        match content:
            case {"project": {"entry-points": groups}}:
                assert set(groups) <= {"polyrhythm.strategies", "polyrhythm.codecs"}
            case {"fault": [{"name": _, "file": file, "old": old}]}:
                assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1
            case _:
                path = self.folder / "part.toml"
                path.write_text(block.text, encoding="utf-8")
                Cluster.load(path)

    def _console(self, block: Block) -> None:
        self.output, self.seen = "", True
        code = int(found[1]) if (found := re.search(r"\bexit (\d)", block.test)) else 0
        for line in block.text.replace("\\\n", " ").splitlines():
            match = PROMPT.fullmatch(line)
            assert match, f"{line!r} is no command: write `$ ` before it, and output into a block of text"
            words = shlex.split(match["command"], comments=True)
            self._use(match["command"])
            self._command(match["host"], words, code)
        for command, expected in self._waiting:
            self._end(command, expected)
        self._waiting.clear()

    def _text(self, block: Block) -> None:
        if block.test == "not output" or not self.seen:
            return
        there = {_shape(line) for line in self.output.splitlines()}
        for line in block.text.splitlines():
            if line.strip() and line.strip() != "...":
                assert _shape(line) in there, f"{line!r} is not in the output:\n{self.output}"

    # --- commands -----------------------------------------------------------------------------------

    def _command(self, host: str, words: list[str], code: int) -> None:
        known: dict[str, Callable[[], None]] = {
            "make": lambda: _check_targets(words[1:]),
            "pip": lambda: _check_extras(words),
            ".": lambda: _check_activate(words),
            "scp": lambda: self._copy(host, words),
            "git": lambda: None,
            "cd": lambda: None,
        }
        if words[0] in known:
            return known[words[0]]()
        if words[0] in ("cat", "chmod", "ls", "torchrun"):
            return self._run(self._host(host), _program, words, code)
        if words[:2] == ["python", "-m"]:
            return _check_module(words[2:])
        assert words[0] in ("python", "polyrhythm"), f"nobody runs {words[0]}"
        words = [self._reachable(word) for word in shortened(words)]
        target = run_script if words[0] == "python" else _polyrhythm
        self._run(self._host(host), target, words[1:], code, background="--here" in words or "join" in words)
        return None

    def _run(
        self, folder: Path, target: Callable[..., None], words: list[str], code: int, background: bool = False
    ) -> None:
        command = Command(target, words, folder)
        if not background:
            return self._end(command, code)
        self._waiting.append((command, code))
        if "--here" in words:
            self._address = command.find(r"polyrhythm join (\S+)")
        return None

    def _end(self, command: Command, code: int) -> None:
        self.output += command.end(code)

    def _reachable(self, word: str) -> str:
        """Addresses in the text become addresses of this machine."""
        if not ADDRESS.fullmatch(word):
            return word
        return self._address or "127.0.0.1:0"

    def _copy(self, host: str, words: list[str]) -> None:
        *_, source, target = words
        there, _, path = target.partition(":")
        shutil.copy(self._host(host) / source, self._host(there) / (path or "."))  # with its mode

    def _host(self, name: str) -> Path:
        folder = self.folder / name
        if not (folder / "examples").exists():
            folder.mkdir(exist_ok=True)
            (folder / "examples").symlink_to(ROOT / "examples")
            for file in self.folder.iterdir() if name else ():
                if file.is_file() and file.suffix in (".py", ".toml"):
                    shutil.copy(file, folder)
        return folder

    def _write(self, block: Block) -> None:
        (self.folder / block.title).write_text(block.text, encoding="utf-8")
        self.files.add(block.title)

    def _use(self, text: str) -> None:
        self.files = {file for file in self.files if not re.search(rf"\b{Path(file).stem}\b", text)}


class Command:
    """A command in a process of its own, forked from this one."""

    def __init__(self, target: Callable[..., None], words: list[str], folder: Path) -> None:
        _preload()
        self._words, self._file = words, folder / f".output-{time.monotonic_ns()}"
        self._file.touch()
        self._process: BaseProcess = _fork.Process(target=_begin, args=(target, words, folder, self._file))
        self._process.start()

    @property
    def text(self) -> str:
        return self._file.read_text(encoding="utf-8")

    def find(self, pattern: str) -> str:
        """The first group of a pattern, once it is in the output."""
        deadline = time.monotonic() + LIMIT
        while not (match := re.search(pattern, self.text)):
            assert self._process.is_alive() and time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return match[1]

    def end(self, code: int) -> str:
        """Waits until it ends; returns the output."""
        self._process.join(LIMIT)
        ended, text = self._process.exitcode, self.text
        self.kill()
        assert ended == code, f"{shlex.join(self._words)} ended with {ended}, not {code}:\n{text}"
        return text

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


@cache
def _preload() -> None:
    """Imports here what every child would take seconds to import."""
    import torch

    from polyrhythm.compress.kernels import load

    load()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports the compiler


def _begin(target: Callable[..., None], words: list[str], folder: Path, output: Path) -> None:
    os.chdir(folder)
    with output.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    target(words)


def _polyrhythm(words: list[str]) -> None:
    raise SystemExit(polyrhythm_main(words))


def run_script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent.resolve()))
    runpy.run_path(words[0], run_name="__main__")


def _program(words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if words[0] == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        os.execve(command[0], command, environment)
    os.execvpe(words[0], words, environment)


def shortened(words: list[str]) -> list[str]:
    """A command with fewer epochs, if it starts an example."""
    example = next((word for word in words if word.startswith("examples/") and word.endswith(".py")), "")
    if not example or words[1] in ("strategies", "codecs"):
        return words
    if "--epochs" in words:
        place = words.index("--epochs")
        return [*words[: place + 1], "1", *words[place + 2 :]]
    rest = [] if words[0] == "python" or "--" in words else ["--"]
    return [*words, *rest, "--epochs", "1"]


def _check_targets(targets: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def _check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[1] == "install"
    for word in words[2:]:
        name, _, extras = word.partition("[")
        assert name in (".", "-e", project["name"]), f"pip install {word}"
        assert set(filter(None, extras.rstrip("]").split(","))) <= set(project["optional-dependencies"])


def _check_activate(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    folder = words[1].removesuffix("/bin/activate")
    assert folder in makefile, f"make sets up no {folder}"


def _check_module(words: list[str]) -> None:
    module, *rest = words
    assert importlib.util.find_spec(module), f"no module {module}"
    if module == "benchmarks":
        for name in rest:
            assert name.isupper() or importlib.util.find_spec(f"benchmarks.{name}"), f"no benchmark {name}"
            if name == "compare":
                break


def _shape(line: str) -> str:
    """A line without what differs from run to run: numbers, and how wide columns are."""
    line = re.sub(r"\d[\d.,:-]*", "0", re.sub(r"─+", "─", line))
    return " ".join(line.split())


def given() -> dict[str, Any]:
    """Names that a script has before its fourth line: data, a model, an optimizer, a loader, a session."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from polyrhythm.data import digits

    session = pr.init()
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    return {
        "pr": pr, "torch": torch, "nn": nn, "F": functional, "session": session, "train_set": train_set,
        "test_set": test_set, "model": model, "optimizer": optimizer, "loader": loader,
    }  # fmt: skip


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))
