"""What all tests have in common: one thread, a check for leaks, the order of files, and a simulator."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: a forked child inherits the parent's OpenMP pool without its threads, and waits
# for them forever. A parent with one thread has no pool.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.runs import run_in

torch.set_num_threads(1)
# pytest records what is logged, and torch.export would write thousands of lines for it.
logging.getLogger("torch.__trace").setLevel(logging.CRITICAL)
gc.disable()  # until all tests are collected
# Nothing may depend on how fast the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":  # `make mutants` has a profile of its own
    settings.load_profile("patient")
# A shell that starts a command in the background lets it ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytester", "tests.support.combine", "tests.support.leaks", "tests.support.scheduling"]


def pytest_collection_finish() -> None:
    """What is there now stays until the end: collections that look through it would take most of the time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Simulates with a run folder; `cluster` is the text of a cluster file."""

    def simulated(
        program: Any,
        strategy: str,
        workers: int,
        servers: int | None = None,
        cluster: str = "",
        **options: Any,
    ) -> Any:
        return run_in(
            "simulated", program, strategy=strategy, workers=workers, servers=servers, cluster=cluster,
            runs=tmp_path, **options,
        )  # fmt: skip

    return simulated
