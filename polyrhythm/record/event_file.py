"""EventFile: the event log of a run on disk.

`events.jsonl.gz` has a header line and then one event per line, as JSON: `zcat` shows it, and `polyrhythm
events` prints it with the names of the fields. It can be read during the run and after a crash. When a file
reaches `part` bytes, `events.2.jsonl.gz` follows, and so on; only the last `parts` files are kept.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from polyrhythm.core.events import EventHeader, EventPolicy, field_names

PART = 64 << 20  # compressed bytes of one file
PARTS = 16  # 1 GiB in total
LEVEL = 1  # of compression: a tenth of the time of the best level, for four fifths of its effect
_NAME = re.compile(r"events(?:\.(\d+))?\.jsonl\.gz")


class EventFile:
    """Writes an event log; raises OSError if it cannot."""

    def __init__(
        self,
        folder: Path,
        policy: EventPolicy = "all",
        part: int = PART,
        parts: int = PARTS,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._part, self._parts, self._on_limit = folder, part, parts, on_limit
        self._header = msgspec.json.encode(EventHeader(events=policy, fields=field_names())) + b"\n"
        self._number = 0
        self._raw: IO[bytes] | None = None
        self._zip: gzip.GzipFile | None = None

    def write(self, lines: bytes) -> None:
        """Appends lines and flushes them to the operating system."""
        if self._zip is None or self._raw is None:
            self._zip, self._raw = self._begin()
        self._zip.write(lines)
        self._zip.flush(zlib.Z_SYNC_FLUSH)
        self._raw.flush()
        if self._raw.tell() > self._part:
            self.close()

    def close(self) -> None:
        """Closes the current file; a later write begins another one."""
        compressed, raw = self._zip, self._raw
        self._zip = self._raw = None
        try:
            if compressed is not None:
                compressed.close()
        finally:
            if raw is not None:
                raw.close()

    def _begin(self) -> tuple[gzip.GzipFile, IO[bytes]]:
        self._number += 1
        if self._number > self._parts:
            with contextlib.suppress(FileNotFoundError):
                self._name(self._number - self._parts).unlink()
            self._on_limit()
        raw = self._name(self._number).open("wb")
        compressed = gzip.GzipFile("", "wb", LEVEL, raw)
        compressed.write(self._header)
        return compressed, raw

    def _name(self, number: int) -> Path:
        return self._folder / ("events.jsonl.gz" if number == 1 else f"events.{number}.jsonl.gz")


def event_files(folder: Path) -> list[Path]:
    """The files of an event log, the oldest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("events*.jsonl.gz")]
    return [path for _, path in sorted((int(name[1] or 1), path) for name, path in found if name)]
