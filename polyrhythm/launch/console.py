"""The console output of a run: the output of the nodes with a prefix, a progress line, a final table."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

REFRESH = 0.2  # seconds between two states of the progress line on a terminal
REPORT = 5.0  # seconds between two lines of progress in a file or a pipe


class Console:
    """Writes whole lines, and keeps the progress line below them.

    Notes and progress go to `stream`, by default standard error, and what scripts print to `output`: by
    default to the same stream, or to standard output if none is given.
    """

    def __init__(
        self, stream: IO[str] | None = None, quiet: bool = False, output: IO[str] | None = None
    ) -> None:
        self._output = output or stream or sys.stdout
        self._stream = stream or sys.stderr
        self.live = self._stream.isatty()
        self._quiet = quiet
        self._shown = ""
        # A file gets no progress of a very short run.
        self._last = 0.0 if self.live else time.monotonic()

    def line(self, text: str) -> None:
        """Writes a permanent line."""
        self._clear()
        self._stream.write(text + "\n")
        self._draw(self._shown)
        self._stream.flush()

    def print(self, text: str) -> None:
        """Writes a line that a script has printed."""
        self._clear()
        self._stream.flush()
        self._output.write(text + "\n")
        self._output.flush()
        self._draw(self._shown)
        self._stream.flush()

    def progress(self, text: str) -> None:
        """Shows the progress line, which the next call replaces."""
        now = time.monotonic()
        if self._quiet or not text or now - self._last < (REFRESH if self.live else REPORT):
            return
        self._last = now
        if self.live:
            self._clear()
            self._draw(text)
        elif text != self._shown:
            self._stream.write(text + "\n")
            self._shown = text
        self._stream.flush()

    def close(self) -> None:
        if self.live:
            self._clear()
            self._stream.flush()
        self._shown = ""

    def _draw(self, text: str) -> None:
        if self.live and text:
            self._stream.write(text[: self._width() - 3])  # a line that wraps, with ^C, cannot be cleared
            self._shown = text

    def _clear(self) -> None:
        if self.live and self._shown:
            self._stream.write("\r\x1b[K")

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


class LineStream(io.TextIOBase):
    """A text stream that passes on whole lines."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write(line)
        return len(text)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as necessary; numbers are aligned right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = [all(_numeric(row[column]) for row in rows) for column in range(len(head))]

    def show(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if side else cell.ljust(width)
            for cell, width, side in zip(cells, widths, right, strict=True)
        )  # fmt: skip
        return "  ".join(padded).rstrip()

    return "\n".join([show(lines[0]), "  ".join("─" * width for width in widths), *map(show, lines[1:])])


def _numeric(text: str) -> bool:
    return not text or text[0].isdigit() or text in ("–", "-")


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Metrics for the progress line."""
    return [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
    ]


HEAD = ("strategy", "wall time", "samples/s", "accuracy", "staleness mean", "max", "bytes sent")
SIMULATED_HEAD = (HEAD[0], "simulated time", "samples/simulated s", *HEAD[3:])


def row(summary: Mapping[str, Any]) -> list[str]:
    """A summary as a row of the table with `HEAD`."""
    accuracy = summary["metrics"].get("accuracy")
    staleness = summary["staleness"]
    return [
        summary["strategy"],
        f"{summary['wall_s']:.2f} s",
        f"{summary['samples_per_s']:,.0f}",
        f"{accuracy:.4f}" if isinstance(accuracy, float) else "–",
        f"{staleness['mean']:.2f}",
        f"{staleness['max']:.0f}",
        size(summary["bytes_sent"]),
    ]


PLACES_HEAD = ("place in the model", "computed", "waited", "bytes sent")


def place_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The places of divided models as rows of the table with `PLACES_HEAD`; [] if models are whole."""
    return [
        [str(place), f"{each['compute_s']:.3g} s", f"{each['wait_s']:.3g} s", size(each["bytes_sent"])]
        for place, each in enumerate(summary.get("places", ()))
    ]
