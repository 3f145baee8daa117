"""One way to run a program in either world."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import polyrhythm as pr
from tests.support.programs import SPEEDS

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


def run_hogwild(
    program: Callable[[], Any],
    world: str,
    workers: int,
    runs: Path,
    strategy: str | None = "hogwild",
    **options: Any,
) -> dict[str, Any]:
    """The same by HogWild!, with steps of exponential length in simulation unless a cluster is given."""
    if world == "simulated":
        options.setdefault("cluster", SPEEDS["exponential"])
    return run_in(world, program, strategy=strategy, workers=workers, runs=runs, **options)


def shorten_waits(node: Any, seconds: float) -> None:
    """From here on a wait of this real node times out after so long: the run has a long timeout to start."""
    node.transport.wait = node.transport._requests.wait = seconds
