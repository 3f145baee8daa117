"""ProcessContext: the session's access to the run from a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from polyrhythm.core.errors import PeerLost, PolyrhythmError, WaitError
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import (
    Gather,
    JoinRun,
    LeaveRun,
    Prepared,
    Request,
    ShareEpoch,
    StepsDone,
    Welcome,
    WhoIsLate,
    pack,
    unpack_reply,
)
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.core.result_part import ResultPart
from polyrhythm.session.context import WorldContext
from polyrhythm.wire.frame import layout_of
from polyrhythm.worlds.processes.node import ProcessNode

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")


class ProcessContext(WorldContext):
    """Talks to the coordinator, which is in the launcher, by messages."""

    def __init__(self, node: ProcessNode, plan: Plan, strategy: ResolvedStrategy | None) -> None:
        self.node: ProcessNode = node
        self.me, self.plan, self._strategy = node.me, plan, strategy

    @property
    def strategy(self) -> ResolvedStrategy | None:
        return self._strategy

    def request(self, request: Request[R]) -> R:
        kind, fields = pack(request)
        try:
            reply = self.node.transport.request(COORDINATOR, kind, fields=fields).wait().fields
        except WaitError as error:
            if not isinstance(request, StepsDone | LeaveRun | ShareEpoch | Gather) or isinstance(
                error, PeerLost
            ):
                raise
            late = ", ".join(self.request(WhoIsLate()).workers)  # the coordinator waits for these
            raise WaitError(f"{error}; {late} did not arrive; is --timeout too short?") from None
        if "error" in reply:
            raise PolyrhythmError(reply["error"])
        if isinstance(request, Prepared):
            self.node.transport.layout = layout_of(request.part, request.layout)
        return unpack_reply(request, reply)

    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        node = self.node
        location = node.transport.address, node.transport.host, node.arena
        welcome = self.request(JoinRun(strategy, batch_norm, location))
        node.seed, node.incarnation, node.cohort = welcome.seed, welcome.incarnation, welcome.cohort
        node.meet(welcome.peers)
        node.transport.traffic.other_site_peers = frozenset(Peer(role, rank) for role, rank in welcome.far)
        node.start_reports(self.plan.events)
        return welcome

    def send_result(self, digest: str, file: Sequence[Tensor]) -> None:
        buffers = [self.node.buffer(part) for part in file]
        self.node.transport.request(COORDINATOR, "result", buffers, fields={"digest": digest}).wait()

    def send_result_part(self, part: ResultPart, tensors: Sequence[Tensor]) -> None:
        buffers, fields = [self.node.buffer(each) for each in tensors], msgspec.structs.asdict(part)
        self.node.transport.request(COORDINATOR, "result part", buffers, fields=fields).wait()

    def flush(self) -> None:
        self.node.flush()
