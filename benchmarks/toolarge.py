"""A model whose parameters do not fit one process, as four stages under that limit.

The limit is that of address space (`ulimit -v`): what a process takes that has imported torch, and as much as
the parameters. One process fails under it while it builds the model. Each of the four stages has a quarter of
the model with its gradient. One process without a limit trains the same model, with one thread like each of
the stages, which share the cores of the machine.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Row

SCRIPT = Path(__file__).with_name("large_model.py")
WIDTH, LAYERS, STAGES = 2048, 48, 4
MIB = 1 << 20
IMPORTED = "import torch, polyrhythm; print(open('/proc/self/statm').read().split()[0])"


class Figures(NamedTuple):
    """Of one process, or of the stage with the most memory."""

    speed: float  # samples a second
    resident: int  # MiB
    mapped: int


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    steps = 1 if quick else 6
    parameters = LAYERS * (WIDTH + 1) * WIDTH * 4
    limit = int(_python(None, "-c", IMPORTED).stdout) * resource.getpagesize() + parameters
    options = ("--layers", str(LAYERS), "--width", str(WIDTH), "--steps", str(steps))
    failed = _python(limit, SCRIPT, *options)
    assert failed.returncode and "can't allocate memory" in failed.stderr, failed.stdout + failed.stderr
    alone = _figures(_python(None, SCRIPT, *options))
    with tempfile.TemporaryDirectory() as runs:
        command = (
            "-m",
            "polyrhythm",
            "run",
            SCRIPT,
            "--strategy",
            f"pipeline:{STAGES}",
            "--workers",
            str(STAGES),
        )
        run = _python(limit, *command, "--runs", runs, "--threads", "1", "--quiet", "--", *options)
    divided = _figures(run)
    row = Row(
        f"{parameters // MIB} MiB of parameters, processes limited to {limit // MIB} MiB: samples/s of "
        f"{STAGES} stages against one process without the limit",
        divided.speed, "/s", alone.speed, divided.speed / alone.speed,
        more={
            "peak memory of a stage": f"{divided.resident} MiB, {divided.mapped} MiB mapped",
            "of one process": f"{alone.resident} MiB, {alone.mapped} MiB mapped",
        },
    )  # fmt: skip
    return [row], [f"one process under the limit: {failed.stderr.strip().splitlines()[-1][:120]}"]


def _python(limit: int | None, *command: str | Path) -> subprocess.CompletedProcess[str]:
    def limit_self() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, preexec_fn=limit_self, capture_output=True, text=True, check=False)


def _figures(done: subprocess.CompletedProcess[str]) -> Figures:
    found = re.findall(r"figures (\S+) (\d+) (\d+)", done.stdout)
    assert done.returncode == 0 and found, done.stdout + done.stderr
    speeds, resident, mapped = zip(*found, strict=True)
    return Figures(min(map(float, speeds)), max(map(int, resident)), max(map(int, mapped)))
