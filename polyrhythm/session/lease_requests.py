"""LeaseRequests: a loader's requests to the coordinator, where batches are leased."""

from __future__ import annotations

from typing import Any

import msgspec

from polyrhythm.core.lease import Lease
from polyrhythm.core.requests import DataPosition, ResumeData, ReturnLease, TakeLease, WhereIsData
from polyrhythm.session.context import WorldContext
from polyrhythm.session.part import Parts
from polyrhythm.session.sharing import Coordination, Position


class LeaseRequests(Coordination):
    """The requests of one loader to the coordinator."""

    def __init__(self, context: WorldContext, parts: Parts, number: int) -> None:
        self._context, self._parts, self._number = context, parts, number

    def take(self, epoch: int, batches: int, unseen: int) -> Lease | None:
        steps, samples = self._parts.steps, self._parts.samples
        request = TakeLease(self._number, epoch, batches, unseen, steps=steps, samples=samples)
        return self._context.request(request).lease

    def give_back(self, leases: list[Lease], peeked: bool) -> None:
        self._context.request(ReturnLease(self._number, leases, peeked))

    def position(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self._context.request(WhereIsData(self._number)))
        return state

    def resume(self, position: Position, held: list[Lease]) -> None:
        leased = msgspec.convert(position.shared, DataPosition)
        self._context.request(ResumeData(self._number, position.epoch, position.batches, leased, held))
