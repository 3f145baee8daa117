"""EventCounts: what the summary says of events, counted also when the run folder keeps only some or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from polyrhythm.core.events import Applied, Dropped, Event, UpdatesLost


class EventCounts:
    """Counts of the events of one node or of a whole run."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()  # of the updates that were applied
        self.dropped = 0  # updates that came too late to be applied
        self.updates_lost: UpdatesLost | None = None  # of those that were counted, if any were

    def add(self, event: Event) -> None:
        """Counts one event."""
        kind = type(event)
        if kind is Applied:
            self.staleness[event.staleness] += 1  # type: ignore[attr-defined]
        elif kind is Dropped:
            self.dropped += 1
        elif kind is UpdatesLost:
            self._add_lost(event)  # type: ignore[arg-type]

    def merge(self, staleness: Mapping[int, int], dropped: int, updates_lost: UpdatesLost | None) -> None:
        """Adds what another node has counted."""
        self.staleness.update(staleness)
        self.dropped += dropped
        if updates_lost is not None:
            self._add_lost(updates_lost)

    def _add_lost(self, event: UpdatesLost) -> None:
        """Each part of a model that has its own optimizer counts its own."""
        counted, lost = event.counted, event.lost
        if self.updates_lost is not None:
            counted, lost = counted + self.updates_lost.counted, lost + self.updates_lost.lost
        self.updates_lost = UpdatesLost(counted, lost, lost / max(counted, 1))

    def spread(self) -> dict[str, float]:
        """Mean, 95th percentile and maximum of the staleness."""
        counts, total = self.staleness, self.staleness.total()
        if not total:
            return {"mean": 0.0, "p95": 0.0, "max": 0.0}
        seen, p95 = 0, 0
        for value in sorted(counts):
            seen += counts[value]
            if seen >= 0.95 * total:
                p95 = value
                break
        mean = sum(value * count for value, count in counts.items()) / total
        return {"mean": mean, "p95": float(p95), "max": float(max(counts))}
