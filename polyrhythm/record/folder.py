"""The run folder: all that remains of a run.

`runs/NAME/` holds `config.json` (what was asked, seeds included), `metrics.jsonl` (what the script logged),
`events.jsonl` (who pushed what when, versions, staleness, the order of deliveries at each node, leases and
changes of membership), `summary.json` and `consensus.safetensors` (the final parameters and buffers).
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from polyrhythm.core.errors import UsageError

_json = msgspec.json.Encoder(enc_hook=float)


def name_run(strategy: str) -> str:
    """A name that sorts by time and says what ran."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in strategy).strip("-")
    return f"{datetime.now():%Y-%m-%d-%H%M%S}-{plain}"


class RunFolder:
    """Writes a run's files as it goes; after a crash everything written so far is there."""

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / name
        suffix = 1
        while True:
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:
                suffix += 1
                self.path = parent / f"{name}-{suffix}"
            except OSError as error:
                raise UsageError(
                    f"cannot make the run folder {self.path}: {error.strerror}; use --runs DIR"
                ) from None
        self._events: IO[bytes] = (self.path / "events.jsonl").open("wb")
        self._metrics: IO[bytes] = (self.path / "metrics.jsonl").open("wb")

    def config(self, config: dict[str, Any]) -> None:
        self._write("config.json", config)

    def event(self, line: dict[str, Any]) -> None:
        self._events.write(_json.encode(line) + b"\n")

    def metric(self, line: dict[str, Any]) -> None:
        self._metrics.write(_json.encode(line) + b"\n")
        self._metrics.flush()
        self._events.flush()

    def flush(self) -> None:
        self._events.flush()

    def discard(self) -> None:
        """Removes the folder of a run that never began."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def consensus(self, blob: bytes | memoryview) -> None:
        """The final parameters, already in safetensors form; in place only once whole."""
        part = self.path / "consensus.safetensors.part"
        part.write_bytes(blob)
        os.replace(part, self.path / "consensus.safetensors")

    def summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", summary)

    def close(self) -> None:
        self._events.close()
        self._metrics.close()

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.path / name).write_bytes(msgspec.json.format(_json.encode(content), indent=2) + b"\n")


def spread(counts: Counter[int]) -> dict[str, float]:
    """Mean, 95th percentile and maximum of counted whole numbers."""
    total = sum(counts.values())
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
