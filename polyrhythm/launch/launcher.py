"""The launcher: one run, its coordinator, and the nodes of this host.

The launcher holds the coordinator and never imports torch; `NodeProcesses` are the processes here. Workers
on other hosts belong to launchers there (`launch/joiner.py`), which take orders from this one. Everything
ends in `_end`: after success, failure, Ctrl-C or SIGTERM no process, socket or shared memory is left on any
host.
"""

from __future__ import annotations

import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from polyrhythm.coordination.coordinator import Coordinator
from polyrhythm.coordination.ports import Recorder
from polyrhythm.core.errors import UsageError
from polyrhythm.core.notice import Notice
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.launch.arena_pool import LIMITED, ArenaPool
from polyrhythm.launch.console import Console, format_metrics
from polyrhythm.launch.coordinator_service import CoordinatorService
from polyrhythm.launch.early_end import EarlyEnd
from polyrhythm.launch.fork_server import ForkServer
from polyrhythm.launch.hosts import HOST, listing
from polyrhythm.launch.node_config import NodeConfig
from polyrhythm.launch.nodes import GRACE, NodeProcesses, threads_each
from polyrhythm.launch.program import Program
from polyrhythm.launch.remote_hosts import RemoteHosts
from polyrhythm.launch.signals import cause, handled_by
from polyrhythm.wire.options import TransportOptions
from polyrhythm.wire.transport import Transport

SPARE = 16  # arenas for servers that only the script configures
REMOTE_GRACE = 2 * GRACE + 2.0  # seconds for other hosts to end their nodes


class Launcher:
    """Runs a program on processes of this host, and of those that join."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        strategy: ResolvedStrategy | None = None,
        key: bytes | None = None,
        record: Recorder | None = None,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(quiet=True)
        self._plan = plan
        self._restarts, self._rescued = plan.restarts, False
        here = plan.local_workers
        threads = threads_each(plan.threads, here)
        self._pool = ArenaPool(here + max(plan.servers or 0, SPARE), min(here, plan.restarts) + 1)
        self._began = time.monotonic()
        self._deadline = self._began + plan.timeout  # for other hosts to join
        secret = key or secrets.token_bytes(32)
        # With TCP on a single host tensors are sent over TCP too, as between hosts.
        shared = self._pool.shared if plan.listen == "unix:" or here < plan.workers else None
        if self._pool.shared is None:
            self._console.line(LIMITED)
        config = NodeConfig(
            plan, secret, secrets.token_hex(8), self._began, threads, _any_port(plan.listen), shared, strategy
        )
        self._wanted: list[Peer] = [Peer("worker", rank) for rank in range(plan.workers)]
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.RLock()
        self.started = self._ending = False
        self._nodes: NodeProcesses | None = None
        self._transport: Transport | None = None
        self._service: CoordinatorService | None = None
        try:
            self.coordinator = Coordinator(plan, strategy, self, self._clock, record)
            self._early_end = EarlyEnd(self.coordinator, self.say)
            # Before any thread starts: a process with threads should not fork.
            self._nodes = NodeProcesses(
                ForkServer(program, config),
                self._pool,
                self._console,
                self._exited,
                self._broken,
                self._resolved,
            )
            if record is not None:
                self._nodes.keep_output = record.output
            self._nodes.watch(self._wake_read, lambda: os.read(self._wake_read, 4096))
            self._transport = _listen(config, self._console)
            self._hosts = RemoteHosts(program, plan, self._transport, self._console, self, self._wake_loop)
            self._service = CoordinatorService(
                self.coordinator, self._transport, self._lock, self._hosts.receive, self._wake_loop
            )
        except BaseException:
            self._close()
            raise

    def run(self) -> Coordinator:
        """Trains to the end. Returns the coordinator, which has the result or the failure."""
        assert self._service is not None
        self._service.start()
        try:
            with handled_by(self._interrupt):
                self._loop()
        finally:
            with handled_by(signal.SIG_IGN):  # a second Ctrl-C must not stop the cleanup
                try:
                    self._end()
                finally:
                    self._close()
                    self._console.close()
        return self.coordinator

    def _interrupt(self, number: int, _: object) -> None:
        """Handles Ctrl-C and SIGTERM. The main loop acts on them, when nothing is half done."""
        self._early_end.signals += 1
        self._wake_loop()

    # --- called by the coordinator ------------------------------------------------------------------

    def _clock(self) -> float:
        """Seconds since the run began, to the microsecond."""
        return round(time.monotonic() - self._began, 6)

    def say(self, line: str) -> None:
        """Shows a line to the user."""
        self._console.line(line)

    def tell(self, notice: Notice) -> None:
        """Notifies every member except the one that the notice is about."""
        assert self._service is not None
        self._service.tell(notice)

    def end(self, peer: Peer) -> None:
        """Kills a worker, because another one that held the same model has died."""
        assert self._nodes is not None
        self._wanted = [each for each in self._wanted if each != peer]
        home, incarnation = self._hosts.registry.home(peer), self.coordinator.membership.incarnations[peer]
        if home is None:
            self._nodes.kill(peer, incarnation)
        else:
            self._hosts.order(home, "kill", rank=peer.rank, incarnation=incarnation)

    def replace(self, model: Sequence[Peer]) -> bool:
        """Decides whether the dead workers of a model are replaced; their hosts must still take part."""
        if self._restarts == 0 or any(map(self._hosts.registry.host_left, model)):
            return False
        self._restarts -= 1
        return self._want(model)

    def rescue(self, model: Sequence[Peer]) -> bool:
        """Replaces the last workers once, so that the parameters that servers hold can be saved."""
        if self._rescued:
            return False
        self._rescued = True
        return self._want(model)

    def _want(self, model: Sequence[Peer]) -> bool:
        self._wanted += model
        self._wake_loop()
        return True

    def released(self, peer: Peer, incarnation: int) -> None:
        """Frees the memory of a dead worker: no node uses it any longer."""
        home = self._hosts.registry.home(peer)
        if home is not None:
            self._hosts.order(home, "released", rank=peer.rank, incarnation=incarnation)
        else:
            self._pool.release(peer, incarnation)
            self._wake_loop()

    def start_servers(self, count: int) -> None:
        """Starts so many servers."""
        self._wanted += [Peer("server", rank) for rank in range(count)]
        self._wake_loop()

    def _wake_loop(self) -> None:
        """Makes the main loop check again what to do."""
        os.write(self._wake_write, b"!")

    # --- called for other hosts ---------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._ending or self.coordinator.failure is not None

    def terms(self) -> dict[str, Any]:
        return {"plan": self.coordinator.plan.to_json(), "elapsed": self.coordinator.clock()}

    def died(self, peer: Peer, reason: str, incarnation: int | None = None) -> None:
        """Handles the end of a node's process; the coordinator knows whether it was expected."""
        membership = self.coordinator.membership
        deaths, others = membership.deaths, [each.rank for each in membership.model_of(peer)[1:]]
        self.coordinator.died(peer, reason, incarnation)
        if membership.deaths > deaths and self.coordinator.failure is None:
            then = "the others train on"
            if peer in membership.expected:
                left = f"{self._restarts} restart{'s' * (self._restarts != 1)} left"
                then = f"another takes its place ({left})"
            ended = f", which ends its model on {listing(sorted([peer.rank, *others]))}" if others else ""
            self._console.line(f"{peer} {reason}{ended}; {then}")

    # --- processes ----------------------------------------------------------------------------------

    def _loop(self) -> None:
        """Starts wanted nodes, forwards output and shows progress until the run has ended."""
        assert self._nodes is not None and self._transport is not None
        registry = self._hosts.registry
        if registry.free:
            self._hosts.invite()
        while True:
            self._nodes.poll(0.2)
            with self._lock:
                if registry.free and time.monotonic() > self._deadline:
                    self.coordinator.fail(
                        f"waited {self._plan.timeout:.0f} s for another host to bring "
                        f"{listing(registry.free)}; none did"
                    )
                self._early_end.advance()
                if self.coordinator.ending.over or self.coordinator.finished:
                    return
                if self._nodes.ready and not registry.free:
                    self._place(self._nodes)
                text = self._progress()
            self._nodes.start(self._transport.address)
            self._console.progress(text)

    def _place(self, nodes: NodeProcesses) -> None:
        """Starts the wanted nodes on their hosts."""
        self.started = True
        wanted, self._wanted = self._wanted, []
        for peer in wanted:
            incarnation = self.coordinator.membership.incarnations[peer]
            home = self._hosts.registry.home(peer)
            if home is None:
                nodes.want(peer, incarnation)
            else:
                self._hosts.order(home, "fork", rank=peer.rank, incarnation=incarnation)

    def _exited(self, peer: Peer, incarnation: int, status: int) -> None:
        with self._lock:
            self.died(peer, cause(status), incarnation)

    def _broken(self, why: str, exit_code: int) -> None:
        with self._lock:
            self.coordinator.fail(why, exit_code)

    def _resolved(self, strategy: ResolvedStrategy) -> None:
        """Called when the fork server has resolved the strategy, from a module that only it imports."""
        with self._lock:
            if self.coordinator.strategy is None:
                self.coordinator.set_strategy(strategy)

    def _progress(self) -> str:
        coordinator = self.coordinator
        if not coordinator.running:
            starts = self._console.live and not self._hosts.registry.free
            return f"starting {self._plan.workers} workers ..." if starts else ""
        tally = coordinator.tally
        steps, samples = tally.progress()
        seconds = max(coordinator.clock() - tally.began, 1e-9)
        epoch, epochs = tally.epoch
        parts = [tally.trained_by or str(coordinator.strategy), f"{seconds:.0f} s"]
        parts += [f"epoch {epoch} of {epochs}"] if epochs else []
        parts += format_metrics(tally.metrics.reduced())
        parts += [f"{samples / seconds:,.0f} samples/s", f"step {steps:,}"]
        return "  ".join(parts)

    # --- the end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Waits for nodes that are done, and kills the others, on all hosts."""
        assert self._nodes is not None
        with self._lock:
            self._ending = True
            failure, hosts = self.coordinator.ending.outcome, list(self._hosts.registry.joined)
        for who in hosts:
            message, code = (failure.message, failure.exit_code) if failure else ("", 0)
            self._hosts.order(who, "end", message=message, exit_code=code)
        self._nodes.end(failed=self.coordinator.failure is not None)
        until = time.monotonic() + REMOTE_GRACE
        while self._hosts.registry.joined and time.monotonic() < until:
            time.sleep(0.01)

    def _close(self) -> None:
        if self._service is not None:
            self._service.stop()
        if self._nodes is not None:
            self._nodes.close()
        if self._transport is not None:
            self._transport.close()
        if self._service is not None:
            self._service.join()  # before the pipe that it writes to is closed
        self._pool.arenas.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _listen(config: NodeConfig, console: Console) -> Transport:
    """Opens the transport of the coordinator. It reads the result in the memory of a worker on this host."""
    plan = config.plan
    options = TransportOptions(
        listen=plan.listen, arenas=config.arenas, host=config.host, wait=plan.timeout, watched_role=HOST,
        on_error=console.line,
    )  # fmt: skip
    try:
        return Transport(COORDINATOR, config.key, options)
    except OSError as error:
        where, why = plan.listen.partition(":")[2], str(error.strerror).partition(" (")[0]
        remedy = "use another port, or 0 for any"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "use an address of this machine"
        raise UsageError(f"cannot listen at {where}: {why}; {remedy}") from None


def _any_port(listen: str) -> str:
    """The address for nodes to listen at: the interface of the coordinator, any port."""
    return f"{listen.rsplit(':', 1)[0]}:0" if listen.startswith("tcp:") else "unix:"
