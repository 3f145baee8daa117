"""RemoteHosts: communicates with the launchers of other hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.launch.console import Console
from polyrhythm.launch.hosts import HostRegistry, RemoteHost, invitation, listing
from polyrhythm.launch.program import Program
from polyrhythm.launch.signals import cause
from polyrhythm.wire.headers import DISCONNECTED
from polyrhythm.wire.incoming import Incoming
from polyrhythm.wire.transport import Transport


class RunState(Protocol):
    """The state of the run as messages of other hosts need and change it."""

    @property
    def started(self) -> bool:
        """True once nodes have been started."""

    @property
    def over(self) -> bool:
        """True once the run ends, with or without success."""

    def terms(self) -> dict[str, Any]:
        """The plan and the time, which a host needs to take part."""

    def died(self, peer: Peer, reason: str, incarnation: int | None = None) -> None:
        """Handles the end of a node's process."""


class RemoteHosts:
    """The launcher's connections to the launchers of other hosts."""

    def __init__(
        self, program: Program, plan: Plan, transport: Transport, console: Console, run: RunState,
        changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.registry = HostRegistry(plan)
        self._program, self._plan, self._run = program, plan, run
        self._transport, self._console, self._changed = transport, console, changed

    def receive(self, incoming: Incoming) -> None:
        """Handles a message of another host's launcher."""
        who, fields = incoming.sender, incoming.fields
        if incoming.kind == "enlist":
            return self._enlist(incoming)
        host = self.registry.joined.get(who)
        if host is None:
            return  # its last messages; its workers are known to be gone
        if incoming.kind == "exit":
            reason = f"{cause(fields['status'])} on {host.address}"
            self._run.died(Peer("worker", fields["rank"]), reason, fields["incarnation"])
        elif incoming.kind == "leave":
            self._lose(who, f"{fields['reason']} on {host.address}")
        elif incoming.kind == DISCONNECTED:
            self._lose(who, f"is gone with the launcher on {host.address}")

    def invite(self) -> None:
        """Shows which commands start the missing workers."""
        self._console.line(
            invitation(self._transport.address, self._program, self._plan, self.registry.missing)
        )

    def order(self, host: Peer, kind: str, **fields: Any) -> None:
        """Sends an order to a host. If the host is gone, its connection reports that."""
        with contextlib.suppress(PolyrhythmError):
            self._transport.send(host, kind, fields=fields, retry=False)

    def _enlist(self, incoming: Incoming) -> None:
        fields = incoming.fields
        try:
            if self._run.over:
                raise UsageError("the run is over")
            host = self.registry.enlist(
                incoming.sender, *(fields.get(key) for key in ("version", "workers", "address", "site"))
            )
        except UsageError as error:
            reply: dict[str, Any] = {"error": str(error)}
            self._console.line(f"{fields.get('address')} cannot join: {error}")
        else:
            reply = {"ranks": host.ranks, **self._run.terms()}
            self._console.line(f"{host.address} joined with {listing(host.ranks)}")
            self._changed()
        with contextlib.suppress(PolyrhythmError):  # if it is gone, its connection reports that
            self._transport.reply(incoming, fields=reply)
        if self.registry.free and "error" not in reply:
            self.invite()

    def _lose(self, who: Peer, reason: str) -> None:
        """Handles the loss of a host with all its workers."""
        host = self.registry.leave(who)
        if host is None or self._run.over:
            return
        if self._run.started:
            self._lose_workers(host, reason)
        else:
            self.registry.vacate(host)
            self._console.line(f"{host.address} has left before the run began")
            self.invite()

    def _lose_workers(self, host: RemoteHost, reason: str) -> None:
        together = f" ({listing(host.ranks)})" if len(host.ranks) > 1 else ""
        for rank in host.ranks:
            self._run.died(Peer("worker", rank), reason + together)
        self._changed()
