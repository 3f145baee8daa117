"""Runs whose processes have a limited address space (ulimit -v)."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
LARGE = SCRIPTS / "large_model.py"
MIB = 1 << 20
MODEL = 256  # MiB of the parameters of the large model


def limited(limit: int | None, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with so many bytes of address space for each process."""

    def limit_self() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        [sys.executable, *map(str, command)],
        preexec_fn=limit_self,
        capture_output=True,
        text=True,
        check=False,
    )


def run(limit: int | None, script: Path, strategy: str, runs: Path, *options: str) -> tuple[str, dict]:
    """What a run has printed, and its summary."""
    command = ("-m", "polyrhythm", "run", script, "--strategy", strategy, "--runs", runs, "--threads", "1")
    done = limited(limit, *command, *options)
    found = [json.loads(path.read_text()) for path in runs.glob("*/summary.json")]
    return done.stdout + done.stderr, found[0] if done.returncode == 0 else {}


def test_a_run_under_a_limit_starts_and_trains(tmp_path: Path) -> None:
    said, summary = run(8 << 30, SCRIPTS / "small_model.py", "allreduce", tmp_path, "--workers", "2")
    assert summary["digest"] and "through sockets" in said


@pytest.mark.slow
def test_memory_that_all_workers_share_is_refused_under_a_limit(tmp_path: Path) -> None:
    said, summary = run(8 << 30, SCRIPTS / "small_model.py", "hogwild", tmp_path, "--workers", "2")
    assert not summary and "have a limited address space" in said


@pytest.mark.slow
def test_a_model_that_one_process_cannot_train_trains_as_a_pipeline(tmp_path: Path) -> None:
    size = "import torch, polyrhythm; print(open('/proc/self/statm').read().split()[0])"
    base = int(limited(None, "-c", size).stdout) * resource.getpagesize()
    limit = base + 3 * MODEL * MIB  # parameters, gradients and momentum would fit, but nothing else
    alone = limited(limit, LARGE)
    assert alone.returncode and "can't allocate memory" in alone.stderr
    said, there = run(limit, LARGE, "pipeline:4", tmp_path / "limited", "--workers", "4")
    assert "through sockets" in said
    _, free = run(None, LARGE, "pipeline:4", tmp_path / "free", "--workers", "4")
    assert there["digest"] == free["digest"] != ""
    said, there = run(base + MODEL * MIB * 3 // 2, LARGE, "pipeline:4", tmp_path / "less", "--workers", "4")
    assert not there and "gathers the whole model at the end of the run" in said
