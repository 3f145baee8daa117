"""Reporter: sends the events and totals of a node to the coordinator, in a background thread."""

from __future__ import annotations

import contextlib
import threading

from polyrhythm.core.errors import PolyrhythmError
from polyrhythm.core.event_counts import EventCounts
from polyrhythm.core.events import Event, EventPolicy, Totals
from polyrhythm.core.peer import COORDINATOR, Peer
from polyrhythm.core.requests import Report, pack
from polyrhythm.record.event_buffer import BATCH, EventBuffer
from polyrhythm.wire.transport import Transport

INTERVAL = 0.5  # seconds between two reports
DIGITS = 6  # of event times, in seconds
MAX_BYTES = 1 << 19  # of events in one report, because headers are limited


class Reporter:
    """Buffers events and totals until they are sent. Never raises: a lost report must not end a run."""

    def __init__(self, me: Peer, transport: Transport) -> None:
        self._name, self._transport = str(me), transport
        self._buffer = EventBuffer()
        self._counts = EventCounts()
        self._totals: Totals | None = None
        self._time = 0.0  # of the last event
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # keeps reports in order
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, policy: EventPolicy) -> None:
        """Starts to report."""
        self._buffer.policy = policy
        self._thread = threading.Thread(target=self._run, name="polyrhythm report", daemon=True)
        self._thread.start()

    def log(self, t: float, event: Event) -> None:
        """Adds an event to the next report."""
        self._time = t = round(t, DIGITS)
        with self._lock:
            self._counts.add(event)
        self._buffer.add(self._name, t, event)
        if len(self._buffer) == BATCH:
            self._wake.set()

    def totals(self, totals: Totals) -> None:
        """Sets the totals of the next report."""
        with self._lock:
            self._totals = totals

    def flush(self) -> None:
        """Sends all events and totals so far, and returns when they are sent."""
        with self._sending, contextlib.suppress(PolyrhythmError):
            while (report := self._next_report()) is not None:
                kind, fields = pack(report)
                self._transport.send(COORDINATOR, kind, (), fields)

    def close(self) -> None:
        """Ends the thread without sending what is left."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(INTERVAL)
            self._wake.clear()
            self.flush()

    def _next_report(self) -> Report | None:
        with self._lock:
            counts, self._counts = self._counts, EventCounts()
            totals, self._totals = self._totals, None
        if totals is not None:
            self._buffer.add(self._name, self._time, totals)
        lines = self._buffer.take(MAX_BYTES)
        report = Report(totals, dict(counts.staleness), counts.dropped, counts.updates_lost, lines)
        return None if report == Report() else report
