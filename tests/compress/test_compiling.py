"""Compiled loops where things are not as they should be: no place to keep them, a numba that is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROOT = Path(__file__).parents[2]
WORK = """
import torch
from polyrhythm.compress import feedback
from polyrhythm.compress.state import CodecState
from polyrhythm.core.registry import parse_codec
for text in ("int8", "topk:0.5"):
    codec, into = parse_codec(text), torch.zeros(4)
    codec.decode(feedback.encode(codec, torch.tensor([0.0, 0.0, 127.0, -1.0]), CodecState.alone(4)), into)
    print(text, into.tolist())
"""
PREPARE = """
import sys, torch
from numba.core.dispatcher import Dispatcher
from polyrhythm.compress import feedback
from polyrhythm.compress.state import CodecState
from polyrhythm.core.codec import Reduction
from polyrhythm.core.registry import describe, parse_codec

def compiled():
    modules = [each for name, each in sorted(sys.modules.items()) if name.startswith("polyrhythm")]
    loops = {loop for module in modules for loop in vars(module).values() if isinstance(loop, Dispatcher)}
    return {(loop.__name__, signature) for loop in loops for signature in loop.signatures}

codecs = [parse_codec(row.name) for row in describe("codec")]
for dtype in (torch.float32, torch.float64):
    for codec in codecs:
        codec.prepare(dtype)
    before = compiled()
    for codec in codecs:
        if codec.reduction is not Reduction.JOINT:
            values = torch.randn(2000, dtype=dtype)
            state = CodecState.alone(2000, feedback=codec.feedback, dtype=dtype)
            code = feedback.encode(codec, values, state)
            codec.decode(code, torch.zeros_like(values))
    print(len(before) > 0, sorted(compiled() - before))
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True, text=True, timeout=300, check=False, cwd="/",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_codecs_work_without_a_writable_numba_cache(tmp_path: Path) -> None:
    """A read-only installation and no home: codecs of both kinds work all the same."""
    shutil.copytree(
        ROOT / "polyrhythm", tmp_path / "polyrhythm", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in ("kernels", "kernels/dense"):
        # A file where the cache would be: not even root can write into that.
        (tmp_path / "polyrhythm/compress" / folder / "__pycache__").write_text("")
    done = run_python(WORK, PYTHONPATH=str(tmp_path), HOME="/dev/null", XDG_CACHE_HOME="/dev/null")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["int8 [0.0, 0.0, 127.0, -1.0]", "topk:0.5 [0.0, 0.0, 127.0, -1.0]"]


@pytest.mark.slow
def test_a_numba_that_cannot_be_imported_is_shown(tmp_path: Path) -> None:
    """Sparse codecs say why they cannot work, and dense ones once why they are slow."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 1.2 or less')")
    places = os.pathsep.join(map(str, (tmp_path, ROOT)))
    sparse = run_python("from polyrhythm.compress.kernels import load; load()", PYTHONPATH=places)
    why = "numba, which is installed but cannot be imported (ImportError: Numba needs NumPy 1.2 or less)"
    assert f"UsageError: sparse codecs need {why}" in sparse.stderr
    dense = run_python(WORK.replace(', "topk:0.5"', ', "int4"'), PYTHONPATH=places)
    assert dense.returncode == 0, dense.stderr
    assert dense.stderr.count(f"quantizers are about five times slower on a CPU without {why}") == 1


@pytest.mark.slow
def test_prepare_compiles_every_loop_that_a_codec_calls() -> None:
    """So that no step waits for a compiler, and no worker compiles what its siblings compile too."""
    done = run_python(PREPARE, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True []"] * 2
