"""The first loop that a run compiles is announced in one line; loops that were compiled before are not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

import polyrhythm as pr
from polyrhythm.core.compiling import compiled
from tests.support.runs import WORLDS, run_in

NOTE = "compiling loops with numba, once on this machine: this can take half a minute"


def main() -> None:
    """Every worker compiles loops of its own, or loads them if another run has compiled them."""
    session, model = pr.init(), torch.nn.Linear(1, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loops = importlib.import_module(f"loops_of_{session.rank}")
    assert compiled(loops.double)(21) == 42
    assert compiled(loops.half)(84) == 42


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_says_once_that_it_compiles(
    world: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for rank in range(2):
        monkeypatch.delitem(sys.modules, f"loops_of_{rank}", raising=False)
        text = "def double(n):\n    return 2 * n\n\ndef half(n):\n    return n // 2\n"
        (tmp_path / f"loops_of_{rank}.py").write_text(text)
    for times in (1, 0, 1):
        run_in(world, main, workers=2)
        assert capfd.readouterr().err.count(NOTE) == times
        if not times:  # this run has found all loops in the cache; the next one has to compile again
            for path in tmp_path.rglob("*.nb[ic]"):
                path.unlink()
