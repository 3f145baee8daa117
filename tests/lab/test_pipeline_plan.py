"""`polyrhythm plan`: the script stops at `prepare`, and the figures of the plan are those of its stages."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from polyrhythm.cli.entry import main
from polyrhythm.lab.plan import PipelinePlan, PlannedStage, show, verdict
from polyrhythm.lab.plan_branches import PlannedBranches, plan_branches
from polyrhythm.parallel.costs import Costs, OperationCost
from polyrhythm.parallel.example import Call
from polyrhythm.parallel.graph import capture

SCRIPT = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import polyrhythm as pr

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 2)
    def forward(self, x):
        h = self.first(x).relu()
        return self.out(self.second(h).relu() + h)

def main():
    session = pr.init()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.zeros(64)), batch_size=int(sys.argv[1]))
    session.prepare(model, optimizer, loader)
    raise SystemExit("the script went on")

if __name__ == "__main__":
    main()
"""
PARAMETERS = 4 * (8 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_plan_of_a_script(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "net.svg"
    assert main(["plan", script, "--stages", "2", "--json", "--picture", str(picture), "--", "32"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["rows"], plan["micro_batches"]) == ("Net", 32, 8)
    assert sum(stage["parameters"] for stage in plan["stages"]) == PARAMETERS
    assert [stage["first"] for stage in plan["stages"][1:]] == plan["cuts"]
    assert plan["bubble"] == 1 / 9 and plan["verdict"].startswith("do not: one process is faster")
    assert all(stage["crossing"] > 0 for stage in plan["stages"][:-1])
    drawing = ElementTree.fromstring(picture.read_text())
    texts = ["".join(each.itertext()) for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"first", "second", "out"} <= set(texts) and any(text.startswith("stage 1: ") for text in texts)
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    for shape in drawing.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = (float(shape.attrib.get(name, 0)) for name in ("x", "y"))
        assert 0 <= x <= x + float(shape.attrib["width"]) <= width
        assert 0 <= y <= y + float(shape.attrib["height"]) <= height


def test_plan_takes_the_example_of_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With as many rows as a batch has."""
    call = "session.prepare(model, optimizer, loader"
    Path(script).write_text(SCRIPT.replace(call, f"{call}, example=torch.randn(3, 8)"))
    assert main(["plan", script, "--json", "--", "16"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 16


def test_plan_cuts_where_it_is_told(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", script, "--stages", "3", "--at", "second,out", "--micro-batches", "2", "--", "8"]) == 0
    )
    text = capsys.readouterr().out
    assert "bubble           50% = (3 - 1) / (2 + 3 - 1)" in text
    lines = [line.split() for line in text.splitlines()]
    assert [line[1] for line in lines if line[:1] and line[0] in ("0", "1", "2")] == [
        "first",
        "second",
        "out",
    ]
    assert text.endswith("--workers 3 --strategy allreduce@pipeline:3,micro_batches=2,split_at=second/out\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "1"], "--stages 1: a pipeline has at least 2"),
        (["--stages", "3", "--at", "out"], "--at names 1 submodules, but 3 stages have 2 cuts"),
        (["--at", "secnd"], "no submodule 'secnd'; similar ones: second"),
        (["--stages", "40"], "cannot be cut into 40 stages"),
        (["--network", "0"], "--network 0: give the speed"),
        (["--micro-batches", "0"], "--micro-batches 0"),
    ],
)
def test_wrong_requests(
    script: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", script, *options, "--", "8"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "code", "message"),
    [
        ("session.prepare(model, optimizer, loader)", "return", 2, "never called session.prepare"),
        (
            "session.prepare(model, optimizer, loader)",
            "session.prepare(model, optimizer)",
            2,
            "prepares no loader",
        ),
        (
            "session.prepare(model,",
            "session.prepare(nn.Linear(2, 2).requires_grad_(), model,",
            2,
            "no optimizer",
        ),
        ("    model = Net()", "    model = nothing()", 1, "failed: NameError"),
        (
            "self.first(x).relu()",
            "self.first(x) * int(x.sum() > 0)",
            2,
            "Net cannot be cut into stages",
        ),
        ("torch.randn(64, 8)", "torch.randn(64, 9)", 2, "Net does not take what the loader yields"),
    ],
)
def test_scripts_that_cannot_be_planned(
    before: str, after: str, code: int, message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(script)
    assert before in SCRIPT
    path.write_text(SCRIPT.replace(before, after))
    assert main(["plan", script, "--", "8"]) == code
    assert message in capsys.readouterr().err


def stage(seconds: float, **more: Any) -> PlannedStage:
    sizes = {"parameters": 10_000, "activations": 1_000, "crossing": 100}
    given: dict[str, Any] = {**sizes, "messages": 0.0, **more}
    return PlannedStage(0, 1, "layer", seconds / 3, seconds * 2 / 3, **given)


PLAN = PipelinePlan("Net", "", 64, 8, (stage(0.01), stage(0.01)), (1,), ("out",), 0.15, 0.16, 0.09, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["cut it: 2 stages train 1.7 times as fast as one process", "up to 18.0 kB of 36.0 kB"]),
        (
            {"step": 0.3, "serial_micro": 0.3},
            [
                "do not: one process is faster",
                "8 micro-batches of 8 rows cost 2.00 times as much as a batch of 64",
            ],
        ),
        ({"step": 0.15, "cores": 1}, ["do not: one process is as fast", "2 stages share 1 cores"]),
        (
            {"step": 0.2, "stages": (stage(0.001), stage(0.02))},
            ["the slowest stage takes 1.9 times the mean"],
        ),
        (
            {"step": 0.2, "stages": (stage(0.01), stage(0.01, messages=0.01))},
            ["messages take 50% of the slowest stage"],
        ),
    ],
)
def test_the_verdict_says_why(change: dict[str, Any], words: list[str]) -> None:
    text = verdict(replace(PLAN, **change))
    assert all(part in text for part in words), text


def test_the_strategy_names_the_layers_if_they_have_names() -> None:
    assert PLAN.strategy == "allreduce@pipeline:2,split_at=out"
    assert replace(PLAN, begins=("",), micro_batches=4).strategy == "allreduce@pipeline:2,micro_batches=4"


def test_the_table_has_every_stage() -> None:
    text = show(replace(PLAN, note="captured module by module"))
    assert "captured module by module" in text and "1.67 times as fast" in text
    assert [line.split()[0] for line in text.splitlines() if "layer  " in line] == ["0", "1"]
    assert math.isclose(PLAN.bubble, 1 / 9)


def test_branches_that_pay_are_mentioned() -> None:
    for speedup, words in ((1.9, "better: "), (1.4, "or: "), (1.0, "")):
        text = show(replace(PLAN, branches=PlannedBranches(2, speedup)))
        assert ("--workers 2 --strategy allreduce@branches:2" in text) == bool(words)
        assert words in text


def test_branches_are_planned_by_measured_times() -> None:
    """Two layers side by side of a second each, a hundredth of which are messages of 1 kB at 1 MB/s."""
    model = Sides()
    call: Call = ((torch.randn(8, 32),), {})
    graph = capture(model, *call)
    seconds = [1.0 if "linear" in node.name else 0.0 for node in graph.train.operations]
    costs = Costs(tuple(OperationCost(each, 0.0) for each in seconds), (0,) * (len(seconds) + 1))
    found = plan_branches(graph, costs, call, 2, 1e-6, serial=1.0)
    assert found is not None and 1.9 < found.speedup < 2
    assert plan_branches(graph, costs, call, 3, 1e-6, serial=1.0) is None


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)
