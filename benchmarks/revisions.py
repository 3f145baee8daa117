"""Two revisions side by side: a temporary work tree of one, and measurements in processes of their own.

Every measurement runs in the tree of its revision, with that revision's package and benchmarks. All that is
known of a revision is the interface of `benchmarks/key.py`, so it may have arranged its modules in any way.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.report import Steal, ticks

LIMIT = 300.0  # seconds for one measurement, which should take 5 to 30
GRACE = 5.0  # seconds for a measurement that is told to stop
ENTRY = Path("benchmarks") / "key.py"


class RevisionError(Exception):
    """What is wrong with a revision, in one line for the person who named it."""


@dataclass
class Measured:
    """What one process has measured."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    steal: float | None = None  # shares of all cores: of other machines,
    others: float | None = None  # and of other processes on this one


def resolve(root: Path, revision: str) -> str:
    """The full hash of a commit."""
    if not _git(root, "rev-parse", "--git-dir").stdout:
        raise RevisionError(f"{root} is not a git repository, so there is no revision to compare with")
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if found.returncode:
        raise RevisionError(
            f"there is no commit {revision!r} in this repository; give a hash, a tag, a branch or HEAD~1"
        )
    return found.stdout.strip()


def describe(root: Path) -> tuple[str, bool]:
    """The commit of a work tree, and whether files differ from it."""
    commit = _git(root, "rev-parse", "HEAD").stdout.strip()
    return commit, bool(_git(root, "status", "--porcelain").stdout.strip())


@contextmanager
def checkout(root: Path, commit: str) -> Iterator[Path]:
    """A temporary work tree of a commit, which is removed again however the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="polyrhythm-compare-")).resolve()
    tree = folder / "before"
    try:
        with _undisturbed():
            added = _git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        if added.returncode:
            raise RevisionError(f"git cannot check out {commit[:12]}: {_last_line(added.stderr)}")
        yield tree
    finally:
        with _undisturbed():
            removed = _git(root, "worktree", "remove", "--force", str(tree))
            shutil.rmtree(folder, ignore_errors=True)
            if removed.returncode:
                _git(root, "worktree", "prune")


def lend_benchmarks(root: Path, tree: Path) -> bool:
    """Gives a tree from before `benchmarks/key.py` existed the present benchmarks; whether it needed them."""
    if (tree / ENTRY).exists():
        return False
    shutil.rmtree(tree / ENTRY.parent, ignore_errors=True)
    shutil.copytree(root / ENTRY.parent, tree / ENTRY.parent, ignore=shutil.ignore_patterns("__pycache__"))
    return True


def compile_sources(tree: Path) -> None:
    """A new tree has no bytecode yet; without this its first start-up would take longer than the other's."""
    command = [sys.executable, "-m", "compileall", "-q", "polyrhythm", "benchmarks"]
    subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, check=False)


def measure(tree: Path, name: str, quick: bool) -> Measured:
    """Runs one key measurement with the code of a tree. Raises only if that is not the code that was run."""
    command = [sys.executable, "-m", "benchmarks.key", name, *(["--quick"] if quick else [])]
    result = Measured()
    began, busy, mine = time.monotonic(), _busy(), _mine()
    with tempfile.TemporaryDirectory(prefix="polyrhythm-compare-") as folder, Steal() as steal:
        lines, log = Path(folder) / "lines", Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--json", str(lines)], cwd=tree, env=_environment(tree), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                result.error = f"took more than {LIMIT:.0f} s"
            finally:
                _stop(process)
        _read(lines, tree, result)
        if result.error is None and not result.figures:
            reason = _last_line(log.read_text(errors="replace"))
            result.error = reason or f"ended with status {process.returncode} and measured nothing"
    result.seconds, result.steal = time.monotonic() - began, steal.share
    if busy is not None and (now := _busy()) is not None:
        others = (now - busy) - (_mine() - mine)
        result.others = max(0.0, others) / (result.seconds * (os.cpu_count() or 1))
    return result


def _busy() -> float | None:
    """CPU seconds of all processes on this machine so far."""
    counted = ticks()
    return sum(counted[:3] + counted[5:7]) / os.sysconf("SC_CLK_TCK") if counted else None


def _mine() -> float:
    """CPU seconds of the measurements so far, with all processes that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(lines: Path, tree: Path, result: Measured) -> None:
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # it was killed while it wrote this line
            continue
        if "package" in entry:
            package = Path(entry["package"]).resolve()
            if not package.is_relative_to(tree.resolve()):
                raise RevisionError(f"{tree} should be measured, but Python imports {package.parent}")
        elif "error" in entry:
            result.error = entry["error"]
        else:
            result.figures.append(entry)


def _environment(tree: Path) -> dict[str, str]:
    """The tree comes first, also in processes that the measurement starts elsewhere."""
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return {**mine, "PYTHONPATH": os.pathsep.join([str(tree), *others])}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group, if it has not ended."""
    if process.poll() is not None:
        return
    with _undisturbed():
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
                return


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a session of its own, so that Ctrl-C does not reach it; hooks of the repository do not run."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        return subprocess.run(
            command, cwd=root, env=mine, capture_output=True, text=True, start_new_session=True, check=False
        )
    except FileNotFoundError:
        raise RevisionError("git is not installed, and the other revision comes from it") from None


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back until the block is over."""
    came: list[int] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(n))]
    before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
