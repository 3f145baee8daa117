"""Workers without a server on real processes: neighbours that are killed, and others in their place."""

from __future__ import annotations

import io
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.launch.screen import Screen
from tests.support.combine import each_value
from tests.support.programs import Examples, Script, events, mlp, trained

EPOCHS = 6
FAMILY = ["gossip", "gossip:torus,order=step-then-mix", "choco:0.5,topology=complete+topk:0.3"]


def train(kills: dict[int, int], pause: float) -> None:
    """A worker kills itself in the step that `kills` names, in its first life."""
    here = pr.init()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    examples = Examples(96)
    model, optimizer, loader = here.prepare(model, optimizer, DataLoader(examples, batch_size=4))
    here.log(before=Script.loss(here.consensus(), examples))
    for _ in range(EPOCHS):
        for x, y in loader:
            time.sleep(pause)
            if not here._node.life and kills.get(here.rank) == here._replica.steps:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    here.log(after=Script.loss(here.consensus(), examples))


def run(folder: Path, strategy: str, kills: dict[int, int], **more: Any) -> dict[str, Any]:
    return pr.run(
        partial(train, kills, more.pop("pause", 0.02)), workers=4, strategy=strategy, runs=folder, threads=1,
        timeout=30.0, screen=Screen(io.StringIO(), quiet=True), **more,
    )  # fmt: skip


@each_value(("strategy, victim", [("gossip", 0), *((each, 2) for each in FAMILY)]), ("restarts", [0, 1]))
def test_a_neighbour_is_killed(tmp_path: Path, strategy: str, restarts: int, victim: int) -> None:
    """The three others go on, with another in its place or without, and what they agree on is trained."""
    summary = run(tmp_path, strategy, {victim: 5}, restarts=restarts)
    assert summary["lost"] == {f"worker {victim}": "was killed by SIGKILL"}
    assert summary["joined"] == restarts
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]
    mlp().load_state_dict(trained(summary), strict=True)


@pytest.mark.parametrize("strategy", FAMILY)
def test_over_tcp(tmp_path: Path, strategy: str) -> None:
    """Without shared memory it is the same; undisturbed, to the last bit."""
    plain, tcp = (run(tmp_path, strategy, {}, pause=0.0, listen=how) for how in ("unix:", "tcp:127.0.0.1:0"))
    assert plain["digest"] == tcp["digest"]
    summary = run(tmp_path, strategy, {1: 3}, restarts=1, listen="tcp:127.0.0.1:0")
    assert summary["joined"] == 1 and summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]


@pytest.mark.parametrize("strategy", FAMILY)
def test_all_but_one_are_killed(tmp_path: Path, strategy: str) -> None:
    """The last one has no neighbours, and trains on alone."""
    summary = run(tmp_path, strategy, {0: 3, 1: 9, 3: 9})
    assert set(summary["lost"]) == {"worker 0", "worker 1", "worker 3"}
    assert {line["node"] for line in events(summary, "step")} >= {"worker 2"}
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]
