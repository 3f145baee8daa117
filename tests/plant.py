"""Plants faults in a copy of the code, one at a time, and fails if the tests do not notice one of them.

    .venv/bin/python tests/plant.py [--only PATTERN] [--jobs N]          (`make mutants`)

The faults are listed in `tests/mutants/*.toml`. Each replaces a text that occurs exactly once in its file,
and names the tests that must fail because of it. Each selection of tests first runs without a fault, under
the same conditions, and must pass.

Nothing is changed in the tree itself: each job works in a copy of its own. Importing PyTorch takes longer
than most of these tests, so this process imports it once and forks for every fault. It must therefore never
import polyrhythm or a test module itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Heavy modules that the tests need. `torch._dynamo` is imported by the first optimizer.
PRELOADED = ("torch", "torch._dynamo", "numba", "hypothesis", "pytest", "safetensors.torch")
IGNORED = (".*", "runs", "build", "dist", "*.egg-info")
LIMIT = 60.0  # seconds per test: one that takes longer hangs, and so notices the fault
LONGEST = 240.0  # seconds for all tests of a fault, which says nothing: they are killed


@dataclass(frozen=True)
class Fault:
    """One wrong replacement in one file, and the tests that must fail because of it."""

    name: str  # a sentence that says what is wrong
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # node ids
    rule: str = ""  # the strategy or codec whose update rule is made wrong

    def mutated(self, text: str) -> str:
        """The text of the file with the fault in it; ValueError or SyntaxError if it cannot be planted."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"the old text occurs {count} times in {self.file}, not once")
        if self.new == self.old:
            raise ValueError("the new text is the old one")
        result = text.replace(self.old, self.new)
        compile(result, self.file, "exec")
        return result


def load(folder: Path) -> list[Fault]:
    """The faults of all lists in a folder."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
            found.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    return found


def unplantable(root: Path, faults: Iterable[Fault]) -> list[str]:
    """What is wrong with faults that cannot be planted in this tree."""
    wrong = []
    for fault in faults:
        try:
            fault.mutated((root / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{fault.name}: {error}")
    return wrong


class Verdict(NamedTuple):
    """What the tests said to a fault, and which of them."""

    word: Literal["noticed", "hung", "crashed", "SURVIVED", "TOO LONG", "BROKEN"]
    by: str

    @property
    def good(self) -> bool:
        return self.word in ("noticed", "hung", "crashed")


def judge(code: int, output: str) -> Verdict:
    """Reads the exit code of pytest (below 0: the signal that ended it) and what it printed.

    Only a failed test notices a fault. A selection that matches nothing, takes minutes, or cannot be imported
    says nothing about the tests: the list is wrong.
    """
    found = re.search(r"^(?:FAILED|ERROR) ([^\n]*?)(?: - |$)", output, re.MULTILINE)
    by = found[1] if found else "a test"
    if code == -signal.SIGKILL:
        return Verdict("TOO LONG", f"killed after {LONGEST:g} s")
    if code < 0:
        return Verdict("crashed", f"signal {-code}")
    if code == 1:
        return Verdict("hung" if re.search(r"Timeout \(?>", output) else "noticed", by)
    return Verdict("SURVIVED", "") if code == 0 else Verdict("BROKEN", f"pytest exit code {code}")


@dataclass
class Copy:
    """A copy of the tree in which one fault at a time is planted."""

    root: Path
    _kept: dict[Path, tuple[bytes, os.stat_result]] = field(default_factory=dict)

    def plant(self, fault: Fault) -> None:
        path = self.root / fault.file
        mutated = fault.mutated(path.read_text(encoding="utf-8"))
        self._kept = {each: (each.read_bytes(), each.stat()) for each in [path, *_compiled(path)]}
        path.write_text(mutated, encoding="utf-8")
        # Python compares whole seconds to know whether its bytecode of a file is old.
        stat = self._kept[path][1]
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10 * 10**9))

    def restore(self) -> None:
        """With the old modification times too, by which numba knows that what it has compiled is fresh."""
        for path in [each for kept in self._kept for each in _compiled(kept)]:
            path.unlink(missing_ok=True)
        for path, (content, stat) in self._kept.items():
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        self._kept = {}


def _compiled(path: Path) -> list[Path]:
    """What numba has compiled of a source file."""
    return list((path.parent / "__pycache__").glob(f"{path.stem}.*.nb?")) if path.suffix == ".py" else []


@dataclass
class Running:
    """A forked process that runs tests in a copy."""

    pid: int
    output: Path
    began: float
    deadline: float

    def ended(self) -> int | None:
        """Its exit code once it has ended; it is killed when its time is over."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > self.deadline:
            self.kill()
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start(copy: Copy, tests: Sequence[str], limit: float) -> Running:
    """Forks a process that runs these tests in a copy."""
    output = copy.root.with_suffix(".txt")
    sys.stdout.flush()
    if pid := os.fork():
        with suppress(OSError):
            os.setpgid(pid, pid)
        now = time.monotonic()
        return Running(pid, output, now, now + LONGEST)
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy.root)
        os.environ["PYTHONPATH"] = str(copy.root)
        here = {"", str(ROOT), str(ROOT / "tests")}
        sys.path[:] = [str(copy.root), *(each for each in sys.path if each not in here)]
        # A module that is compiled with a fault in it must not be found by the next run.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        _no_shrinking()
        given = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-o", "addopts="]
        plugins = [f"--timeout={limit:g}", "--hypothesis-seed=0"]
        code = int(pytest.main([*given, *plugins, f"--rootdir={copy.root}", *tests]))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _no_shrinking() -> None:
    """A counterexample will do: nobody reads how short it could be."""
    hypothesis = sys.modules.get("hypothesis")
    if hypothesis is not None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        slow = [hypothesis.HealthCheck.too_slow]
        hypothesis.settings.register_profile(
            "planted", phases=phases, database=None, deadline=None, suppress_health_check=slow
        )
        hypothesis.settings.load_profile("planted")


def _copies(root: Path, count: int, parent: Path) -> list[Copy]:
    made = []
    for number in range(count):
        place = parent / f"copy{number}"
        # `copytree` keeps modification times.
        shutil.copytree(root, place, ignore=shutil.ignore_patterns(*IGNORED), symlinks=True)
        made.append(Copy(place))
    return made


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="polyrhythm-mutants-")).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Field:
    """Copies of a tree, and the processes that run tests in them."""

    def __init__(self, root: Path, jobs: int, parent: Path, limit: float) -> None:
        self.limit = limit
        self.copies = _copies(root, jobs, parent)
        self.running: dict[int, Running] = {}  # by the number of the copy

    def passes(self, selections: Sequence[tuple[str, ...]]) -> bool:
        """Runs each selection of tests without a fault, exactly as with one; what fails is printed."""
        failed = []

        def tell(number: int, verdict: Verdict, output: str) -> None:
            if verdict.word != "SURVIVED":
                failed.append(number)
                print(f"{' '.join(selections[number])}: {verdict.word}\n{output}", flush=True)

        self._run_all([(None, tests) for tests in selections], lambda *given: tell(given[0], *given[2:]))
        return not failed

    def try_all(self, faults: Sequence[Fault], tell: Callable[[Fault, Verdict, float], None]) -> None:
        """Plants each fault, runs its tests and tells the verdict."""
        self._run_all(
            [(fault, fault.tests) for fault in faults],
            lambda number, seconds, verdict, _: tell(faults[number], verdict, seconds),
        )

    def _run_all(
        self,
        work: Sequence[tuple[Fault | None, Sequence[str]]],
        done: Callable[[int, float, Verdict, str], None],
    ) -> None:
        """Runs tests with or without a fault, one selection per copy at a time."""
        waiting, current = list(reversed(range(len(work)))), dict[int, int]()

        def next_one(copy: int) -> None:
            if waiting:
                current[copy] = waiting.pop()
                fault, tests = work[current[copy]]
                if fault is not None:
                    self.copies[copy].plant(fault)
                self.running[copy] = start(self.copies[copy], tests, self.limit)

        for copy in range(len(self.copies)):
            next_one(copy)
        for copy, running, code in self._wait():
            self.copies[copy].restore()
            output = running.output.read_text(errors="replace")
            done(current.pop(copy), time.monotonic() - running.began, judge(code, output), output)
            next_one(copy)

    def _wait(self) -> Iterator[tuple[int, Running, int]]:
        """Yields each process that has ended, until none is left; more may be started meanwhile."""
        while self.running:
            for number, running in list(self.running.items()):
                code = running.ended()
                if code is not None:
                    del self.running[number]
                    yield number, running, code
            time.sleep(0.02)

    def stop(self) -> None:
        for running in self.running.values():
            running.kill()
            with suppress(ChildProcessError):
                os.waitpid(running.pid, 0)


def run(root: Path, faults: Sequence[Fault], jobs: int, trust: bool, limit: float) -> int:
    """Plants all faults; 1 if the tests fail without one or do not notice one."""
    began, verdicts = time.monotonic(), list[tuple[Fault, Verdict]]()
    if wrong := unplantable(root, faults):
        print("\n".join(wrong))
        return 1

    def tell(fault: Fault, verdict: Verdict, seconds: float) -> None:
        verdicts.append((fault, verdict))
        count = f"[{len(verdicts):{len(str(len(faults)))}}/{len(faults)}]"
        by = f" ({verdict.by})" if verdict.by else ""
        print(f"{count} {verdict.word:8} {seconds:5.1f} s  {fault.name}{by}", flush=True)

    with _folder() as parent:
        field_ = Field(root, min(jobs, len(faults)), parent, limit)
        try:
            selections = sorted({fault.tests for fault in faults})
            if not trust:
                print(f"{len(selections)} selections of tests without a fault", flush=True)
                if not field_.passes(selections):
                    print("these tests fail without a fault: they could notice nothing")
                    return 1
                print(f"they pass ({time.monotonic() - began:.0f} s); now {len(faults)} faults", flush=True)
            field_.try_all(faults, tell)
        finally:
            field_.stop()
    bad = [(fault, verdict) for fault, verdict in verdicts if not verdict.good]
    hung = sum(verdict.word == "hung" for _, verdict in verdicts)
    more = f", {hung} of them by a test that hung" if hung else ""
    noticed = len(verdicts) - len(bad)
    print(f"{noticed} of {len(faults)} faults were noticed{more}, in {time.monotonic() - began:.0f} s")
    for fault, verdict in bad:
        why = f" ({verdict.by})" if verdict.by else ""
        print(f"  {verdict.word}{why}: {fault.name} ({fault.file}; {' '.join(fault.tests)})")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults, and fails if the tests do not notice one.")
    parser.add_argument("--only", default="", metavar="PATTERN", help="faults whose name or file matches")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a test hangs")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help=argparse.SUPPRESS)
    given = parser.parse_args()
    wanted = re.compile(given.only, re.IGNORECASE)
    faults = [
        fault
        for fault in load(given.root / "tests" / "mutants")
        if any(wanted.search(text) for text in (fault.name, fault.file, fault.rule))
    ]
    if not faults:
        print(f"no fault matches {given.only!r}")
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"  # a forked child has none of the threads of its parent's pool
    for module in given.preload:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(given.root.resolve(), faults, max(1, given.jobs), given.trust, given.limit)
    except KeyboardInterrupt:
        print("stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
