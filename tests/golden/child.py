"""The process that runs the cases: reads their names from stdin, writes a line of JSON for each to stdout.

`checks.py` starts it with an environment in which arithmetic does not depend on the processor.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import polyrhythm as pr
from polyrhythm.core.extras import missing
from polyrhythm.core.registry import parse
from polyrhythm.record.reader import read_metrics, read_rows
from tests.golden import arithmetic
from tests.golden.cases import Case, cases
from tests.golden.program import Script

HERE = Path(__file__).parent
# What an event says of the run, besides when and where it was. Messages are counted as bytes.
EVENTS = {
    "step": ("step", "samples"),
    "apply": ("worker", "version", "staleness"),
    "drop": ("worker", "version", "staleness"),
    "join": ("peer",),
    "leave": ("peer",),
}


def main() -> None:
    names = json.load(sys.stdin)
    # From here on stdout is for the results alone, whatever the runs print.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if why := missing():
        sys.exit(f"the golden file is about the compiled loops of codecs, which need {why}")
    torch.set_num_threads(1)
    arithmetic.replace()
    made = {name: version(name) for name in ("torch", "numpy", "numba")}
    made["torch"] = made["torch"].partition("+")[0]
    print(
        json.dumps({"python": ".".join(platform.python_version_tuple()[:2]), **made}),
        file=results,
        flush=True,
    )
    known = {case.name: case for case in cases()}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(json.dumps([name, _tried(known[name], Path(folder))]), file=results, flush=True)


def _tried(case: Case, folder: Path) -> dict[str, Any]:
    try:
        return result(case, folder)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def result(case: Case, folder: Path) -> dict[str, Any]:
    """Runs a case; what the golden file says of it."""
    cluster = folder / "cluster.toml"
    speeds = "shared.toml" if parse(case.strategy).traits.one_host else "uneven.toml"
    cluster.write_text(
        "\n".join((HERE / name).read_text() for name in [speeds, "failures.toml"][: 1 + case.failures])
    )
    summary = (pr.run if case.world == "real" else pr.simulate)(
        Script(case.optimizer, bool(case.batch_norm)),
        workers=case.workers, strategy=case.strategy, servers=case.servers, seed=case.seed, cluster=cluster,
        collective=case.collective, batch_norm=case.batch_norm or None, runs=folder, threads=1,
    )  # fmt: skip
    found = {
        "parameters": digest(_state(Path(summary["folder"]))),
        "loss": _short(read_metrics(summary["folder"])[-1]["loss"]),  # the last one, of any worker
        "steps": summary["steps"],
        "samples": summary["samples"],
        "bytes": summary["bytes_sent"],
    }
    if case.failures:
        found |= {"lost": len(summary["lost"]), "joined": summary["joined"]}
    if case.world == "simulated":
        found |= {"time": _short(summary["wall_s"]), "events": digest(_events(Path(summary["folder"])))}
    return found


def digest(parts: Iterator[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:16]


def _state(run: Path) -> Iterator[bytes]:
    """The final parameters and buffers."""
    for name, value in sorted(safetensors.torch.load_file(run / "consensus.safetensors").items()):
        yield f"{name} {value.dtype} {tuple(value.shape)} ".encode()
        yield value.numpy().tobytes()


def _events(run: Path) -> Iterator[bytes]:
    """Who did what when. Sorted, because the order of events at the same time means nothing."""
    told = [
        (line["t"], line["node"], line["event"], *(line.get(field) for field in EVENTS[line["event"]]))
        for line in read_rows(run, *EVENTS)
    ]
    yield from (line.encode() for line in sorted(map(repr, told)))


def _short(value: float) -> float:
    return float(f"{value:.9g}")


if __name__ == "__main__":
    main()
