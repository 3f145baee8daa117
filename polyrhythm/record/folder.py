"""RunFolder: writes the files of a run.

`runs/NAME/` has `config.json` (the plan, with all seeds), `metrics.jsonl` (metrics logged by the script),
`events.jsonl.gz` (who pushed what when, versions, staleness, the order of deliveries at each node, leases and
changes of membership), `worker-0.log` and so on (what the script printed on each node), `summary.json` and
`consensus.safetensors` (the final parameters and buffers).

A folder that cannot be written never ends a run. The first error is reported in one line, and the final
parameters go elsewhere: to the working directory, the home directory or the directory for temporary files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polyrhythm.core.errors import PolyrhythmError, UsageError
from polyrhythm.core.events import Event, EventPolicy, Metrics
from polyrhythm.record.background import BackgroundWriter
from polyrhythm.record.event_buffer import BATCH, EventBuffer
from polyrhythm.record.event_file import EventFile
from polyrhythm.record.result import PARAMETERS, RunResult
from polyrhythm.record.result_file import ResultFile, open_result
from polyrhythm.record.saved_file import with_saved_file

MAX_BUFFERED = 10 * BATCH  # events; beyond this the thread that logs drains the buffer itself
METRICS = "metrics.jsonl"
T = TypeVar("T")
_json = msgspec.json.Encoder(enc_hook=float)


def name_run(strategy: str) -> str:
    """A folder name that sorts by time and contains the strategy."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in strategy).strip("-")
    return f"{datetime.now():%Y-%m-%d-%H%M%S}-{plain}"


class RunFolder:
    """Writes the files of a run. Only `consensus` and `consensus_file` raise, if no folder can be written."""

    lasting = True

    def __init__(
        self,
        parent: Path,
        name: str,
        events: EventPolicy = "all",
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        try:
            self.path = _make(parent, name)
        except OSError as error:
            raise UsageError(
                f"cannot make the run folder {parent / name}: {error.strerror}; use --runs DIR"
            ) from None
        self.fallback: Path | None = None  # the folder of the result, if this one cannot be written
        self._say = say
        self._broken = False  # nothing more can be appended
        self._buffer = EventBuffer(events)
        self._events = EventFile(self.path, events, on_limit=self._limit)
        self._limited = self._slow = False
        self._draining = threading.Lock()
        self._writer = BackgroundWriter(self._tick)
        if events != "off":
            self._append(self._events.write, b"")
        self._append(partial(self._append_to, METRICS), b"")

    # --- during the run -----------------------------------------------------------------------------

    def event(self, node: str, t: float, event: Event) -> None:
        """Records an event."""
        self._buffer.add(node, t, event)
        if len(self._buffer) >= MAX_BUFFERED:
            self._drain()
        elif len(self._buffer) >= BATCH:
            self._writer.wake()

    def lines(self, lines: bytes) -> None:
        """Records events that a node has encoded."""
        if lines and not self._broken:
            self._drain(lines)

    def metrics(self, node: str, t: float, metrics: Metrics) -> None:
        """Records metrics that the script has logged."""
        line = _json.encode({"t": t, "node": node, "step": metrics.step, **metrics.values}) + b"\n"
        write = partial(self._append_to, METRICS)
        self._writer.submit(lambda content: self._append(write, content), line)

    def output(self, node: str, line: str) -> None:
        """Records a line that the script has printed on a node, in a log of that node."""
        name = f"{node.replace(' ', '-')}.log"
        write = partial(self._append_to, name)
        self._writer.submit(lambda content: self._append(write, content), line.encode() + b"\n")

    def config(self, config: dict[str, Any]) -> None:
        """Writes the plan of the run."""
        self._write("config.json", config)

    # --- the end ------------------------------------------------------------------------------------

    def consensus(self, file: Sequence[bytes | memoryview]) -> Path:
        """Writes the final parameters, given as the parts of a file; returns its path.

        A file of that name is always complete.
        """
        return self._saved(lambda path: _write_atomically(path, file))

    def consensus_file(self, size: int) -> ResultFile:
        """A file of this size for the final parameters, which several workers write."""
        return self._saved(lambda path: open_result(path, size))

    def _saved(self, save: Callable[[Path], T]) -> T:
        """Saves a file with the final parameters in the folder, or elsewhere if that fails."""
        try:
            return save(self.path / PARAMETERS)
        except OSError as error:
            self._failed(error)
            tried = [f"{self.path} ({error.strerror or error})"]
        for parent in _fallback_folders():
            try:
                self.fallback = _make(parent, f"polyrhythm-{self.path.name}", parents=False)
                saved = save(self.fallback / PARAMETERS)
            except OSError as error:
                tried.append(f"{parent} ({error.strerror or error})")
                if self.fallback is not None:
                    shutil.rmtree(self.fallback, ignore_errors=True)
                    self.fallback = None
            else:
                self._say(f"the final parameters are in {self.fallback / PARAMETERS}")
                return saved
        raise PolyrhythmError(f"the final parameters could not be written to {', nor to '.join(tried)}")

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes the summary; returns it with the folder, and the path of parameters saved elsewhere."""
        summary, places = with_saved_file(summary), {"folder": str(self.path)}
        if self.fallback is not None:
            places["parameters"] = str(self.fallback / PARAMETERS)
        self._write("summary.json", summary | places)
        return summary | places

    def result(self, summary: dict[str, Any]) -> RunResult:
        """The result of the run, whose parts are read from the folder when they are asked for."""
        return RunResult(summary)

    def close(self) -> None:
        """Writes all remaining events and closes the files."""
        self._drain()
        if not self._writer.close():
            self._say(f"the run folder {self.path} is not complete: writing is too slow")
            return
        with contextlib.suppress(OSError):
            self._events.close()

    def discard(self) -> None:
        """Removes the folder of a run that did not start."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    # --- writing ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Runs in the writer's thread."""
        self._drain()
        if not self._broken and not self.path.is_dir():
            self._failed(FileNotFoundError(None, "it is gone"))

    def _drain(self, more: bytes = b"") -> None:
        """Schedules writing of the buffered events, and then of these lines."""
        with self._draining:
            while lines := self._buffer.take():
                self._submit(lines)
            if more:
                self._submit(more)

    def _submit(self, lines: bytes) -> None:
        if self._writer.submit(lambda content: self._append(self._events.write, content), lines):
            return
        if not self._slow:
            self._slow = True
            self._say(f"some events are not recorded: writing to {self.path} is too slow")

    def _append(self, write: Callable[[bytes], None], content: bytes) -> None:
        if self._broken:
            return
        try:
            write(content)
        except OSError as error:
            self._failed(error)

    def _append_to(self, name: str, line: bytes) -> None:
        with (self.path / name).open("ab") as file:
            file.write(line)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        text = msgspec.json.format(_json.encode(content), indent=2) + b"\n"
        for folder in (self.path, self.fallback):
            try:
                if folder is not None:
                    _write_atomically(folder / name, [text])
                    return
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        """Reports the first error; nothing more is appended to files of this folder."""
        if not self._broken:
            self._broken = True
            self._say(
                f"cannot write to the run folder {self.path}: {error.strerror or error}; training continues, "
                "and the final parameters will be saved elsewhere if necessary"
            )

    def _limit(self) -> None:
        if not self._limited:
            self._limited = True
            self._say(
                f"the event log in {self.path} has reached its limit, and the oldest events are deleted; "
                "--events sample records fewer"
            )


def _make(parent: Path, name: str, parents: bool = True) -> Path:
    """Makes a folder of this name, with a number appended if it exists already."""
    path, suffix = parent / name, 1
    while True:
        try:
            path.mkdir(parents=parents)
            return path
        except FileExistsError:
            suffix += 1
            path = parent / f"{name}-{suffix}"


def _write_atomically(path: Path, parts: Sequence[bytes | memoryview]) -> Path:
    """Writes a file under another name and renames it, so that it is always complete."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return path


def _fallback_folders() -> list[Path]:
    """Folders for the result if the run folder cannot be written."""
    places: list[Path] = []
    for place in (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, RuntimeError):
            places.append(place())
    return list(dict.fromkeys(places))
