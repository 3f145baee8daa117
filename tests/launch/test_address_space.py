"""Runs whose processes have a limited address space (ulimit -v)."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

SCRIPTS = Path(__file__).parents[1] / "scripts"
LARGE = SCRIPTS / "large_model.py"
MIB = 1 << 20
MODEL = 768  # MiB of the parameters of the large model


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
def test_a_model_whose_parameters_do_not_fit_one_process_trains_and_predicts_as_a_pipeline(
    tmp_path: Path,
) -> None:
    size = "import torch, polyrhythm; print(open('/proc/self/statm').read().split()[0])"
    base = int(limited(None, "-c", size).stdout) * resource.getpagesize()
    limit = base + MODEL * MIB  # the parameters would fit, and nothing else
    alone = limited(limit, LARGE)
    assert alone.returncode and "can't allocate memory" in alone.stderr
    said, there = run(limit, LARGE, "pipeline:4", tmp_path / "limited", "--workers", "4")
    assert "through sockets" in said and there["digest"]
    _, free = run(None, LARGE, "pipeline:4", tmp_path / "free", "--workers", "4")
    assert there["digest"] == free["digest"]
    _, one = run(None, LARGE, "allreduce", tmp_path / "one", "--workers", "1")
    assert difference(Path(there["folder"]), Path(one["folder"])) < 1e-12
    command = ("-m", "polyrhythm", "predict", there["folder"])
    parts = limited(limit, *command, "--workers", "4", "--split", "pipeline:4").stdout
    whole = limited(None, *command, "--workers", "1").stdout
    assert found(r"sum (\S+)", parts) == found(r"sum (\S+)", whole)


@pytest.mark.slow
def test_the_consensus_of_a_model_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        LARGE.read_text().replace("for rows, _ in loader:", "session.consensus()\n    for rows, _ in loader:")
    )
    size = "import torch, polyrhythm; print(open('/proc/self/statm').read().split()[0])"
    base = int(limited(None, "-c", size).stdout) * resource.getpagesize()
    said, there = run(base + MODEL * MIB, script, "pipeline:4", tmp_path / "runs", "--workers", "4")
    assert not there and "evaluate model(x) on all workers instead" in said


def difference(one: Path, other: Path) -> float:
    """The largest difference between the results of two runs, read tensor by tensor."""
    files = [safe_open(folder / "consensus.safetensors", "pt") for folder in (one, other)]
    with files[0] as first, files[1] as second:
        names = set(first.keys())
        assert names == set(second.keys())
        pairs = [(first.get_tensor(name), second.get_tensor(name)) for name in names]
        return max(float((a - b).abs().max()) for a, b in pairs)


def found(pattern: str, said: str) -> str:
    match = re.search(pattern, said)
    assert match is not None, said
    return match[1]
