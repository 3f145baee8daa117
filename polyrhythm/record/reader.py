"""Reads run folders: events, typed or as dictionaries, and metrics.

>>> for record in read_events("runs/it", Applied):        # doctest: +SKIP
...     print(record.t, record.node, record.event.staleness)
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.events import VERSION, Event, EventHeader, Record, kind
from polyrhythm.record.event_file import event_files

_decoder = msgspec.json.Decoder(Record)


def read_events(folder: str | Path, *kinds: type[Event]) -> Iterator[Record]:
    """The events of a run in the order of the log; only of these kinds, if given.

    Events of one node are in order. Those of different nodes are not sorted by time.
    """
    files = event_files(Path(folder))
    if not files and not Path(folder).is_dir():
        raise UsageError(f"there is no folder {folder}; give the folder of a run, such as runs/NAME")
    if not files:
        raise UsageError(f"there is no event log in {folder}; was the run made with --events off?")
    for path in files:
        lines = _lines(path)
        header = next(lines, b"")
        _check(path, header)
        for number, line in enumerate(lines, 2):
            try:
                record = _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise PolyrhythmError(f"{path}, line {number} is not an event: {error}") from None
            if not kinds or isinstance(record.event, kinds):
                yield record


def read_rows(folder: str | Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The events of a run as dictionaries: `t`, `node`, `event` (its kind, such as "apply"), its fields."""
    for record in read_events(folder):
        if not kinds or kind(record.event) in kinds:
            yield as_row(record)


def as_row(record: Record) -> dict[str, Any]:
    """An event as a dictionary; fields without a value are left out."""
    fields = msgspec.structs.asdict(record.event)
    known = {name: value for name, value in fields.items() if value is not None}
    return {"t": record.t, "node": record.node, "event": kind(record.event), **known}


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The metrics that the script has logged, with `t`, `node` and `step`."""
    lines = (Path(folder) / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, which may end anywhere if its writer was killed."""
    try:
        with gzip.open(path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except EOFError:
        return
    except (OSError, zlib.error) as error:
        raise PolyrhythmError(f"cannot read {path}: {error}") from None


def _check(path: Path, line: bytes) -> None:
    try:
        header = msgspec.json.decode(line, type=EventHeader)
    except msgspec.MsgspecError:
        raise PolyrhythmError(f"{path} is not an event log: its first line is {line[:40]!r}") from None
    if header.version != VERSION:
        raise PolyrhythmError(
            f"{path} has version {header.version} of the event format, but this polyrhythm reads {VERSION}"
        )
