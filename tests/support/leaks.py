"""Every test must leave the process as it found it. One that leaks a process, thread or socket fails at once.

A leak seldom hurts the test that makes it: it hangs or confuses one far behind it, on another day.
"""

from __future__ import annotations

import gc
import glob
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

GRACE = 20.0  # seconds for what is on its way out to be gone
TOOLS = ("pytest", "hypothesis")  # how the names of the threads begin that the test tools own
DESCRIPTORS = Path("/proc/self/fd")
SHARED_MEMORY = Path("/dev/shm")


def children() -> dict[str, psutil.Process]:
    """The processes below this one, without the helper that multiprocessing starts once and keeps."""
    found = {}
    for pid in descendants():
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
        except psutil.ZombieProcess:
            command = "ended, but nobody waited for it"
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in command:
            found[f"process {pid} ({command[:80]})"] = child
    return found


def descendants() -> list[int]:
    """The process ids below this process, by the kernel's own list: a walk over all processes takes 4 ms."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return [child.pid for child in psutil.Process().children(recursive=True)]
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        for listing in glob.glob(f"/proc/{parents.pop()}/task/*/children"):
            with suppress(OSError):  # this thread has ended since
                below = [int(pid) for pid in Path(listing).read_text().split()]
                found += below
                parents += below
    return found


def threads() -> set[threading.Thread]:
    """Threads that Python started. Those of C++ that only passed through Python nobody can join."""
    return {
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and not thread.name.startswith(TOOLS)
    }


def descriptors() -> Counter[str]:
    """Open sockets and memfds. Counted by what they point to, because a number is soon used again."""
    found: Counter[str] = Counter()
    for descriptor in DESCRIPTORS.iterdir() if DESCRIPTORS.exists() else ():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # the one that this listing itself had open
            continue
        if target.startswith(("socket:", "/memfd:")):
            found[target] += 1
    return found


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def held_by_others(name: str) -> bool:
    """Whether a process that is none of ours has this shared memory mapped: another test run on this host."""
    family = {os.getpid(), *descendants()}
    for pid in set(psutil.pids()) - family:
        try:
            if f"{SHARED_MEMORY}/{name}" in Path(f"/proc/{pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


class Snapshot:
    """What this process holds, to be compared with what it holds later."""

    def __init__(self) -> None:
        self.children = set(children().values())
        self.threads = threads()
        self.descriptors = descriptors()
        self.shared_memory = shared_memory()

    def leaks(self) -> list[str]:
        return [
            *(text for text, child in children().items() if child not in self.children),
            *(f"thread {thread.name!r}" for thread in threads() - self.threads),
            *(f"descriptor of {target}" for target in descriptors() - self.descriptors),
            *(
                f"shared memory {SHARED_MEMORY}/{name}"
                for name in shared_memory() - self.shared_memory
                if not held_by_others(name)
            ),
        ]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves something behind. First fixture in, last out: what others close is closed."""
    before = Snapshot()
    yield
    deadline = time.monotonic() + GRACE
    while leaks := before.leaks():
        if time.monotonic() > deadline:
            # A child left running would be held against every later test that outlives it.
            left = set(children().values()) - before.children
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(left, timeout=GRACE)
            pytest.fail("the test leaked: " + "; ".join(leaks), pytrace=False)
        gc.collect()  # only when in doubt: it costs more than most tests
        time.sleep(0.02)
