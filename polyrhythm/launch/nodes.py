"""Nodes: the node processes of one host, whichever launcher they belong to.

A zygote, forked before its launcher starts any thread, imports torch once and forks the nodes. What they
print is shown line by line. After `end` and `close` no process or pipe is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from polyrhythm.core.errors import Interrupted, UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.launch.program import Program
from polyrhythm.launch.screen import Screen
from polyrhythm.launch.zygote import POLITE, NodeConfig, Zygote
from polyrhythm.wire.arena import Arenas

GRACE = 3.0  # seconds between asking a process to end and ending it
ARENA = 1 << 38  # bytes of address space per node; only what is used becomes memory


class Rooms:
    """The arenas of a host, and which of them each life of a node works in.

    A dead worker's memory stays its own until no server reads or writes there: replacements begin in spare
    arenas. Any thread may release, one takes. One more arena, the last, is nobody's: what is common to all.
    """

    def __init__(self, first: int, spare: int) -> None:
        self.arenas = Arenas(first + spare + 1, ARENA)
        self._first, self._spare = list(range(first)), list(range(first, first + spare))
        self._taken: dict[tuple[Peer, int], int] = {}

    def take(self, peer: Peer, incarnation: int) -> int | None:
        """An arena for this life of a node, if one is free."""
        free = self._spare if incarnation else self._first
        if not free:
            return None
        arena = self._taken[peer, incarnation] = free.pop(0)
        return arena

    def release(self, peer: Peer, incarnation: int) -> None:
        """Nobody uses the memory of this life any longer. It may have been on a host that is gone."""
        arena = self._taken.pop((peer, incarnation), None)
        if arena is not None:
            self.arenas.clear(arena)
            self._spare.append(arena)


class Nodes:
    """Forks nodes, forwards what they print, tells of their exits, and ends them.

    `exited(peer, status)` and `broken(why)` are called from `poll` until `end` is.
    """

    def __init__(
        self,
        program: Program,
        config: NodeConfig,
        rooms: Rooms,
        screen: Screen,
        exited: Callable[[Peer, int], None],
        broken: Callable[[str], None],
        private: Sequence[socket.socket] = (),
    ) -> None:
        self.ready = False
        self._rooms, self._screen = rooms, screen
        self._exited, self._broken = exited, broken
        self._wanted: list[tuple[Peer, int]] = []
        self._alive: set[Peer] = set()
        self._outputs: dict[int, _Lines] = {}
        self._ending = False
        self._zygote = Zygote(program, config, private)
        self._selector = selectors.DefaultSelector()
        self.watch(self._zygote, self._hear)

    def watch(self, file: Any, heed: Callable[[], object]) -> None:
        """Has `poll` call `heed` whenever there is something to read."""
        self._selector.register(file, selectors.EVENT_READ, heed)

    def unwatch(self, file: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def poll(self, timeout: float) -> None:
        """Waits until something happens, and sees to it."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            key.data()

    def want(self, peer: Peer, incarnation: int) -> None:
        self._wanted.append((peer, incarnation))

    def start(self, coordinator: str) -> None:
        """Forks the nodes that are wanted; those for which there is no memory yet wait on."""
        waiting = []
        for peer, incarnation in self._wanted if self.ready else ():
            arena = self._rooms.take(peer, incarnation)
            if arena is None:
                waiting.append((peer, incarnation))
            else:
                self._fork(peer, incarnation, arena, coordinator)
        if self.ready:
            self._wanted = waiting

    def end(self, failed: bool) -> None:
        """Lets nodes that are done go, and ends the others; forwards what they still have to say."""
        self._ending = True
        signals = iter([(0.5 if failed else GRACE, signal.SIGTERM), (GRACE, signal.SIGKILL)])
        wait, number = next(signals)
        deadline = time.monotonic() + wait
        while self._alive:
            self.poll(min(0.1, deadline - time.monotonic()))
            if time.monotonic() >= deadline and self._alive:
                self._zygote.kill(number)
                wait, number = next(signals, (GRACE, signal.SIGKILL))
                deadline = time.monotonic() + wait
        until = time.monotonic() + 0.5  # what is still in the pipes
        while self._outputs and time.monotonic() < until:
            self.poll(0.05)

    def close(self) -> None:
        self._zygote.close()
        self._selector.close()
        for file in list(self._outputs):
            os.close(file)
        self._outputs.clear()

    def _fork(self, peer: Peer, incarnation: int, arena: int, coordinator: str) -> None:
        ends = [os.pipe(), os.pipe()]
        self._zygote.fork(peer, incarnation, arena, coordinator, (ends[0][1], ends[1][1]))
        self._alive.add(peer)
        for read, write in ends:
            os.close(write)
            os.set_blocking(read, False)
            lines = self._outputs[read] = _Lines(f"[{peer}] ", self._screen.line)
            self.watch(read, partial(self._read, read, lines))

    def _read(self, file: int, lines: _Lines) -> None:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return
        lines.feed(data)
        if not data:
            self.unwatch(file)
            del self._outputs[file]
            os.close(file)

    def _hear(self) -> None:
        words = self._zygote.hear()
        if not words:
            self.unwatch(self._zygote)
            self._alive.clear()  # they are gone with it
            self._fail("the process that forks the nodes is gone; was it killed?")
        elif words[0] == "ready":
            self.ready = True
        elif words[0] == "failed":
            self._fail(str(words[1]))
        elif words[0] == "exit":
            peer, status = Peer(str(words[1]), int(str(words[2]))), int(str(words[3]))
            self._alive.discard(peer)
            if not self._ending:
                self._exited(peer, status)

    def _fail(self, why: str) -> None:
        if not self._ending:
            self._broken(why)


class _Lines:
    """Cuts a stream of bytes into whole lines with a prefix."""

    def __init__(self, prefix: str, write: Callable[[str], None]) -> None:
        self._prefix, self._write = prefix, write
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            self._write(self._prefix + text.rpartition("\r")[2])  # of a progress bar, its last state


def polite() -> contextlib.AbstractContextManager[None]:
    """Turns Ctrl-C and SIGTERM into `Interrupted`."""

    def interrupt(number: int, _: object) -> None:
        for each in POLITE:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        raise Interrupted("interrupted")

    return signals(interrupt)


@contextlib.contextmanager
def signals(handler: Any) -> Iterator[None]:
    """Handles polite signals this way for a while, in the main thread; elsewhere they are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in POLITE}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def cause(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return "ended before it had finished" if status == 0 else f"ended with exit code {status}"


def threads_each(wanted: int, workers: int) -> int:
    """How many torch threads a worker gets: the cores are shared out, unless something else is wanted.

    A fork has the OpenMP pool of its parent but none of the pool's threads, and would wait for them forever.
    So from a process that has imported torch, such as a notebook, workers get one thread each.
    """
    if "torch" in sys.modules:
        if wanted > 1:
            raise UsageError(
                f"{wanted} threads per worker cannot be had from a process that has imported torch; "
                "use `polyrhythm run` on the command line"
            )
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return wanted or max(1, cores // max(1, workers))
