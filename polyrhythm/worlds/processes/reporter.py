"""Reporter: sends what a node has done and logged to the coordinator, in a thread of its own."""

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

EVERY = 0.5  # seconds between two reports
DIGITS = 6  # events tell microseconds
LARGEST = 1 << 19  # bytes of events in one report: a header has a limit


class Reporter:
    """The events and totals of a node until the coordinator has them. Never raises: a report is no reason to
    end a run."""

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
        """Begins to report."""
        self._buffer.policy = policy
        self._thread = threading.Thread(target=self._run, name="polyrhythm report", daemon=True)
        self._thread.start()

    def log(self, t: float, event: Event) -> None:
        """Keeps an event for the next report."""
        self._time = t = round(t, DIGITS)
        with self._lock:
            self._counts.add(event)
        self._buffer.add(self._name, t, event)
        if len(self._buffer) == BATCH:
            self._wake.set()

    def totals(self, totals: Totals) -> None:
        """Keeps what the node has done so far for the next report."""
        with self._lock:
            self._totals = totals

    def flush(self) -> None:
        """Sends what there is; returns when it is sent."""
        with self._sending, contextlib.suppress(PolyrhythmError):
            while (report := self._take()) is not None:
                kind, fields = pack(report)
                self._transport.send(COORDINATOR, kind, (), fields)

    def close(self) -> None:
        """Ends the thread. What was not flushed is not sent."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(EVERY)
            self._wake.clear()
            self.flush()

    def _take(self) -> Report | None:
        with self._lock:
            counts, self._counts = self._counts, EventCounts()
            totals, self._totals = self._totals, None
        if totals is not None:
            self._buffer.add(self._name, self._time, totals)
        lines = self._buffer.take(LARGEST)
        report = Report(totals, dict(counts.staleness), counts.dropped, counts.updates_lost, lines)
        return None if report == Report() else report
