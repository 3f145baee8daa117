"""RunMemory: keeps the result of a run without a folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, BinaryIO

from polyrhythm.core.events import Event, Metrics
from polyrhythm.record.result import RunResult
from polyrhythm.record.result_file import ResultFile
from polyrhythm.record.saved_file import with_saved_file


class RunMemory:
    """The metrics and the final parameters of a run, in memory. Events are not kept."""

    lasting = False

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._file = b""

    def event(self, node: str, t: float, event: Event) -> None:
        pass

    def lines(self, lines: bytes) -> None:
        pass

    def metrics(self, node: str, t: float, metrics: Metrics) -> None:
        """Keeps metrics that the script has logged."""
        self._rows.append({"t": t, "node": node, "step": metrics.step, **metrics.values})

    def output(self, node: str, line: str) -> None:
        pass

    def config(self, config: dict[str, Any]) -> None:
        pass

    def consensus(self, file: Sequence[bytes | memoryview]) -> None:
        """Keeps the final parameters, given as the parts of a file."""
        self._file = b"".join(file)

    def consensus_file(self, size: int) -> ResultFile:
        """The final parameters, which several workers write."""

        def keep(file: BinaryIO) -> None:
            file.seek(0)
            self._file = file.read()

        return ResultFile(io.BytesIO(), size, keep)

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        return with_saved_file(summary)

    def result(self, summary: dict[str, Any]) -> RunResult:
        """The result of the run."""
        return RunResult(summary, self._rows, self._file)

    def close(self) -> None:
        pass

    def discard(self) -> None:
        pass
