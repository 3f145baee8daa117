"""NodeProcesses: the node processes of one host.

A fork server, forked before its launcher starts any thread, imports torch once and forks the nodes. Their
output is shown line by line. After `end` and `close` no process or pipe is left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.launch.arena_pool import ArenaPool
from polyrhythm.launch.console import Console
from polyrhythm.launch.fork_server import ForkServer
from polyrhythm.launch.node_config import NodeStart

GRACE = 3.0  # seconds between SIGTERM and SIGKILL


class NodeProcesses:
    """Forks nodes, forwards their output, reports their exits, and ends them.

    `exited(peer, incarnation, status)`, `broken(why, exit_code)` and `resolved(strategy)` are called from
    `poll`, until `end` is called.
    """

    def __init__(
        self,
        server: ForkServer,
        pool: ArenaPool,
        console: Console,
        exited: Callable[[Peer, int, int], None],
        broken: Callable[[str, int], None],
        resolved: Callable[[ResolvedStrategy], None] = lambda strategy: None,
    ) -> None:
        self.ready = False
        self._server, self._pool, self._console = server, pool, console
        self._exited, self._broken, self._resolved = exited, broken, resolved
        self._wanted: list[tuple[Peer, int]] = []
        self.keep_output: Callable[[str, str], None] = lambda node, line: None  # of the script, in a log
        self._alive: dict[Peer, int] = {}  # the incarnation of each node that has a process
        self._killed: set[tuple[Peer, int]] = set()  # incarnations that `kill` has ended
        self._outputs: dict[int, _LineSplitter] = {}
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self.watch(self._server, self._receive)

    def watch(self, file: Any, readable: Callable[[], object]) -> None:
        """Makes `poll` call `readable` whenever there is something to read."""
        self._selector.register(file, selectors.EVENT_READ, readable)

    def unwatch(self, file: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def poll(self, timeout: float) -> None:
        """Waits for events and handles them."""
        for key, _ in self._selector.select(max(0.0, timeout)):
            key.data()

    def want(self, peer: Peer, incarnation: int) -> None:
        self._wanted.append((peer, incarnation))

    def kill(self, peer: Peer, incarnation: int) -> None:
        """Kills a node, now or when it is forked. May be called in any thread."""
        self._killed.add((peer, incarnation))
        self._server.kill(signal.SIGKILL, peer)

    def start(self, coordinator: str) -> None:
        """Forks the nodes that are wanted; those without a free arena stay wanted."""
        if not self.ready or not self._killed.isdisjoint(self._alive.items()):  # that may write to its arena
            return
        waiting = []
        for peer, incarnation in self._wanted:
            if (peer, incarnation) in self._killed:
                continue
            arena = self._pool.take(peer, incarnation)
            if arena is None:
                waiting.append((peer, incarnation))
                continue
            self._fork(NodeStart(peer, incarnation, arena, coordinator))
            if (peer, incarnation) in self._killed:  # by another thread, before it was forked
                self._server.kill(signal.SIGKILL, peer)
        self._wanted = waiting

    def end(self, failed: bool) -> None:
        """Waits for nodes that are done, kills the others, and forwards the rest of their output."""
        self._ending = True
        signals = iter([(0.5 if failed else GRACE, signal.SIGTERM), (GRACE, signal.SIGKILL)])
        wait, number = next(signals)
        deadline = time.monotonic() + wait
        while self._alive:
            self.poll(min(0.1, deadline - time.monotonic()))
            if time.monotonic() >= deadline and self._alive:
                self._server.kill(number)
                wait, number = next(signals, (GRACE, signal.SIGKILL))
                deadline = time.monotonic() + wait
        until = time.monotonic() + 0.5  # for output that is still in the pipes
        while self._outputs and time.monotonic() < until:
            self.poll(0.05)

    def close(self) -> None:
        self._server.close()
        self._selector.close()
        for file in list(self._outputs):
            os.close(file)
        self._outputs.clear()

    def _fork(self, start: NodeStart) -> None:
        ends = [os.pipe(), os.pipe()]
        self._server.fork(start, (ends[0][1], ends[1][1]))
        self._alive[start.peer] = start.incarnation
        for (read, write), show in zip(ends, (self._console.print, self._console.line), strict=True):
            os.close(write)
            os.set_blocking(read, False)
            lines = self._outputs[read] = _LineSplitter(partial(self._show, start.peer, show))
            self.watch(read, partial(self._read, read, lines))

    def _show(self, peer: Peer, show: Callable[[str], None], line: str) -> None:
        show(f"[{peer}] {line}")
        self.keep_output(str(peer), line)

    def _read(self, file: int, lines: _LineSplitter) -> None:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return
        lines.feed(data)
        if not data:
            self.unwatch(file)
            del self._outputs[file]
            os.close(file)

    def _receive(self) -> None:
        """Handles a message of the fork server."""
        words: list[Any] = self._server.receive()
        if not words:
            self.unwatch(self._server)
            self._alive.clear()  # they died with it
            self._fail("the process that forks the nodes is gone; was it killed?", 1)
        elif words[0] == "ready":
            self.ready = True
            if words[1] is not None and not self._ending:
                self._resolved(ResolvedStrategy.from_json(words[1]))
        elif words[0] == "failed":
            self._fail(words[1], words[2])
        elif words[0] == "exit":
            _, role, rank, status = words
            peer = Peer(role, rank)
            incarnation = self._alive.pop(peer)
            if not self._ending and (peer, incarnation) not in self._killed:
                self._exited(peer, incarnation, status)

    def _fail(self, why: str, exit_code: int) -> None:
        if not self._ending:
            self._broken(why, exit_code)


class _LineSplitter:
    """Splits a stream of bytes into whole lines."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            self._write(text.rpartition("\r")[2])  # the last state of a progress bar


def threads_each(wanted: int, workers: int) -> int:
    """The number of torch threads per worker: as wanted, by OMP_NUM_THREADS, or an equal share of the cores.

    A fork has the OpenMP pool of its parent but none of its threads, and would wait for them forever. So
    workers that are forked from a process that has imported torch, such as a notebook, get one thread each.
    """
    if "torch" in sys.modules:
        if wanted > 1:
            raise UsageError(
                f"{wanted} threads per worker are not possible in a process that has imported torch; "
                "use `polyrhythm run` on the command line"
            )
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return wanted or (int(chosen) if chosen.isdecimal() else 0) or max(1, cores // max(1, workers))
