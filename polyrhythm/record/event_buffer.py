"""EventBuffer: keeps events of a node until they are sent or written, and encodes them in batches."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

from polyrhythm.core.events import Event, EventPolicy, Gap

EVERY = 100  # with `sample`, one in so many events of each frequent kind is recorded
MAX_EVENTS = 100_000  # in the buffer; more are dropped and counted
BATCH = 1000  # the most events that are encoded together

_encoder = msgspec.json.Encoder(enc_hook=float)
_Row = tuple[str, float, Event]


class EventBuffer:
    """A buffer of events. Any thread may add events; `add` never blocks for long and never raises."""

    def __init__(self, policy: EventPolicy = "all") -> None:
        self.policy = policy
        self._rows: list[_Row] = []
        self._seen: Counter[tuple[str, type[Event]]] = Counter()
        self._missing: Counter[str] = Counter()  # events that are not recorded, by node
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, node: str, t: float, event: Event) -> None:
        """Adds an event of a node, if the policy records it."""
        if self.policy != "all" and not self._wanted(node, event):
            return
        with self._lock:
            if len(self._rows) < MAX_EVENTS:
                self._rows.append((node, t, event))
            else:
                self._missing[node] += 1

    def take(self, limit: int = 1 << 30) -> bytes:
        """Removes up to `BATCH` of the oldest events; returns them as at most `limit` bytes of JSON lines."""
        with self._lock:
            rows, self._rows = self._rows[:BATCH], self._rows[BATCH:]
            missing, self._missing = self._missing, Counter()
        if not rows:
            return b""
        rows += [(node, rows[-1][1], Gap(count)) for node, count in missing.items()]
        while len(lines := _encode(rows)) > limit:
            half = len(rows) // 2
            if not half:
                return _line((rows[0][0], rows[0][1], Gap(1)))
            with self._lock:
                self._rows[:0] = rows[half:]
            rows = rows[:half]
        return lines

    def _wanted(self, node: str, event: Event) -> bool:
        if self.policy == "off":
            return False
        if not event.frequent:
            return True
        key = node, type(event)
        self._seen[key] += 1
        return self._seen[key] % EVERY == 1


def _encode(rows: list[_Row]) -> bytes:
    try:
        return _encoder.encode_lines(rows)
    except Exception:  # a note with values that JSON cannot hold
        return b"".join(map(_line, rows))


def _line(row: _Row) -> bytes:
    try:
        return _encoder.encode(row) + b"\n"
    except Exception:
        return _encoder.encode((row[0], row[1], Gap(1))) + b"\n"
