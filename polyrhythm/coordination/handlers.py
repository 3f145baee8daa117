"""Handlers of requests to the coordinator that need nothing of its state but a function or two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from polyrhythm.coordination.leases import Cohorts
from polyrhythm.coordination.membership import Membership
from polyrhythm.coordination.ports import Recorder
from polyrhythm.coordination.replica_comparison import ReplicaComparison
from polyrhythm.coordination.summary import SummaryBuilder
from polyrhythm.core.events import Metrics
from polyrhythm.core.peer import Peer
from polyrhythm.core.requests import (
    ExamplesDue,
    LogMetrics,
    NodeFailed,
    ReleaseMemory,
    Request,
    ResumeData,
    ShowNote,
    WorkerNames,
)

Respond = Callable[[Any], None]  # sends the reply to a request, see `core.requests`
Handle = Callable[[Peer, Any, Respond], None]


def noted(note: Callable[[Any], None]) -> Handle:
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


def resuming(membership: Membership, late: Callable[[Peer, int, int], None], resume: Handle) -> Handle:
    """Handles a worker that resumes: with all others (`resume`), or when it replaces one of them (`late`)."""

    def handle(peer: Peer, request: ResumeData, respond: Respond) -> None:
        if membership.incarnations[peer]:
            respond(None)
            late(peer, request.loader, request.epoch)
        else:
            resume(peer, request, respond)

    return handle


def failing(fail: Callable[[str, int, Peer | None], None]) -> Handle:
    """Handles the report of a node that cannot continue."""

    def handle(peer: Peer, failed: NodeFailed, respond: Respond) -> None:
        respond(None)
        fail(failed.error, failed.exit_code, peer if failed.waited else None)

    return handle


def compared(replicas: ReplicaComparison, members: Membership) -> Handle:
    """Handles a report on a replica."""
    return lambda peer, report, respond: respond(replicas.compare(peer, report, members.copies(peer)))


def due(tally: SummaryBuilder, members: Membership) -> Handle:
    """Handles a report of the examples that a worker will have trained on."""

    def handle(peer: Peer, request: ExamplesDue, respond: Respond) -> None:
        tally.due[members.current(peer)] = request.samples
        respond(None)

    return handle


def logged(tally: SummaryBuilder, members: Membership, record: Recorder) -> Handle:
    """Handles metrics that a script has logged."""

    def handle(peer: Peer, request: LogMetrics, respond: Respond) -> None:
        tally.metrics.add(members.current(peer), request)
        record.metrics(str(peer), request.t, Metrics(request.step, request.values))
        respond(None)

    return handle


def late(members: Membership, done: Collection[Peer], cohorts: Cohorts, gathering: Iterable[Peer]) -> Handle:
    """Handles the question which nodes others wait for."""

    def handle(peer: Peer, request: Request[Any], respond: Respond) -> None:
        waiting = {*done, *cohorts.waiting, *gathering}
        respond(WorkerNames([str(each) for each in sorted(members.members) if each not in waiting]))

    return handle


def releasing(members: Membership, released: Callable[[Peer, int], None]) -> Handle:
    """Handles the report of a node that it no longer uses the memory of a dead worker."""

    def handle(peer: Peer, request: ReleaseMemory, respond: Respond) -> None:
        dead = Peer("worker", request.rank), request.incarnation
        if members.release(peer, dead):
            released(*dead)
        respond(None)

    return handle
