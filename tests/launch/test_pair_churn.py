"""Workers of which some are killed while they exchange with each other, on real processes."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.launch.console import Console
from polyrhythm.session.seeds import mix
from tests.support.combine import each_value, few
from tests.support.planes import layers, slopes
from tests.support.programs import FEATURES, Script, distance, events, mlp, trained
from tests.support.runs import run_in

EXAMPLES, EPOCHS = 240, 4


def wide() -> torch.nn.Module:
    """Large enough that an answer is given beside the thread that listens."""
    layers = torch.nn.Linear(FEATURES, 40_000), torch.nn.Tanh(), torch.nn.Linear(40_000, 3)
    return torch.nn.Sequential(*layers).double()


def run_with_kills(
    folder: Path,
    strategy: str,
    kills: dict[int, int],
    restarts: int,
    *,
    large: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Four workers, some of which kill themselves in the step that `kills` names. The others learn on."""
    script = Script(
        model=wide if large else mlp, optimizer=partial(torch.optim.SGD, lr=0.001 if large else 0.1),
        size=EXAMPLES, epochs=EPOCHS, shuffle=True, kills=kills, pause=0.005,
    )  # fmt: skip
    summary = run_in(
        "real", script, strategy=strategy, workers=4, restarts=restarts, runs=folder, timeout=30.0, **options
    )
    assert set(summary["lost"]) == {f"worker {rank}" for rank in kills}
    assert summary["joined"] == min(restarts, len(kills))
    assert summary["metrics"]["after"] < 0.8 * summary["metrics"]["before"]
    assert all(bool(value.isfinite().all()) for value in trained(summary).values())
    return summary


@each_value(("strategy", ["adpsgd", "push:1", "noloco:3"]), ("rank", [0, 1]), ("restarts", [0, 1]))
def test_pairwise_strategies_continue_after_one_of_four_workers_is_killed(
    tmp_path: Path, strategy: str, rank: int, restarts: int
) -> None:
    """The others continue, and its replacement soon takes part."""
    summary = run_with_kills(tmp_path, strategy, {rank: 7}, restarts)
    if not pr.parse(strategy).traits.lockstep:
        assert summary["samples"] >= EXAMPLES * EPOCHS and summary["batches_undone"] == 0


@pytest.mark.parametrize("strategy", ["adpsgd", "push:1", "noloco:3"])
def test_pairwise_strategies_replace_a_killed_worker_over_tcp(tmp_path: Path, strategy: str) -> None:
    run_with_kills(tmp_path, strategy, {1: 7}, 1, listen="tcp:127.0.0.1:0")


@few("strategy", ["adpsgd", "push", "noloco:3"], quick=0)
def test_pairwise_strategies_survive_a_kill_with_large_models_over_tcp(tmp_path: Path, strategy: str) -> None:
    """More than a connection takes at once: they are given beside the thread that listens."""
    run_with_kills(tmp_path, strategy, {2: 5}, 1, large=True, listen="tcp:127.0.0.1:0")


@few("strategy", ["adpsgd", "push", "noloco:3"], quick=1)
def test_pairwise_strategies_replace_two_workers_killed_at_once(tmp_path: Path, strategy: str) -> None:
    run_with_kills(tmp_path, strategy, {0: 6, 1: 6}, 2)


@few("strategy", ["adpsgd", "push", "noloco:3"], quick=1)
def test_pairwise_strategies_finish_with_one_surviving_worker(tmp_path: Path, strategy: str) -> None:
    run_with_kills(tmp_path, strategy, {0: 5, 1: 9, 3: 14}, 0)


def load_until_the_other_trains(folder: Path) -> None:
    """Workers 1 and 0 die. The replacement of 1 joins before 0 dies, and prepares after that of 0 trains."""

    def await_file(name: str) -> None:
        deadline = time.monotonic() + 60
        while not (folder / name).exists():
            assert time.monotonic() < deadline, f"{name!r} did not happen"
            time.sleep(0.002)

    session = pr.init()
    mine = session.rank, session._node.incarnation
    if mine == (1, 1):
        (folder / "1 has joined").touch()
        await_file("0 trains")
    model = mlp()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(10):
        if mine == (1, 0) and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if mine == (0, 0) and step == 4:
            await_file("1 has joined")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(1, FEATURES, dtype=torch.float64)).sum().backward()
        optimizer.step()
        if mine == (0, 1):
            (folder / "0 trains").touch()
    if mine in ((2, 0), (3, 0)):  # there must be something left to do for the replacements
        await_file("0 trains")


@pytest.mark.parametrize("strategy", ["adpsgd", "noloco:3", "push:1"])
def test_a_replacement_does_not_wait_for_another_that_still_loads(tmp_path: Path, strategy: str) -> None:
    summary = pr.run(
        partial(load_until_the_other_trains, tmp_path), workers=4, strategy=strategy, threads=1, restarts=2,
        runs=tmp_path, timeout=30.0, console=Console(io.StringIO(), quiet=True),
    )  # fmt: skip
    assert summary["joined"] == 2 and set(summary["lost"]) == {"worker 0", "worker 1"}


def downhill(count: int) -> None:
    """Steps down a plane, while the connections to other workers are cut again and again."""
    session = pr.init()
    node: Any = session._node
    node._base = 1 << 62  # no tensor is in shared memory, so all travel in full, as between hosts
    model = layers()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    done = threading.Event()

    def cut() -> None:
        while not done.wait(0.01):
            for channel in list(node.transport._receiver.connections):
                if channel.peer.role == "worker":
                    channel.close()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for step in range(1, count + 1):
            optimizer.zero_grad()
            parts = zip(model.parameters(), slopes(session.rank, step, model), strict=True)
            sum((parameter * slope).sum() for parameter, slope in parts).backward()
            optimizer.step()
            time.sleep(0.002)
    finally:
        done.set()
        thread.join()


@few("strategy", ["adpsgd", "push", "push:2", "gossip", "gossip:exponential", "choco:0.5+topk:0.3"], quick=0)
def test_broken_connections_lose_and_double_nothing(tmp_path: Path, strategy: str) -> None:
    """The mean has moved by the updates of all, though answers were lost on their way and asked for again."""
    summary = pr.run(
        partial(downhill, 150), workers=4, strategy=strategy, threads=1, listen="tcp:127.0.0.1:0",
        runs=tmp_path, timeout=60.0, console=Console(io.StringIO(), quiet=True),
    )  # fmt: skip
    heard = Counter((line["node"], line["sender"], line["sequence"]) for line in events(summary, "deliver"))
    assert max(heard.values()) > 1
    torch.manual_seed(mix("model", 0))
    model = layers()
    expected = {name: value.clone() for name, value in model.named_parameters()}
    for rank in range(4):
        for step in range(1, 151):
            for value, slope in zip(expected.values(), slopes(rank, step, model), strict=True):
                value.data.sub_(slope, alpha=0.5 / 4)
    assert distance(trained(summary), {name: value.detach() for name, value in expected.items()}) < 1e-12
