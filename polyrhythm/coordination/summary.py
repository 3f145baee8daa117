"""SummaryBuilder: collects what nodes report, and makes the summary of a run. Logic without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from polyrhythm.coordination.membership import Incarnation
from polyrhythm.core.event_counts import EventCounts
from polyrhythm.core.events import Totals
from polyrhythm.core.message import Scalar
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import Report


class SummaryBuilder:
    """What a run has done so far."""

    def __init__(self) -> None:
        self.totals: dict[Incarnation, Totals] = {}
        self.counts = EventCounts()
        self.metrics: dict[str, Scalar] = {}
        self.due: dict[Incarnation, int] = {}  # examples that a worker was to have trained on by then
        self.epoch = (
            0,
            0,
        )  # the furthest epoch that a worker is in, counted from 1, and how many there will be
        self.began = self.ended = 0.0

    def report(self, node: Incarnation, report: Report) -> None:
        """A node has reported."""
        self.counts.merge(report.staleness, report.dropped, report.updates_lost)
        if report.totals is not None:
            self.totals[node] = report.totals

    def advance(self, node: Incarnation, steps: int, samples: int) -> None:
        """A worker has come so far. It may not live to report it."""
        self.totals[node] = msgspec.structs.replace(self.totals[node], steps=steps, samples=samples)

    def progress(self) -> tuple[int, int]:
        """Steps and samples of all workers so far."""
        workers = self._workers()
        return sum(each.steps for each in workers), sum(each.samples for each in workers)

    def left_out(self, dead: Iterable[Incarnation]) -> int:
        """Examples that belonged to one worker alone, which died before it reported training on them."""
        trained = {each: self.totals.get(each, Totals()).samples for each in dead}
        return sum(max(0, self.due.get(each, 0) - samples) for each, samples in trained.items())

    def build(self, plan: Plan) -> dict[str, Any]:
        """The figures of the summary."""
        wall = max(self.ended - self.began, 1e-9)
        workers, everyone = self._workers(), self.totals.values()
        steps, samples = self.progress()
        figures: dict[str, Any] = {
            "strategy": str(plan.strategy),
            "workers": plan.workers,
            "servers": plan.servers,
            "batch_norm": plan.batch_norm,
            "wall_s": wall,
            "samples_per_s": samples / wall,
            "steps": steps,
            "samples": samples,
            "bytes_sent": sum(each.bytes_sent for each in everyone),
            "compute_s": sum(each.compute_s for each in workers),
            "wait_s": sum(each.wait_s for each in workers),
            "staleness": self.counts.spread(),
            "dropped": self.counts.dropped,
            "metrics": self.metrics,
        }
        if plan.sites:
            figures["bytes_between_sites"] = sum(each.bytes_between for each in everyone)
        if self.counts.updates_lost is not None:
            figures["lost_updates"] = msgspec.structs.asdict(self.counts.updates_lost)
        return figures

    def _workers(self) -> list[Totals]:
        return [totals for (peer, _), totals in self.totals.items() if peer.role == "worker"]
