"""The launcher: one run on the processes of this host.

The launcher holds the coordinator and never imports torch. A zygote, forked before anything else, imports
torch once and forks the nodes. Everything ends in `_end`: after success, failure, Ctrl-C or SIGTERM no
process, socket or shared memory is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from polyrhythm.errors import Interrupted, PolyrhythmError, UsageError, WaitError
from polyrhythm.launch.program import Program
from polyrhythm.launch.screen import Screen, shown
from polyrhythm.launch.zygote import Passport, Zygote
from polyrhythm.node import LIFE, Peer
from polyrhythm.record import RunFolder
from polyrhythm.strategy import Strategy
from polyrhythm.wire.arena import Arenas
from polyrhythm.wire.transport import Incoming, Transport
from polyrhythm.worlds.coordinator import COORDINATOR, Coordinator

GRACE = 3.0  # seconds between asking a process to end and ending it
ARENA = 1 << 38  # bytes of address space per node; only what is used becomes memory
SPARE = 16  # arenas for servers that only the script asks for
_POLITE = (signal.SIGINT, signal.SIGTERM)


class Launcher:
    """Runs a program on local processes."""

    def __init__(
        self,
        program: Program,
        *,
        workers: int,
        servers: int = 0,
        strategy: Strategy | None = None,
        seed: int = 0,
        threads: int = 0,
        wait: float = 1800.0,
        listen: str = "unix:",
        restarts: int = 0,
        collective: str = "auto",
        folder: RunFolder | None = None,
        screen: Screen | None = None,
        batch_norm: str | None = None,
    ) -> None:
        self._screen = screen or Screen(quiet=True)
        self._workers = workers
        self._restarts, self._rescued = restarts, False
        fixed = workers + max(servers, SPARE)
        self._arenas = Arenas(fixed + min(workers, restarts) + 1, ARENA)
        # A dead worker's memory stays its own until no server reads or writes there; others begin in these.
        self._spare = list(range(fixed, self._arenas.count))
        self._arena: dict[tuple[Peer, int], int] = {}  # of each life of a worker
        threads = threads_each(threads, workers)
        self._began = time.monotonic()
        key = secrets.token_bytes(32)
        host = secrets.token_hex(8)
        # Who wants TCP wants all of it: then tensors travel too, as they would between hosts.
        shared = self._arenas if listen == "unix:" else None
        passport = Passport(key, host, self._began, threads, wait, _any_port(listen), shared, collective)
        self._wanted: list[Peer] = [Peer("worker", rank) for rank in range(workers)]
        self._wake, self._woken = os.pipe()
        self._lock = threading.RLock()
        self._server = threading.Thread(target=self._serve, name="polyrhythm coordinator")
        self._alive: set[Peer] = set()
        self._outputs: dict[int, _Lines] = {}
        self._sent_away = False
        self._zygote: Zygote | None = None
        self._transport: Transport | None = None
        try:
            self.coordinator = Coordinator(
                workers=workers, servers=servers, strategy=strategy, seed=seed, folder=folder,
                clock=lambda: time.monotonic() - self._began,
                start_servers=self._start_servers, tell=self._tell, replace=self._replace,
                rescue=self._rescue, restarts=restarts,
                released=self._released, batch_norm=batch_norm,
            )  # fmt: skip
            # Before any thread: a process with threads should not fork.
            self._zygote = Zygote(program, passport)
            try:
                self._transport = Transport(
                    COORDINATOR, key, listen=listen, host=host, wait=wait, on_error=self._screen.line
                )
            except OSError as error:
                where, why = listen.partition(":")[2], str(error.strerror).partition(" (")[0]
                raise UsageError(f"cannot listen at {where}: {why}; use another port, or 0 for any") from None
        except BaseException:
            self._close()
            raise

    def run(self) -> Coordinator:
        """Trains to the end; returns the coordinator with all that is known, also of a failure."""
        self._server.start()
        try:
            self._loop()
        except Interrupted as end:
            with self._lock:
                self.coordinator.fail(str(end), end.exit_code)
        finally:
            with _signals(signal.SIG_IGN):  # a second Ctrl-C must not stop the cleaning up
                try:
                    self._end()
                finally:
                    self._close()
                    self._screen.close()
        return self.coordinator

    # --- the coordinator's side ---------------------------------------------------------------------

    def _serve(self) -> None:
        """Feeds the coordinator with what nodes say."""
        transport = self._transport
        assert transport is not None
        while not self._sent_away:
            try:
                incoming = transport.receive(timeout=0.2)
                if incoming is None:
                    continue
                with self._lock:
                    self._take(incoming)
                    ended = self.coordinator.failure is not None or self.coordinator.finished
            except PolyrhythmError:
                continue
            except Exception as error:  # a full disk, say: without this thread everybody would wait
                with self._lock, contextlib.suppress(OSError):
                    self.coordinator.fail(f"the coordinator failed: {type(error).__name__}: {error}")
                ended = True
            if ended:
                self._nudge()

    def _take(self, incoming: Incoming) -> None:
        transport = self._transport
        assert transport is not None
        life = incoming.sequence >> LIFE
        if incoming.kind == "result":
            transport.answer(incoming)
            if life != self.coordinator.lives[incoming.sender]:
                return  # whoever takes its place will bring it again
            blob = bytes(incoming.buffers[0].view)
            self.coordinator.result(incoming.sender, incoming.fields["digest"], blob)
            return

        def respond(fields: dict[str, Any]) -> None:
            if incoming.asked:
                try:
                    transport.answer(incoming, fields=fields)
                except WaitError:
                    pass  # it is gone, and its end will be reported
                except PolyrhythmError as error:
                    self.coordinator.fail(str(error), error.exit_code)

        if incoming.kind == "join" and life == self.coordinator.lives[incoming.sender]:
            transport.introduce(incoming.sender, incoming.fields["place"][0])
        self.coordinator.handle(incoming.sender, incoming.kind, incoming.fields, respond, life)

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Tells every member, but not whom it is about, what happened."""
        transport = self._transport
        assert transport is not None
        peer = Peer(fields["role"], fields["rank"]) if fields else None
        for other in list(self.coordinator.members):
            if other != peer:
                with contextlib.suppress(PolyrhythmError):
                    # No second try: one that cannot be reached is dead too, and word of it is on its way.
                    transport.send(other, kind, fields=fields, retry=False)
        if peer is not None and kind == "left":
            transport.lost(peer, fields["reason"])

    def _replace(self, peer: Peer) -> bool:
        """A worker has died. Whether there will be another in its place."""
        if self._restarts == 0:
            return False
        self._restarts -= 1
        return self._want(peer)

    def _rescue(self, peer: Peer) -> bool:
        """The last worker has died, and servers hold what all have trained: once, another brings it home."""
        if self._rescued:
            return False
        self._rescued = True
        return self._want(peer)

    def _want(self, peer: Peer) -> bool:
        self._wanted.append(peer)
        self._nudge()
        return True

    def _released(self, peer: Peer, life: int) -> None:
        """Nobody uses the memory of a dead worker any longer."""
        arena = self._arena.pop((peer, life))
        self._arenas.clear(arena)
        self._spare.append(arena)
        self._nudge()

    def _start_servers(self, count: int) -> None:
        self._wanted += [Peer("server", rank) for rank in range(count)]
        self._nudge()

    def _nudge(self) -> None:
        os.write(self._woken, b"!")

    # --- the processes' side ------------------------------------------------------------------------

    def _loop(self) -> None:
        """Forks what is wanted, forwards output, shows progress, until the run has ended either way."""
        assert self._zygote is not None
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._zygote, selectors.EVENT_READ, self._hear)
            selector.register(self._wake, selectors.EVENT_READ, lambda: os.read(self._wake, 4096))
            self._ready = False
            while True:
                for key, _ in selector.select(0.2):
                    key.data()
                with self._lock:
                    if self.coordinator.failure is not None or self.coordinator.finished:
                        return
                    wanted = self._assign() if self._ready else []
                    text = self._progress()
                for peer, life, arena in wanted:
                    self._fork(peer, life, arena)
                self._screen.progress(text)

    def _assign(self) -> list[tuple[Peer, int, int]]:
        """The nodes to start now, each with its life and arena; those for which none is free wait on."""
        ready, waiting = [], []
        for peer in self._wanted:
            life = self.coordinator.lives[peer]
            if not life:
                arena = peer.rank + (self._workers if peer.role == "server" else 0)
            elif self._spare:
                arena = self._spare.pop(0)
            else:
                waiting.append(peer)
                continue
            self._arena[peer, life] = arena
            ready.append((peer, life, arena))
        self._wanted = waiting
        return ready

    def _hear(self) -> None:
        assert self._zygote is not None
        words = self._zygote.hear()
        if not words:
            self._selector.unregister(self._zygote)
            with self._lock:
                self.coordinator.fail("the process that forks the nodes is gone; was it killed?")
        elif words[0] == "ready":
            self._ready = True
        elif words[0] == "failed":
            with self._lock:
                self.coordinator.fail(str(words[1]))
        elif words[0] == "exit":
            peer, status = Peer(str(words[1]), int(str(words[2]))), int(str(words[3]))
            self._alive.discard(peer)
            with self._lock:
                deaths = self.coordinator.deaths
                self.coordinator.died(peer, _cause(status))
                if self.coordinator.deaths > deaths and self.coordinator.failure is None:
                    then = "the others train on"
                    if peer in self.coordinator.expected:
                        left = f"{self._restarts} restart{'s' * (self._restarts != 1)} left"
                        then = f"another takes its place ({left})"
                    self._screen.line(f"{peer} {_cause(status)}; {then}")

    def _fork(self, peer: Peer, life: int, arena: int) -> None:
        assert self._zygote is not None and self._transport is not None
        ends = [os.pipe(), os.pipe()]
        self._zygote.fork(peer, life, arena, self._transport.address, (ends[0][1], ends[1][1]))
        self._alive.add(peer)
        for read, write in ends:
            os.close(write)
            os.set_blocking(read, False)
            lines = self._outputs[read] = _Lines(f"[{peer}] ", self._screen.line)
            self._selector.register(
                read, selectors.EVENT_READ, lambda read=read, lines=lines: self._read(read, lines)
            )

    def _read(self, file: int, lines: _Lines) -> None:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return
        lines.feed(data)
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
            os.close(file)
            del self._outputs[file]

    def _progress(self) -> str:
        coordinator = self.coordinator
        if not coordinator.running:
            return f"starting {self._workers} workers ..." if self._screen.live else ""
        steps, samples = coordinator.progress()
        seconds = max(coordinator.clock() - coordinator.began, 1e-9)
        epoch, epochs = coordinator.epoch
        parts = [str(coordinator.strategy), f"{seconds:.0f} s"]
        parts += [f"epoch {epoch} of {epochs}"] if epochs else []
        parts += shown(coordinator.metrics)
        parts += [f"{samples / seconds:,.0f} samples/s", f"step {steps:,}"]
        return "  ".join(parts)

    # --- the end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Lets nodes that are done go, and ends the others; forwards what they still have to say."""
        assert self._zygote is not None
        failed = self.coordinator.failure is not None
        signals = iter([(0.5 if failed else GRACE, signal.SIGTERM), (GRACE, signal.SIGKILL)])
        wait, number = next(signals)
        deadline = time.monotonic() + wait
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._zygote, selectors.EVENT_READ, self._hear_end)
            for file, lines in self._outputs.items():
                selector.register(
                    file, selectors.EVENT_READ, lambda file=file, lines=lines: self._read(file, lines)
                )
            while self._alive:
                for key, _ in selector.select(max(0.0, min(0.1, deadline - time.monotonic()))):
                    key.data()
                if time.monotonic() >= deadline and self._alive:
                    self._zygote.kill(number)
                    wait, number = next(signals, (GRACE, signal.SIGKILL))
                    deadline = time.monotonic() + wait
            until = time.monotonic() + 0.5  # what is still in the pipes
            while self._outputs and time.monotonic() < until:
                for key, _ in selector.select(0.05):
                    if key.fileobj is not self._zygote:
                        key.data()

    def _hear_end(self) -> None:
        assert self._zygote is not None
        words = self._zygote.hear()
        if not words:
            self._alive.clear()  # they are gone with it
        elif words[0] == "exit":
            self._alive.discard(Peer(str(words[1]), int(str(words[2]))))

    def _close(self) -> None:
        self._sent_away = True
        if self._zygote is not None:
            self._zygote.close()
        if self._transport is not None:
            self._transport.close()
        if self._server.is_alive():
            self._server.join()  # before the pipe that it writes to is closed
        for file in list(self._outputs):
            os.close(file)
        self._outputs.clear()
        self._arenas.close()
        os.close(self._wake)
        os.close(self._woken)


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
        for each in _POLITE:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        raise Interrupted("interrupted")

    return _signals(interrupt)


@contextlib.contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Handles polite signals this way for a while, in the main thread; elsewhere they are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _POLITE}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _cause(status: int) -> str:
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
    return wanted or max(1, cores // workers)


def _any_port(listen: str) -> str:
    """Where nodes listen: on the coordinator's interface, each at a port of its own."""
    return f"{listen.rsplit(':', 1)[0]}:0" if listen.startswith("tcp:") else "unix:"
