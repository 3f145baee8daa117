"""Real training scripts, converted by three lines: alone, on two workers, and on eight simulated ones.

Each script in `examples/conversions` trains alone as plain PyTorch, then under strategies of every family. A
cell is what the script logs last, or the error that a strategy refuses it with. Workers share each epoch, so
a run takes fewer steps than the script alone and need not reach the same figure; scripts that count steps
take as many on each worker.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import apart
from benchmarks.report import Row

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "conversions"
REAL = ("allreduce", "async", "local:8", "gossip", "async+topk:0.01")
WORKERS, SIMULATED = 2, 8
# What each script logs at its end.
SCRIPTS = {
    "gan": "distance", "language_model": "loss", "vae": "loss", "time_sequence": "loss",
    "fine_tuning": "accuracy", "two_loaders": "accuracy", "endless": "accuracy", "early_stopping": "accuracy",
    "lightning_digits": "accuracy", "transformers_tokens": "eval_loss",
}  # fmt: skip


class Cell(NamedTuple):
    """What a script logged, or why it could not run."""

    value: float | None
    error: str = ""

    def __str__(self) -> str:
        return self.error if self.value is None else f"{self.value:.3f}"


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    strategies = REAL[:1] if quick else REAL
    rows, cells = [], []
    for script, metric in SCRIPTS.items():
        alone = by_itself(script, metric)
        found = {name: trained(script, metric, name, world="run") for name in strategies}
        many = {f"simulated, {name}": trained(script, metric, name, world="simulate") for name in strategies}
        cells.append([f"{script}, {metric}", alone, *found.values(), *many.values()])
        rows.append(
            Row(
                f"{script}, {metric}, alone", alone.value if alone.value is not None else float("nan"), "",
                more={name: str(cell)[:40] for name, cell in (found | many).items()},
            )
        )  # fmt: skip
    head = ["script, what it logs", "alone", *strategies, *(f"{name}, 8 simulated" for name in strategies)]
    return rows, [
        f"{WORKERS} workers, and {SIMULATED} simulated ones; one seed each",
        *_markdown(head, cells),
    ]


def by_itself(script: str, metric: str, *arguments: str) -> Cell:
    """The script as plain PyTorch."""
    command = [sys.executable, str(FOLDER / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Cell(None, done.stderr.strip().splitlines()[-1])
    return Cell(float(re.findall(rf"\b{metric} (\S+)", done.stdout)[-1]))


def trained(script: str, metric: str, strategy: str, world: str, arguments: Sequence[str] = ()) -> Cell:
    """The script under a strategy."""
    cell: Cell = apart(_trained, script, metric, strategy, world, list(arguments))
    return cell


def _trained(script: str, metric: str, strategy: str, world: str, arguments: list[str]) -> Cell:
    import polyrhythm as pr

    launch: Callable[..., Any] = pr.run if world == "run" else pr.simulate
    workers = WORKERS if world == "run" else SIMULATED
    try:
        result = launch(
            FOLDER / f"{script}.py", workers=workers, strategy=strategy, arguments=arguments, threads=1,
            runs=None,
        )  # fmt: skip
    except pr.PolyrhythmError as error:
        return Cell(None, str(error))
    return Cell(float(result["metrics"][metric]))


def _markdown(head: Sequence[str], cells: Sequence[Sequence[Any]]) -> list[str]:
    """The table as docs/results.md has it."""
    lines = [list(head), ["---"] * len(head), *([str(cell) for cell in row] for row in cells)]
    return ["| " + " | ".join(line) + " |" for line in lines]
