"""One way to run a program in either world."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import polyrhythm as pr

World = Literal["simulated", "real"]
WORLDS: tuple[World, ...] = ("simulated", "real")


def run_in(
    world: str,
    program: Callable[[], Any],
    *,
    strategy: str | None = "allreduce",
    workers: int = 3,
    cluster: str | Path | None = None,
    runs: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains `program` in one world and returns the run's summary.

    `cluster` is a path, or the text of a cluster file. `runs` is the folder for the run folder; without it
    nothing is written. Workers have one thread: after this process has computed with several, those that
    it forks would wait for them forever.
    """
    options = {"threads": 1, **options}
    how = {"simulated": pr.simulate, "real": pr.run}[world]
    if not isinstance(cluster, str):
        return how(program, strategy=strategy, workers=workers, cluster=cluster, runs=runs, **options)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(cluster)
        file.flush()
        path = Path(file.name)
        return how(program, strategy=strategy, workers=workers, cluster=path, runs=runs, **options)
