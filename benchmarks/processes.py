"""Forked processes for benchmarks. The parent never imports torch, so it has one thread and forks safely."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_fork = multiprocessing.get_context("fork")


class Together:
    """What processes that started together share: their rank, a barrier and a folder."""

    def __init__(self, rank: int, count: int, barrier: Any, folder: Path) -> None:
        self.rank, self.count, self.folder = rank, count, folder
        self.barrier: Callable[[], object] = barrier.wait

    def exchange(self, mine: str) -> list[str]:
        """Everybody's text, by rank."""
        (self.folder / f"text-{self.rank}").write_text(mine)
        self.barrier()
        texts = [(self.folder / f"text-{rank}").read_text() for rank in range(self.count)]
        self.barrier()
        return texts


def together(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(together, *args)` in `count` processes; what each returned, by rank."""
    barrier = _fork.Barrier(count)
    with tempfile.TemporaryDirectory() as folder:
        places = [Together(rank, count, barrier, Path(folder)) for rank in range(count)]
        return _all([(function, (place, *args)) for place in places])


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a process of its own, so that what it imports, uses and leaves goes with it."""
    return _all([(function, args)])[0]


def _all(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    running: dict[Connection, tuple[int, Any]] = {}
    results: dict[int, Any] = {}
    try:
        for number, (function, args) in enumerate(calls):
            here, there = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_call, args=(there, function, args))
            process.start()
            there.close()
            running[here] = (number, process)
        while len(results) < len(calls):
            for ready in wait([end for end, (number, _) in running.items() if number not in results]):
                number, _ = running[ready]
                try:
                    fine, results[number] = ready.recv()
                except EOFError:
                    fine, results[number] = False, "the process was killed"
                if not fine:
                    raise RuntimeError(f"process {number} of the benchmark failed:\n{results[number]}")
    finally:
        for end, (number, process) in running.items():
            if number not in results or len(results) < len(calls):
                process.kill()
            process.join()
            end.close()
    return [results[number] for number in range(len(calls))]


def _call(end: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome = True, function(*args)
    except BaseException:
        outcome = False, traceback.format_exc()
    end.send(outcome)
    end.close()
    os._exit(0)  # libraries that were only borrowed here may hang in their own good-byes
