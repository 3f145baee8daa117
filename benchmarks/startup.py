"""How long it takes to begin: `polyrhythm --help`, and `polyrhythm run` to the first step of 4 workers."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row, ratio

WORKERS = 4
SCRIPT = """\
import sys, time
import torch
import polyrhythm as pr

def main():
    session = pr.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.prepare(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with open(f"{sys.argv[1]}/{session.rank}", "w") as file:
        file.write(str(time.time()))

if __name__ == "__main__":
    main()
"""


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    repeats = 3 if quick else 7
    bare = [_seconds("-c", "pass") for _ in range(repeats)]
    rows = [help_text(repeats), *first_steps(("allreduce", "async", "broadcast"), repeats)]
    torch = "imports torch, which it should not" if _imports_torch() else "does not import torch"
    return rows, [f"--help {torch}; bare Python takes {statistics.median(bare):.3f} s"]


def help_text(repeats: int) -> Row:
    """The time of `polyrhythm --help`."""
    seconds = [_seconds("-m", "polyrhythm", "--help") for _ in range(repeats + 1)][1:]
    return Row("polyrhythm --help", statistics.median(seconds), "s", bar=0.3, wanted="below")


def first_steps(strategies: Sequence[str], repeats: int) -> list[Row]:
    """The time to the first step under each strategy, against `import torch`."""
    imports: list[float] = []
    runs: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for _ in range(repeats):
        imports.append(_seconds("-c", "import torch"))
        for strategy, seconds in runs.items():
            seconds.append(_first_step(strategy))
    return [
        Row(
            f"polyrhythm run -s {strategy} to the first step of {WORKERS} workers / import torch",
            statistics.median(seconds), "s", statistics.median(imports),
            ratio=ratio(seconds, imports), bar=2.5, wanted="below",
        )
        for strategy, seconds in runs.items()
    ]  # fmt: skip


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _environment() -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _call(command: Sequence[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=_environment(), cwd=folder, capture_output=True, text=True, check=True)


def _seconds(*arguments: str) -> float:
    began = time.perf_counter()
    _call(_python(*arguments))
    return time.perf_counter() - began


def _imports_torch() -> bool:
    """Whether --help does, by what Python itself says that it imports."""
    lines = _call(_python("-X", "importtime", "-m", "polyrhythm", "--help")).stderr.splitlines()
    return any(line.rpartition("|")[2].strip().split(".")[0] == "torch" for line in lines)


def _first_step(strategy: str) -> float:
    """Seconds from the command to the first step of the last worker, by the wall clock that all share."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        steps = Path(folder) / "steps"
        steps.mkdir()
        command = ["-m", "polyrhythm", "run", str(script), "--workers", str(WORKERS), "--strategy", strategy]
        began = time.time()
        _call(_python(*command, "--", str(steps)), folder)
        return max(float((steps / str(rank)).read_text()) for rank in range(WORKERS)) - began
