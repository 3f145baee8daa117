"""Joiner: the launcher that adds workers of this host to a run that another host started.

It has one connection, to the coordinator, and one thread. It forks workers on order, reports when one has
ended, and ends them all when the run or the connection is over. `launch/hosts.py` describes the messages.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import signal
import socket
import time
from typing import Any

from polyrhythm import __version__
from polyrhythm.coordination.ending import Failure
from polyrhythm.core.errors import Interrupted, PolyrhythmError, UsageError, WireError
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.plan import Plan
from polyrhythm.launch.arena_pool import LIMITED, ArenaPool
from polyrhythm.launch.console import Console
from polyrhythm.launch.fork_server import ForkServer
from polyrhythm.launch.hosts import HOST, listing
from polyrhythm.launch.node_config import NodeConfig
from polyrhythm.launch.nodes import NodeProcesses, threads_each
from polyrhythm.launch.program import Program
from polyrhythm.launch.signals import cause, handled_by
from polyrhythm.wire.channel import Channel, open_channel
from polyrhythm.wire.frame import Header
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.sockets import dial


class Joiner:
    """Runs workers of a program here, for the coordinator at `address` (tcp:host:port)."""

    def __init__(
        self, program: Program, address: str, *, workers: int, key: bytes, threads: int = 0,
        site: str = "", console: Console | None = None,
    ) -> None:  # fmt: skip
        self._console = console or Console(quiet=True)
        self._address = address
        self._where = address.removeprefix("tcp:")
        self._over: Failure | None = None  # how the run has ended; exit code 0 is success
        self._numbers = itertools.count(1)
        self._nodes: NodeProcesses | None = None
        self._pool: ArenaPool | None = None
        threads = threads_each(threads, workers)
        self._socket = _connect(address, self._where)
        try:
            self._channel = _handshake(self._socket, key, self._where)
            mine = self._socket.getsockname()[0]
            terms = self._enlist(workers, mine, site)
            plan = Plan.from_json(terms["plan"])
            at = f" at {site}" if site else ""
            self._console.line(f"joined the run at {self._where} with {listing(terms['ranks'])}{at}")
            self._pool = ArenaPool(workers, min(workers, plan.restarts) + 1)
            if self._pool.shared is None:
                self._console.line(LIMITED)
            config = NodeConfig(
                plan, key, secrets.token_hex(8), time.monotonic() - terms["elapsed"], threads,
                f"tcp:[{mine}]:0" if ":" in mine else f"tcp:{mine}:0", self._pool.shared,
            )  # fmt: skip
            server = ForkServer(program, config, (self._socket,))
            self._nodes = NodeProcesses(server, self._pool, self._console, self._exited, self._broken)
            self._nodes.watch(self._channel, self._handle_orders)
        except BaseException:
            self._close()
            raise

    def run(self) -> Failure:
        """Runs until the run is over; returns how it ended."""
        assert self._nodes is not None
        try:
            while self._over is None:
                self._nodes.poll(1.0)
                self._nodes.start(self._address)
        except Interrupted:
            self._leave("was interrupted")
            raise
        finally:
            with handled_by(signal.SIG_IGN):  # a second Ctrl-C must not stop the cleanup
                try:
                    self._nodes.unwatch(self._channel)
                    self._nodes.end(failed=self._over is None or self._over.exit_code != 0)
                finally:
                    self._close()
                    self._console.close()
        assert self._over is not None
        return self._over

    def _enlist(self, workers: int, address: str, site: str) -> dict[str, Any]:
        """Offers workers; returns the terms of the run. Raises UsageError if the coordinator refuses."""
        try:
            self._send(
                "enlist", wants_reply=True, version=__version__, workers=workers, address=address, site=site
            )
            terms = self._channel.receive_header().fields
        except OSError:
            raise PolyrhythmError(f"the run at {self._where} does not reply; is it ending?") from None
        if "error" in terms:
            raise UsageError(f"cannot join the run at {self._where}: {terms['error']}")
        return terms

    def _handle_orders(self) -> None:
        """Executes the coordinator's orders, and notices when it is gone."""
        assert self._nodes is not None and self._pool is not None
        try:
            while self._over is None:
                header = self._channel.receive_header()
                fields = header.fields
                if header.kind == "fork":
                    self._nodes.want(Peer("worker", fields["rank"]), fields["incarnation"])
                elif header.kind == "kill":
                    self._nodes.kill(Peer("worker", fields["rank"]), fields["incarnation"])
                elif header.kind == "released":
                    self._pool.release(Peer("worker", fields["rank"]), fields["incarnation"])
                elif header.kind == "end":
                    self._over = Failure(fields["message"], fields["exit_code"])
                if not self._channel.has_buffered:
                    return
        except WireError as error:
            self._leave("broke off", str(error))
        except OSError:
            self._over = Failure(f"the run at {self._where} is gone: its connection ended")

    def _exited(self, peer: Peer, incarnation: int, status: int) -> None:
        if status and self._over is None:
            self._console.line(f"{peer} {cause(status)}")
        self._send("exit", rank=peer.rank, incarnation=incarnation, status=status)

    def _broken(self, why: str, exit_code: int) -> None:
        self._leave(f"ended ({why})", why, exit_code)

    def _leave(self, reason: str, message: str = "", exit_code: int = 1) -> None:
        """Takes all workers of this host out of the run."""
        self._send("leave", reason=reason)
        self._over = Failure(message, exit_code)

    def _send(self, kind: str, wants_reply: bool = False, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # reading reports the end of the connection
            self._channel.send(Header(kind, next(self._numbers), wants_reply=wants_reply, fields=fields))

    def _close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        self._socket.close()
        if self._pool is not None:
            self._pool.arenas.close()


def _connect(address: str, where: str) -> socket.socket:
    try:
        return dial(address)
    except ConnectionRefusedError:
        raise UsageError(
            f"no run listens at {where}; first start `polyrhythm run --listen {where} --here N --key FILE`"
        ) from None
    except socket.gaierror:
        raise UsageError(f"there is no host {where.rpartition(':')[0]}; give HOST:PORT") from None
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise UsageError(f"cannot reach {where}: {why}; is a firewall between these hosts?") from None


def _handshake(sock: socket.socket, key: bytes, where: str) -> Channel:
    """Opens the authenticated connection to the coordinator."""
    me = Identity(Peer(HOST, secrets.randbits(32)), instance=secrets.token_bytes(16))
    try:
        channel = open_channel(sock, me, key, dialed=True, where=where)
    except WireError as error:
        if "does not have the key" in str(error):
            raise UsageError(f"the run at {where} has another key; copy its file from that host") from None
        raise UsageError(f"{error}; do both hosts have the same version of polyrhythm?") from None
    except OSError:
        raise UsageError(f"{where} does not respond like a run of polyrhythm") from None
    if channel.peer != COORDINATOR:
        raise UsageError(f"{where} is {channel.peer} of a run; join at the address given to --listen")
    return channel
