"""The launcher: one run, its coordinator, and the nodes of this host.

The launcher holds the coordinator and never imports torch; `Nodes` are the processes here. Workers on other
hosts belong to launchers there (`launch/joiner.py`), which do as this one says. Everything ends in `_end`:
after success, failure, Ctrl-C or SIGTERM no process, socket or shared memory is left, on no host.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.coordination.coordinator import COORDINATOR, Coordinator
from polyrhythm.core.errors import Interrupted, PolyrhythmError, UsageError, WaitError
from polyrhythm.core.peer import INCARNATION_SHIFT, Peer
from polyrhythm.core.strategy import Strategy
from polyrhythm.launch.hosts import HOST, Hosts, invitation, listing
from polyrhythm.launch.nodes import GRACE, Nodes, Rooms, cause, signals, threads_each
from polyrhythm.launch.program import Program
from polyrhythm.launch.screen import Screen, shown
from polyrhythm.launch.zygote import NodeConfig
from polyrhythm.record.folder import RunFolder
from polyrhythm.wire.inbox import Incoming
from polyrhythm.wire.transport import ENDED, Transport

SPARE = 16  # arenas for servers that only the script asks for
FAREWELL = 2 * GRACE + 2.0  # seconds for other hosts to end their nodes


class Launcher:
    """Runs a program on processes of this host, and of those that join."""

    def __init__(
        self,
        program: Program,
        *,
        workers: int,
        here: int | None = None,
        servers: int = 0,
        strategy: Strategy | None = None,
        seed: int = 0,
        threads: int = 0,
        wait: float = 1800.0,
        listen: str = "unix:",
        key: tuple[Path, bytes] | None = None,
        restarts: int = 0,
        collective: str = "auto",
        folder: RunFolder | None = None,
        screen: Screen | None = None,
        batch_norm: str | None = None,
        sites: Mapping[str, Sequence[int]] | None = None,
        servers_at: str | None = "",
    ) -> None:
        self._screen = screen or Screen(quiet=True)
        self._program = program
        self._workers = workers
        here = workers if here is None else here
        self._restarts, self._rescued = restarts, False
        threads = threads_each(threads, here)
        self._rooms = Rooms(here + max(servers, SPARE), min(here, restarts) + 1)
        self._hosts = Hosts(here, workers, sites)
        self._began = time.monotonic()
        self._deadline = self._began + wait  # for other hosts to join
        self._key_file = key[0] if key else None
        secret = key[1] if key else secrets.token_bytes(32)
        # Who wants TCP on one host wants all of it: then tensors travel too, as they would between hosts.
        shared = self._rooms.arenas if listen == "unix:" or here < workers else None
        asked = "" if strategy is None else str(strategy)
        config = NodeConfig(
            secret, secrets.token_hex(8), self._began, threads, wait, _any_port(listen), shared, collective,
            asked,
        )  # fmt: skip
        self._terms = {"wait": wait, "collective": collective, "restarts": restarts, "strategy": asked}
        self._wanted: list[Peer] = [Peer("worker", rank) for rank in range(workers)]
        self._wake, self._woken = os.pipe()
        self._lock = threading.RLock()
        self._server = threading.Thread(target=self._serve, name="polyrhythm coordinator")
        self._started = self._ending = self._sent_away = False
        self._nodes: Nodes | None = None
        self._transport: Transport | None = None
        try:
            self.coordinator = Coordinator(
                workers=workers, servers=servers, strategy=strategy, seed=seed, folder=folder,
                clock=lambda: time.monotonic() - self._began,
                start_servers=self._start_servers, tell=self._tell, replace=self._replace,
                rescue=self._rescue, restarts=restarts,
                released=self._released, batch_norm=batch_norm, collective=collective,
                say=self._screen.line, sites=sites, servers_at=servers_at,
            )  # fmt: skip
            # Before any thread: a process with threads should not fork.
            self._nodes = Nodes(program, config, self._rooms, self._screen, self._exited, self._broken)
            self._nodes.watch(self._wake, lambda: os.read(self._wake, 4096))
            try:
                self._transport = Transport(
                    COORDINATOR, secret, listen=listen, wait=wait, on_error=self._screen.line
                )
                self._transport.mourned = HOST
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
            with signals(signal.SIG_IGN):  # a second Ctrl-C must not stop the cleaning up
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
        if incoming.sender.role == HOST:
            return self._hear_host(incoming)
        incarnation = incoming.sequence >> INCARNATION_SHIFT
        if incoming.kind == "result":
            transport.reply(incoming)
            if incarnation != self.coordinator.incarnations[incoming.sender]:
                return  # whoever takes its place will bring it again
            blob = bytes(incoming.buffers[0].view)
            self.coordinator.result(incoming.sender, incoming.fields["digest"], blob)
            return

        def respond(fields: dict[str, Any]) -> None:
            if incoming.asked:
                try:
                    transport.reply(incoming, fields=fields)
                except WaitError:
                    pass  # it is gone, and its end will be reported
                except PolyrhythmError as error:
                    self.coordinator.fail(str(error), error.exit_code)

        if incoming.kind == "join" and incarnation == self.coordinator.incarnations[incoming.sender]:
            transport.introduce(incoming.sender, incoming.fields["place"][0])
        self.coordinator.handle(incoming.sender, incoming.kind, incoming.fields, respond, incarnation)

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
        """A worker has died. Whether there will be another in its place, for which its host must be there."""
        if self._restarts == 0 or self._hosts.homeless(peer):
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

    def _released(self, peer: Peer, incarnation: int) -> None:
        """Nobody uses the memory of a dead worker any longer."""
        home = self._hosts.home(peer)
        if home is not None:
            self._order(home, "released", rank=peer.rank, incarnation=incarnation)
        else:
            self._rooms.release(peer, incarnation)
            self._nudge()

    def _start_servers(self, count: int) -> None:
        self._wanted += [Peer("server", rank) for rank in range(count)]
        self._nudge()

    def _nudge(self) -> None:
        os.write(self._woken, b"!")

    # --- other hosts --------------------------------------------------------------------------------

    def _hear_host(self, incoming: Incoming) -> None:
        """Takes in what a launcher on another host says."""
        who, fields = incoming.sender, incoming.fields
        if incoming.kind == "enlist":
            return self._enlist(incoming)
        guest = self._hosts.guests.get(who)
        if guest is None:
            return  # its last words; that it is gone is known
        if incoming.kind == "exit":
            self._died(Peer("worker", fields["rank"]), f"{cause(fields['status'])} on {guest.address}")
        elif incoming.kind == "leave":
            self._lose(who, f"{fields['reason']} on {guest.address}")
        elif incoming.kind == ENDED:
            self._lose(who, f"is gone with the launcher on {guest.address}")

    def _enlist(self, incoming: Incoming) -> None:
        assert self._transport is not None
        who, fields = incoming.sender, incoming.fields
        try:
            if self._ending or self.coordinator.failure is not None:
                raise UsageError("the run is over")
            guest = self._hosts.enlist(
                who, *(fields.get(key) for key in ("version", "workers", "address", "site"))
            )
        except UsageError as error:
            answer: dict[str, Any] = {"error": str(error)}
            self._screen.line(f"{fields.get('address')} cannot join: {error}")
        else:
            answer = {"ranks": guest.ranks, "elapsed": self.coordinator.clock(), **self._terms}
            self._screen.line(f"{guest.address} joined with {listing(guest.ranks)}")
            self._nudge()
        with contextlib.suppress(PolyrhythmError):  # if it is gone, that will be received
            self._transport.reply(incoming, fields=answer)
        if self._hosts.free and "error" not in answer:
            self._invite()

    def _invite(self) -> None:
        assert self._transport is not None
        missing = self._hosts.missing
        self._screen.line(
            invitation(self._transport.address, self._program, missing, self._workers, self._key_file)
        )

    def _lose(self, who: Peer, reason: str) -> None:
        """A host has left, and all its workers with it."""
        guest = self._hosts.leave(who)
        if guest is None or self._ending:
            return
        if not self._started:
            self._hosts.vacate(guest)
            self._screen.line(f"{guest.address} has left before the run began")
            return self._invite()
        together = f" ({listing(guest.ranks)})" if len(guest.ranks) > 1 else ""
        for rank in guest.ranks:
            self._died(Peer("worker", rank), reason + together)
        self._nudge()

    def _order(self, host: Peer, kind: str, **fields: Any) -> None:
        assert self._transport is not None
        with contextlib.suppress(PolyrhythmError):  # if it is gone, that will be received
            self._transport.send(host, kind, fields=fields, retry=False)

    # --- the processes' side ------------------------------------------------------------------------

    def _loop(self) -> None:
        """Starts what is wanted, forwards output, shows progress, until the run has ended either way."""
        assert self._nodes is not None and self._transport is not None
        if self._hosts.free:
            self._invite()
        while True:
            self._nodes.poll(0.2)
            with self._lock:
                if self._hosts.free and time.monotonic() > self._deadline:
                    self.coordinator.fail(
                        f"waited {self._transport.wait:.0f} s for another host to bring "
                        f"{listing(self._hosts.free)}; none did"
                    )
                if self.coordinator.failure is not None or self.coordinator.finished:
                    return
                if self._nodes.ready and not self._hosts.free:
                    self._place()
                text = self._progress()
            self._nodes.start(self._transport.address)
            self._screen.progress(text)

    def _place(self) -> None:
        """Has the nodes that are wanted started where they belong."""
        assert self._nodes is not None
        self._started = True
        wanted, self._wanted = self._wanted, []
        for peer in wanted:
            incarnation, home = self.coordinator.incarnations[peer], self._hosts.home(peer)
            if home is None:
                self._nodes.want(peer, incarnation)
            else:
                self._order(home, "fork", rank=peer.rank, incarnation=incarnation)

    def _exited(self, peer: Peer, status: int) -> None:
        with self._lock:
            self._died(peer, cause(status))

    def _died(self, peer: Peer, reason: str) -> None:
        """A node has ended, as it should or not; the coordinator knows which."""
        deaths = self.coordinator.deaths
        self.coordinator.died(peer, reason)
        if self.coordinator.deaths > deaths and self.coordinator.failure is None:
            then = "the others train on"
            if peer in self.coordinator.expected:
                left = f"{self._restarts} restart{'s' * (self._restarts != 1)} left"
                then = f"another takes its place ({left})"
            self._screen.line(f"{peer} {reason}; {then}")

    def _broken(self, why: str) -> None:
        with self._lock:
            self.coordinator.fail(why)

    def _progress(self) -> str:
        coordinator = self.coordinator
        if not coordinator.running:
            starts = self._screen.live and not self._hosts.free
            return f"starting {self._workers} workers ..." if starts else ""
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
        """Lets nodes that are done go, and ends the others, on all hosts."""
        assert self._nodes is not None
        with self._lock:
            self._ending = True
            failure, guests = self.coordinator.failure, list(self._hosts.guests)
        for who in guests:
            message, code = (failure.message, failure.exit_code) if failure else ("", 0)
            self._order(who, "end", message=message, exit_code=code)
        self._nodes.end(failed=failure is not None)
        until = time.monotonic() + FAREWELL
        while self._hosts.guests and time.monotonic() < until:
            time.sleep(0.01)

    def _close(self) -> None:
        self._sent_away = True
        if self._nodes is not None:
            self._nodes.close()
        if self._transport is not None:
            self._transport.close()
        if self._server.is_alive():
            self._server.join()  # before the pipe that it writes to is closed
        self._rooms.arenas.close()
        os.close(self._wake)
        os.close(self._woken)


def _any_port(listen: str) -> str:
    """Where nodes listen: on the coordinator's interface, each at a port of its own."""
    return f"{listen.rsplit(':', 1)[0]}:0" if listen.startswith("tcp:") else "unix:"
