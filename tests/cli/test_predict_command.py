"""`polyrhythm predict`: what a run has trained predicts the same from its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import polyrhythm as pr
from polyrhythm.cli.entry import main
from polyrhythm.core.plan import Plan
from polyrhythm.launch.api import Output, simulate_plan
from polyrhythm.launch.program import Program
from tests.support.combine import few

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "predict.py")
Say = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and what that has predicted after its training."""
    folder = tmp_path_factory.mktemp("predict")
    where = ["--runs", str(folder), "--name", "done", "--threads", "1", "--batch-norm", "mean"]
    assert main(["run", SCRIPT, "-s", "local:3", *where, "--", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture
def predict(runs: Path, capfd: pytest.CaptureFixture[str]) -> Say:
    """Calls the command; returns its exit code, and what it says."""

    def call(run: str, *arguments: object) -> tuple[int, str]:
        code = main(["predict", str(runs / run), *map(str, arguments)])
        return code, capfd.readouterr().err

    return call


def trained(runs: Path) -> Tensor:
    found: Tensor = torch.load(runs / "trained.pt", weights_only=True)
    return found


@few(
    "options",
    [("--split", "pipeline:2"), ("-n", "3"), ("--split", "pipeline:2", "-n", "4"), ("-n", "1")],
    quick=1,
)
def test_a_saved_run_predicts_what_the_run_did(
    options: tuple[str, ...], runs: Path, predict: Say, tmp_path: Path
) -> None:
    """The script and its arguments are those of the run."""
    file = tmp_path / "outputs.safetensors"
    code, said = predict("done", *options, "--threads", 1, "-o", file)
    assert code == 0, said
    assert "107 examples in 11 batches" in said
    assert torch.equal(safetensors.torch.load_file(file)["output"], trained(runs))
    assert torch.equal(torch.load(runs / "predicted.pt", weights_only=True), trained(runs))
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
def test_the_others_do_the_batches_of_a_worker_that_dies(runs: Path, predict: Say, tmp_path: Path) -> None:
    file = tmp_path / "outputs.safetensors"
    script = ["--mistake", "die", "--folder", tmp_path]
    code, said = predict("done", SCRIPT, "-n", 3, "--threads", 1, "-o", file, "--", *script)
    assert code == 0, said
    assert "worker 1 ended with exit code 9" in said
    assert torch.equal(safetensors.torch.load_file(file)["output"], trained(runs))


TRAINS = "here the script trains: put its training under if not session.predicting:"
MISTAKES = [
    (["--mistake", "loop"], TRAINS),
    (["--mistake", "step"], TRAINS),
    (["--mistake", "never"], r"the script never called session.predict\(loader\)"),
    (["--mistake", "twice"], "--output writes the outputs of one call .*, and the script calls it again"),
    (["--mistake", "stream"], "--output writes .*takes each batch by itself with stream=True"),
    (["--width", "9"], r"0.0.weight, 0.0.bias, 0.1.weight and 9 more differ, .* \[8, 8\] there"),
    (["--layers", "3"], "it has no 2.0.weight, 2.0.bias, 2.1.weight and 4 more; build the model of the run"),
    (["--layers", "1"], "which has no 1.0.bias, 1.0.weight, 1.1.bias and 4 more; build the model of the run"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, why", MISTAKES)
def test_wrong_scripts_get_one_line(arguments: list[str], why: str, runs: Path, tmp_path: Path) -> None:
    model, file = runs / "done" / "consensus.safetensors", tmp_path / "outputs"
    plan = Plan("allreduce", 1, predicts_with=str(model), predictions=str(file), world="simulate")
    with pytest.raises(pr.UsageError, match=why):
        simulate_plan(Program(SCRIPT, arguments), plan, Output())


def test_wrong_runs_get_one_line(runs: Path, predict: Say, tmp_path: Path) -> None:
    assert predict("none")[1].endswith("runs/NAME\n")
    assert predict("")[0] == 2  # a folder that is no run
    unfinished = runs / "unfinished"
    unfinished.mkdir(exist_ok=True)
    config = (runs / "done" / "config.json").read_bytes()
    (unfinished / "config.json").write_bytes(config)
    assert "has no consensus.safetensors: it is still running, or was killed" in predict("unfinished")[1]
    failed = {"ended": "failed", "error": "worker 1 failed: ValueError"}
    (unfinished / "summary.json").write_text(json.dumps(failed))
    assert "it ended with: worker 1 failed: ValueError; give the folder" in predict("unfinished")[1]
    (unfinished / "consensus.safetensors").write_bytes(b"nothing of the kind")
    code, said = predict("unfinished", "-n", 1)
    assert code == 2
    assert "is failed: this is the model as far as it was trained" in said
    assert "cannot read" in said
    assert "there is no such folder" in predict("done", "-o", tmp_path / "none" / "outputs")[1]
    assert "there is no script nothing.py" in predict("done", "nothing.py")[1]
    assert "pipelin" in predict("done", "--split", "pipelin:2")[1]
    assert "3 is no multiple of 2: use 2 or 4 workers" in predict("done", "--split", "pipeline:2", "-n", 3)[1]
