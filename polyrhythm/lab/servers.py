"""`polyrhythm bench servers`: how many servers for how many workers, measured on this machine.

Every cell of workers x servers is a real run: processes, the `async` strategy, one flat parameter. A worker
sleeps for the time of a step, pushes a gradient and pulls the parameters. The result is compared with a
formula: servers stop being the bottleneck at P* = ceil(N |w| / (beta t)), where beta is the throughput of one
saturated server in bytes per second.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyrhythm.core.errors import UsageError
from polyrhythm.launch import run
from polyrhythm.launch.console import Console, size, table
from polyrhythm.launch.planning import MOST
from polyrhythm.worlds.tables import SECONDS, quantity

SIZES = {
    **{"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    **{"KiB": float(1 << 10), "MiB": float(1 << 20), "GiB": float(1 << 30)},
}
ELEMENT = 4  # bytes of a parameter
WARM_TIME, WARM_STEPS = 0.3, 3  # before measuring, because the first access to memory is slow
EXTRA_TIME = 0.1  # seconds that a worker continues to push, while others may still measure
KNEE_SHARE = 0.9  # of the best rate of a row
SATURATING_WORKERS = 4  # enough to saturate one server


def formula(workers: int, nbytes: int, beta: float, step_time: float) -> int:
    """P* = ceil(N |w| / (beta t)), the servers needed not to be the bottleneck; more than N never help."""
    return min(workers, max(1, math.ceil(workers * nbytes / (beta * step_time))))


def knee(rates: dict[int, float]) -> int:
    """The fewest servers that come close to the best rate; `rates` are by number of servers."""
    return min(servers for servers, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values()))


@dataclass(frozen=True)
class ServerSweep:
    """The measurements to take; `parse` reads the options of the command line."""

    nbytes: int = 16 << 20
    workers: tuple[int, ...] = (1, 2, 4)
    servers: tuple[int, ...] = (1, 2, 4)
    step_time: float = 0.05
    seconds: float = 2.0

    @staticmethod
    def parse(size: str, workers: str, servers: str, step_time: str, seconds: float) -> ServerSweep:
        if not 0 < seconds <= 3600:
            raise UsageError(f"--seconds {seconds:g}: must be above 0 and at most 3600")
        nbytes = int(_quantity("--size", size, SIZES)) // ELEMENT * ELEMENT
        sweep = ServerSweep(
            nbytes, _counts("--workers", workers), _counts("--servers", servers),
            _quantity("--step-time", step_time, SECONDS), seconds,
        )  # fmt: skip
        if (most := max(sweep.workers) + max(sweep.servers)) > MOST:
            raise UsageError(f"{most} processes are more than {MOST}; use fewer workers or servers")
        if (count := max(sweep.servers)) > nbytes // ELEMENT:
            raise UsageError(
                f"--size {size}: {count} servers need at least as many parameters, of {ELEMENT} bytes each"
            )
        return sweep


def _quantity(option: str, text: str, units: dict[str, float]) -> float:
    try:
        value = quantity(text, units)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None
    if value <= 0:
        raise UsageError(f"{option} {text}: must be above 0")
    return value


def _counts(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{option} {text}: must be whole numbers above 0 separated by commas, such as 1,2,4")
    return tuple(sorted({int(word) for word in words}))


@dataclass(frozen=True)
class PushLoad:
    """The script that every node runs: a worker reports how many round trips it makes per second."""

    count: int  # of parameters
    step_time: float
    seconds: float

    def __call__(self) -> None:
        import torch

        import polyrhythm as pr

        session = pr.init()
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(self.count))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = session.prepare(model, optimizer)
        model.weight.grad = torch.ones(self.count)
        opens = time.monotonic() + WARM_TIME
        steps = counted = 0
        first = last = 0.0
        while not counted or time.monotonic() < opens + self.seconds + EXTRA_TIME:
            time.sleep(self.step_time)
            optimizer.step()
            now, steps = time.monotonic(), steps + 1
            if not first and now >= opens and steps >= WARM_STEPS:
                first = now
            elif first and (not counted or now < opens + self.seconds):
                last, counted = now, counted + 1
        session.log(**{f"worker {session.rank}": counted / (last - first)})


def measure(sweep: ServerSweep, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures all cells one after the other; `say` gets a line for each."""
    total = 1 + len(sweep.workers) * len(sweep.servers)

    def cell(workers: int, servers: int, step_time: float, number: int) -> dict[str, Any]:
        load = PushLoad(sweep.nbytes // ELEMENT, step_time, sweep.seconds)
        silent = Console(io.StringIO(), quiet=True)  # it would note that the load has no data
        summary = run(load, workers=workers, servers=servers, strategy="async", runs=None, console=silent)
        rate = sum(summary["metrics"][f"worker {rank}"] for rank in range(workers))
        say(
            f"{number} of {total}: {_plural(workers, 'worker')}, {_plural(servers, 'server')}, "
            f"{1000 * step_time:g} ms a step: {_rates(rate, sweep.nbytes)}"
        )
        return {
            "workers": workers, "servers": servers, "round_trips_per_s": rate,
            "bytes_per_s": rate * sweep.nbytes,
        }  # fmt: skip

    saturated = cell(max(SATURATING_WORKERS, *sweep.workers), 1, 0.0, 1)
    cells: list[dict[str, Any]] = []
    for workers in sweep.workers:
        for servers in sweep.servers:
            each = cell(workers, servers, sweep.step_time, len(cells) + 2)
            cells.append(each | {"share": each["round_trips_per_s"] * sweep.step_time / workers})
    singles = [each["bytes_per_s"] for each in (saturated, *cells) if each["servers"] == 1]
    beta = max(singles)
    knees = []
    for workers in sweep.workers:
        rates = {each["servers"]: each["round_trips_per_s"] for each in cells if each["workers"] == workers}
        optimum = formula(workers, sweep.nbytes, beta, sweep.step_time)
        knees.append({"workers": workers, "knee": knee(rates), "formula": optimum})
    return {
        "bytes": sweep.nbytes, "step_time_s": sweep.step_time, "seconds": sweep.seconds,
        "cores": os.cpu_count(), "beta_bytes_per_s": beta, "cells": cells, "knees": knees,
    }  # fmt: skip


def show(report: dict[str, Any]) -> str:
    """The report as a table with a row for each number of workers, and an explanation."""
    servers = sorted({each["servers"] for each in report["cells"]})
    rows = []
    for each in report["knees"]:
        cells = [cell for cell in report["cells"] if cell["workers"] == each["workers"]]
        shown = [
            f"{_rates(cell['round_trips_per_s'], report['bytes'])}  {cell['share']:4.0%}" for cell in cells
        ]
        rows.append([str(each["workers"]), *shown, str(each["knee"]), str(each["formula"])])
    head = ["workers", *(_plural(count, "server") for count in servers), "knee", "P*"]
    return f"""\
{size(report["bytes"])} of parameters over shared memory; {report["cores"]} cores for all processes.
Between two pushes a worker sleeps {1000 * report["step_time_s"]:g} ms, as if it computed on its own machine.
One saturated server receives {size(report["beta_bytes_per_s"])}/s.

{table(head, rows)}

A cell: round trips and bytes pushed per second by all workers together, and their share of the rate
without any waiting. Knee: the fewest servers with {KNEE_SHARE:.0%} of the best rate of the row.
P* = ceil(workers * size / (bytes/s of one server * step time)), if every process had its own cores."""


def _rates(rate: float, nbytes: int) -> str:
    return f"{rate:.1f}/s  {size(rate * nbytes)}/s"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
