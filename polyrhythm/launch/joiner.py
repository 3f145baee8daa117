"""A launcher that brings the workers of this host into a run that began on another.

It has one connection, to the coordinator, and one thread: it forks workers when it is told to, says when one
has ended, and ends them all when the run is over or the connection is. `launch/hosts.py` has the words.
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
from polyrhythm.coordination.coordinator import COORDINATOR, Failure
from polyrhythm.core.errors import Interrupted, PolyrhythmError, UsageError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.launch.hosts import HOST, listing
from polyrhythm.launch.nodes import Nodes, Rooms, cause, signals, threads_each
from polyrhythm.launch.program import Program
from polyrhythm.launch.screen import Screen
from polyrhythm.launch.zygote import NodeConfig
from polyrhythm.wire.channel import Channel, dial, open_channel
from polyrhythm.wire.frame import Header
from polyrhythm.wire.handshake import Identity


class Joiner:
    """Runs workers of a program here, for the coordinator at `address` (tcp:host:port)."""

    def __init__(
        self, program: Program, address: str, *, workers: int, key: bytes, threads: int = 0,
        site: str = "", screen: Screen | None = None,
    ) -> None:  # fmt: skip
        self._screen = screen or Screen(quiet=True)
        self._address = address
        self._where = address.removeprefix("tcp:")
        self._over: Failure | None = None  # how the run has ended; with exit code 0 it has not failed
        self._numbers = itertools.count(1)
        self._nodes: Nodes | None = None
        self._rooms: Rooms | None = None
        threads = threads_each(threads, workers)
        self._socket = _connect(address, self._where)
        try:
            self._channel = _greet(self._socket, key, self._where)
            mine = self._socket.getsockname()[0]
            terms = self._enlist(workers, mine, site)
            at = f" at {site}" if site else ""
            self._screen.line(f"joined the run at {self._where} with {listing(terms['ranks'])}{at}")
            self._rooms = Rooms(workers, min(workers, terms["restarts"]) + 1)
            config = NodeConfig(
                key, secrets.token_hex(8), time.monotonic() - terms["elapsed"], threads, terms["wait"],
                f"tcp:[{mine}]:0" if ":" in mine else f"tcp:{mine}:0", self._rooms.arenas,
                terms["collective"],
                terms["strategy"],
            )  # fmt: skip
            self._nodes = Nodes(
                program, config, self._rooms, self._screen, self._exited, self._broken, (self._socket,)
            )
            self._nodes.watch(self._channel, self._obey)
        except BaseException:
            self._close()
            raise

    def run(self) -> Failure:
        """Until the run is over; how it ended."""
        assert self._nodes is not None
        try:
            while self._over is None:
                self._nodes.poll(1.0)
                self._nodes.start(self._address)
        except Interrupted:
            self._leave("was interrupted")
            raise
        finally:
            with signals(signal.SIG_IGN):  # a second Ctrl-C must not stop the cleaning up
                try:
                    self._nodes.unwatch(self._channel)
                    self._nodes.end(failed=self._over is None or self._over.exit_code != 0)
                finally:
                    self._close()
                    self._screen.close()
        assert self._over is not None
        return self._over

    def _enlist(self, workers: int, address: str, site: str) -> dict[str, Any]:
        """Offers workers; the terms of the run. Raises what the coordinator has against it."""
        try:
            self._say("enlist", asked=True, version=__version__, workers=workers, address=address, site=site)
            terms = self._channel.receive_header().fields
        except OSError:
            raise PolyrhythmError(f"the run at {self._where} does not answer; is it ending?") from None
        if "error" in terms:
            raise UsageError(f"cannot join the run at {self._where}: {terms['error']}")
        return terms

    def _obey(self) -> None:
        """Does what the coordinator says, and notices when it is gone."""
        assert self._nodes is not None and self._rooms is not None
        try:
            while self._over is None:
                header = self._channel.receive_header()
                fields = header.fields
                if header.kind == "fork":
                    self._nodes.want(Peer("worker", fields["rank"]), fields["incarnation"])
                elif header.kind == "released":
                    self._rooms.release(Peer("worker", fields["rank"]), fields["incarnation"])
                elif header.kind == "end":
                    self._over = Failure(fields["message"], fields["exit_code"])
                if not self._channel.ahead:
                    return
        except WireError as error:
            self._leave("broke off", str(error))
        except OSError:
            self._over = Failure(f"the run at {self._where} is gone: its connection ended")

    def _exited(self, peer: Peer, status: int) -> None:
        if status and self._over is None:
            self._screen.line(f"{peer} {cause(status)}")
        self._say("exit", rank=peer.rank, status=status)

    def _broken(self, why: str) -> None:
        self._leave(f"ended ({why})", why)

    def _leave(self, reason: str, message: str = "") -> None:
        """Takes all workers of this host out of the run."""
        self._say("leave", reason=reason)
        self._over = Failure(message)

    def _say(self, kind: str, asked: bool = False, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # if the connection has ended, reading tells
            self._channel.send(Header(kind, next(self._numbers), asked=asked, fields=fields))

    def _close(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        self._socket.close()
        if self._rooms is not None:
            self._rooms.arenas.close()


def _connect(address: str, where: str) -> socket.socket:
    try:
        return dial(address)
    except ConnectionRefusedError:
        raise UsageError(
            f"nobody listens at {where}; first start `polyrhythm run --listen {where} --here N --key FILE`"
        ) from None
    except socket.gaierror:
        raise UsageError(f"there is no host {where.rpartition(':')[0]}; give HOST:PORT") from None
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise UsageError(f"cannot reach {where}: {why}; is a firewall between these hosts?") from None


def _greet(sock: socket.socket, key: bytes, where: str) -> Channel:
    """The connection to the coordinator, once both have shown that they know the key."""
    me = Identity(Peer(HOST, secrets.randbits(32)), instance=secrets.token_bytes(16))
    try:
        channel = open_channel(sock, me, key, dialed=True, where=where)
    except WireError as error:
        if "does not have the key" in str(error):
            raise UsageError(f"the run at {where} has another key; copy its file from that host") from None
        raise UsageError(f"{error}; are both hosts of one version of polyrhythm?") from None
    except OSError:
        raise UsageError(f"{where} does not answer as a run of polyrhythm does") from None
    if channel.peer != COORDINATOR:
        raise UsageError(f"{where} is {channel.peer} of a run; join at the address given to --listen")
    return channel
