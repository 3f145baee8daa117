"""SummaryBuilder: collects the reports of nodes, and builds the summary of a run. Logic without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from polyrhythm.coordination.membership import Incarnation
from polyrhythm.coordination.metrics import ReducedMetrics
from polyrhythm.core.event_counts import EventCounts
from polyrhythm.core.events import Totals
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import Report


class SummaryBuilder:
    """The totals of a run so far."""

    def __init__(self, dead: Collection[Incarnation] = ()) -> None:
        self.totals: dict[Incarnation, Totals] = {}
        self.counts = EventCounts()
        self.metrics = ReducedMetrics(dead)
        self.due: dict[Incarnation, int] = {}  # examples that were assigned to a worker in total
        self.epoch = (0, 0)  # the latest epoch of any worker, counted from 1, and the number of epochs
        self.began = self.ended = 0.0
        self.trained_by = ""  # the tool that trains, if it is not a strategy

    def report(self, node: Incarnation, report: Report) -> None:
        """Adds the report of a node."""
        self.counts.merge(report.staleness, report.dropped, report.updates_lost)
        if report.totals is not None:
            self.totals[node] = report.totals

    def begin_epoch(self, epoch: int, count: int) -> None:
        """A worker has begun an epoch, of so many."""
        self.epoch = max(self.epoch, (epoch + 1, count))

    def advance(self, node: Incarnation, steps: int, samples: int) -> None:
        """Sets the progress of a worker, which may die before its next report."""
        self.totals[node] = msgspec.structs.replace(self.totals[node], steps=steps, samples=samples)

    def progress(self) -> tuple[int, int]:
        """Steps and samples of all workers so far."""
        workers = self._workers()
        return sum(each.steps for each in workers), sum(each.samples for each in workers)

    def left_out(self, dead: Iterable[Incarnation]) -> int:
        """Examples that were assigned to dead workers, and that they had not reported as used."""
        trained = {each: self.totals.get(each, Totals()).samples for each in dead}
        return sum(max(0, self.due.get(each, 0) - samples) for each, samples in trained.items())

    def build(self, plan: Plan, model_size: int) -> dict[str, Any]:
        """The figures of the summary that come from reports. `model_size`: workers that hold one model."""
        wall = max(self.ended - self.began, 1e-9)
        workers, everyone = self._workers(), self.totals.values()
        steps, samples = self.progress()
        figures: dict[str, Any] = {
            "strategy": self.trained_by or str(plan.strategy),
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
            "metrics": self.metrics.reduced(),
        }
        if model_size > 1:
            figures["places"] = [self._place(place, model_size) for place in range(model_size)]
        if plan.sites:
            figures["bytes_between_sites"] = sum(each.bytes_between for each in everyone)
        if self.counts.updates_lost is not None:
            figures["lost_updates"] = msgspec.structs.asdict(self.counts.updates_lost)
        return figures

    def _workers(self) -> list[Totals]:
        return [totals for (peer, _), totals in self.totals.items() if peer.role == "worker"]

    def _place(self, place: int, model_size: int) -> dict[str, Any]:
        """What the workers at one place of their models have done."""
        found = [
            totals
            for (peer, _), totals in self.totals.items()
            if peer.role == "worker" and peer.rank % model_size == place
        ]
        return {
            "compute_s": sum(each.compute_s for each in found),
            "wait_s": sum(each.wait_s for each in found),
            "bytes_sent": sum(each.bytes_sent for each in found),
        }
