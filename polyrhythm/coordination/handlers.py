"""Handlers of requests to the coordinator that need nothing of its state but a function or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.replica_comparison import ReplicaComparison
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import NodeFailed, Request, ShowNote

Respond = Callable[[Any], None]  # sends the reply to a request, see `core.requests`


def noted(note: Callable[[Any], None]) -> Callable[[Peer, Any, Respond], None]:
    """Handles a request that has an empty reply."""

    def handle(peer: Peer, request: Request[Any], respond: Respond) -> None:
        respond(None)
        note(request)

    return handle


def once(say: Callable[[str], None]) -> Callable[[ShowNote], None]:
    """Says each note once, also if several workers have it."""
    said: set[str] = set()

    def show(note: ShowNote) -> None:
        if note.text not in said:
            said.add(note.text)
            say(note.text)

    return show


def failing(fail: Callable[[str, int, Peer | None], None]) -> Callable[[Peer, Any, Respond], None]:
    """Handles the report of a node that cannot continue."""

    def handle(peer: Peer, failed: NodeFailed, respond: Respond) -> None:
        respond(None)
        fail(failed.error, failed.exit_code, peer if failed.waited else None)

    return handle


def compared(replicas: ReplicaComparison, members: Membership) -> Callable[[Peer, Any, Respond], None]:
    """Handles a report on a replica."""
    return lambda peer, report, respond: respond(replicas.compare(peer, report, members.copies(peer)))
