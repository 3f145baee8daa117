"""RunResult: what `pr.run` and `pr.simulate` return."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import polyrhythm as pr
from tests.support.programs import Script, mlp, same
from tests.support.runs import WORLDS, run_in


@pytest.mark.parametrize("world", WORLDS)
def test_result_has_summary_metrics_and_model_with_and_without_a_folder(world: str, tmp_path: Path) -> None:
    """Without a folder the result is the same; fields of the summary are attributes and items."""
    kept = run_in(world, Script(), workers=2, runs=tmp_path, name="it")
    alone = run_in(world, Script(), workers=2)
    assert isinstance(kept, pr.RunResult) and kept.folder == tmp_path / "it" and alone.folder is None
    assert kept == json.loads((tmp_path / "it" / "summary.json").read_text())
    assert kept.digest == kept["digest"] == alone.digest and kept.ended == "finished"
    for result in (kept, alone):
        assert len(result.metrics) == 2 * 2 and {row["node"] for row in result.metrics} == {
            "worker 0",
            "worker 1",
        }
        assert result.metrics[-1]["after"] == result["metrics"]["after"]
    assert same(kept.model_state(), alone.model_state())
    assert same(dict(kept.load_into(mlp()).state_dict()), kept.model_state())
    with pytest.raises(AttributeError, match="a run has no 'accuracy'; its summary has strategy, "):
        _ = kept.accuracy
    assert all(value.dtype == torch.float64 for value in alone.model_state().values())
