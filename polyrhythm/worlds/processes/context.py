"""ProcessContext: the place of a process in a run."""

from __future__ import annotations

from typing import Any

from polyrhythm.coordination.coordinator import COORDINATOR
from polyrhythm.core.errors import PeerLost, PolyrhythmError, WaitError
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.resolve import ResolvedStrategy
from polyrhythm.session.context import Welcome, WorldContext
from polyrhythm.wire.buffers import Buffer
from polyrhythm.worlds.processes.node import ProcessNode
from polyrhythm.worlds.processes.process_group import Place


class ProcessContext(WorldContext):
    """A process's place in a run; the coordinator is in the launcher."""

    def __init__(self, node: ProcessNode, plan: Plan, strategy: ResolvedStrategy | None) -> None:
        self.node: ProcessNode = node
        self.me, self.plan, self._strategy = node.me, plan, strategy

    @property
    def strategy(self) -> ResolvedStrategy | None:
        return self._strategy

    def request(self, kind: str, **fields: Any) -> dict[str, Any]:
        try:
            answer = self.node.transport.request(COORDINATOR, kind, fields=fields).wait().fields
        except WaitError as error:
            if kind not in ("done", "bye", "deal") or isinstance(error, PeerLost):
                raise
            late = ", ".join(self.request("late")["workers"])  # the coordinator itself waits for these
            raise WaitError(f"{error}; {late} did not come so far: is --timeout too short?") from None
        if "error" in answer:
            raise PolyrhythmError(answer["error"])
        if kind == "prepared":
            self.node.transport.layout = fields["layout"]
        return answer

    def join(self, strategy: ResolvedStrategy, batch_norm: str) -> Welcome:
        node = self.node
        place = Place(node.transport.address, node.transport.host, node.arena)
        answer = self.request("join", strategy=strategy.to_json(), batch_norm=batch_norm, place=list(place))
        welcome = Welcome.of(answer)
        node.seed, node.incarnation, node.cohort = welcome.seed, welcome.incarnation, answer["group"]
        node.meet([(role, rank, *place) for role, rank, place in answer["peers"]])
        node.transport.far = frozenset(Peer(role, rank) for role, rank in answer["far"])
        return welcome

    def bring(self, digest: str, blob: bytes) -> None:
        buffer = Buffer("uint8", memoryview(bytearray(blob)))
        self.node.transport.request(COORDINATOR, "result", [buffer], fields={"digest": digest}).wait()

    def flush(self) -> None:
        self.node.flush()
