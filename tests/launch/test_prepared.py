"""What a strategy needs compiled is there before its workers are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.launch.quick_imports import quick_imports
from tests.support.combine import few

SCRIPT = """\
import sys
print("numba", "numba" in sys.modules, flush=True)
import torch, polyrhythm as pr
session, model = pr.init(), torch.nn.Linear(20, 5)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters()))
model(torch.ones(1, 20)).sum().backward()
optimizer.step()
"""


@few(
    "strategy, there",
    [("broadcast", True), ("allreduce", False), ("allreduce+topk", True), ("allreduce / local:2+topk", True)],
    quick=0,
)
def test_numba_is_imported_before_forking_only_if_needed(tmp_path: Path, strategy: str, there: bool) -> None:
    """By the process that all workers are forked from, and only if it is needed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "polyrhythm", "run", "train.py", "--workers=2", f"--strategy={strategy}"]
    if "/" in strategy:
        command += [f"--cluster={Path(__file__).parents[1] / 'sites.toml'}"]
    place = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": place}, cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(f"numba {there}") == 2


def test_quick_imports_leave_the_collector_as_it_was() -> None:
    """On if it was on, also after an import that fails."""
    assert gc.isenabled()
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), quick_imports():
        raise ImportError("no such module")
    assert gc.isenabled()


@pytest.mark.parametrize(("chosen", "wanted", "threads"), [("3", 0, 3), ("3", 2, 2), ("many", 0, 1)])
def test_omp_num_threads_counts_unless_threads_are_given(chosen: str, wanted: int, threads: int) -> None:
    """In a process of its own: where torch is imported there is one thread. 99 workers share the cores."""
    code = f"from polyrhythm.launch.nodes import threads_each; print(threads_each({wanted}, 99))"
    given = {**os.environ, "OMP_NUM_THREADS": chosen, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads
