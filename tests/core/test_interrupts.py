"""Ctrl-C and SIGTERM while numba compiles are delivered at the end of the compilation, and never lost."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba")

from polyrhythm.core.compiling import compiled
from polyrhythm.core.interrupts import SIGNALS, held

ROOT = Path(__file__).parents[2]
# Python code that LLVM calls through ctypes, when it has compiled a module and when it looks for a kept one.
CALLBACKS = ("_raw_object_cache_notify", "_raw_object_cache_getbuffer")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every test leaves the handlers as they were."""
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    yield
    assert [(number, signal.getsignal(number)) for number in SIGNALS] == before


def fresh(folder: Path) -> Any:
    """A function that this process has not compiled yet; numba caches it in the folder."""
    path = folder / "loop.py"
    path.write_text("def double(number):\n    return 2 * number\n")
    return compiled(runpy.run_path(str(path))["double"])


def kept(folder: Path) -> list[Path]:
    return list(folder.rglob("*.nbc"))


@contextmanager
def profiled(look: Callable[[str], None]) -> Iterator[None]:
    """Calls `look` with the name of each Python function that is called meanwhile."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            look(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("loads", [False, True], ids=["compiles", "loads"])
def test_a_signal_inside_a_callback_of_llvm_is_heard(loads: bool, tmp_path: Path) -> None:
    """Where ctypes drops exceptions, also when the loop is loaded from disk. The loop works afterwards."""
    if loads:
        fresh(tmp_path)(1)
    inside: list[str] = []

    def look(name: str) -> None:
        if name in CALLBACKS and name not in inside:
            inside.append(name)
            signal.raise_signal(signal.SIGINT)

    double = fresh(tmp_path)
    with pytest.raises(KeyboardInterrupt), profiled(look):
        double(21)
    assert inside and ("_raw_object_cache_notify" in inside) != loads
    assert kept(tmp_path) and double(21) == 42


def test_a_signal_at_any_moment_is_heard(tmp_path: Path) -> None:
    """At the first of ten equal parts of all calls that compiling makes, at the second, and so on."""
    fresh(tmp_path)(1)  # what numba does only once
    calls = 0

    def count(_: str) -> None:
        nonlocal calls
        calls += 1

    def interrupt(_: str) -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            signal.raise_signal(signal.SIGINT)

    for part in range(10):
        folder = tmp_path / str(part)
        folder.mkdir()
        double = fresh(folder)
        if part == 0:
            with profiled(count):
                double(21)
            whole = calls
            continue
        calls = whole * part // 10
        with pytest.raises(KeyboardInterrupt), profiled(interrupt):
            double(21)
        assert calls <= 0
        assert kept(folder) and double(21) == 42


def test_only_the_outermost_delivers() -> None:
    """Compiling a loop compiles those that it calls: a signal ends all of it, not only one of those."""
    heard: list[str] = []
    with pytest.raises(KeyboardInterrupt), held():
        with held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            heard.append("inner")
        heard.append("outer")
    assert heard == ["inner", "outer"]


def test_an_error_does_not_hide_a_signal() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError


def test_handlers_of_others_are_called() -> None:
    """Also that of SIGTERM, with the number of the signal; a signal that is ignored stays ignored."""
    heard: list[int] = []
    before = [
        (signal.SIGTERM, signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))),
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN)),
    ]
    try:
        with held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and heard == []
        assert heard == [signal.SIGTERM]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def test_two_different_signals_are_both_heard() -> None:
    """Though the handler of the first raises, and the handlers are back afterwards."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        mine = [signal.getsignal(number) for number in SIGNALS]
        with pytest.raises(KeyboardInterrupt), held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert [signal.getsignal(number) for number in SIGNALS] == mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_compile_too(tmp_path: Path) -> None:
    """Handlers run in the main thread only, so in others there is nothing to hold, and no right to do so."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(fresh(tmp_path)(21)))
    thread.start()
    thread.join()
    assert found == [42]


SCRIPT = f"""
import os, signal, sys
import torch
from numba.core import event
import polyrhythm as pr

class Compiles(event.Listener):
    def on_start(self, event):
        sys.setprofile(profile)

    def on_end(self, event):
        pass

def profile(frame, event, _):
    if frame.f_code.co_name == {CALLBACKS[0]!r} and event == "call":
        sys.setprofile(None)
        print("compiling", flush=True)
        os.killpg(0, signal.SIGINT)

def main():
    session = pr.init()
    model = torch.nn.Linear(4, 4)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    print("went on", flush=True)

event.register("numba:compile", Compiles())
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_simulation_that_compiles(tmp_path: Path) -> None:
    """With the usual line and exit code; loops that were compiled stay in the cache."""
    (tmp_path / "script.py").write_text(SCRIPT)
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "polyrhythm", "simulate", "script.py", "--strategy", "allreduce+topk"],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        start_new_session=True, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert "compiling" in done.stdout + done.stderr and "went on" not in done.stdout + done.stderr
    assert "polyrhythm: interrupted\n" in done.stderr and "Traceback" not in done.stderr
    assert kept(cache)
