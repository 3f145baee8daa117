"""Every strategy in both worlds. A new one joins by itself, as it is by default; rows add more."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import (
    ADAM,
    MOMENTUM,
    NESTEROV,
    SGD,
    Examples,
    Half,
    Mixed,
    Script,
    alone,
    events,
    mlp,
    normed,
    odd,
    same,
    trained,
)
from strategy_rows import ROWS, Row

import polyrhythm as pr
from polyrhythm.errors import UsageError
from polyrhythm.session import session
from polyrhythm.strategy import describe

KEYS = {
    "strategy", "workers", "servers", "wall_s", "samples_per_s", "steps", "samples", "bytes_sent",
    "compute_s", "wait_s", "staleness", "metrics", "lost", "digest",
}  # fmt: skip

LOCKSTEP = [row for row in ROWS if pr.parse(row.strategy).lockstep]
LOOSE = [row for row in ROWS if row not in LOCKSTEP]

every_row = pytest.mark.parametrize("row", ROWS, ids=str)
lockstep = pytest.mark.parametrize("row", LOCKSTEP, ids=str)
loose = pytest.mark.parametrize("row", LOOSE, ids=str)
both_worlds = pytest.mark.parametrize("world", ["simulated", "real"])


# 3 workers, batches of 4: the last round of an epoch has 2 examples, fewer than there are workers.
UNEVEN = Script(optimizer=MOMENTUM, size=50, epochs=4, shuffle=True, schedule=True, set_to_none=False)


def fitting(row: Row) -> Any:
    """An optimizer that goes with a row: DGC keeps the momentum itself."""
    return partial(torch.optim.SGD, lr=0.05) if "+dgc" in row.strategy else MOMENTUM


def go(
    row: Row, script: Any, workers: int, world: str = "simulated", runs: Path | None = None, seed: int = 0
):
    how = pr.simulate if world == "simulated" else pr.run
    if 1 < workers < row.least:
        pytest.skip(f"it needs {row.least} workers")
    if isinstance(script, Script) and "+dgc" in row.strategy:
        script = replace(script, optimizer=SGD)
    # One thread: after this process has computed with several, those it forks would wait for them forever.
    return how(
        script, workers=workers, strategy=row.strategy, servers=row.servers, runs=runs, seed=seed, threads=1,
        cluster=row.cluster,
    )  # fmt: skip


# With one worker these are another algorithm; tests/test_server_laws.py, test_outer_laws.py and
# test_broadcast_laws.py say which.
NOT_PLAIN = {
    "dana-slim", "dana-zero", "delayed-nesterov", "easgd", "ormo", "slowmo", "diloco", "streaming-diloco",
    "noloco",
    "broadcast",
}  # fmt: skip


def exact_alone(row: Row) -> None:
    """Skips a row that cannot have one worker, or is not plain PyTorch even then."""
    strategy = pr.parse(row.strategy)
    if row.cluster or getattr(strategy, "wait_for", 1) > 1 or getattr(strategy, "spare", 0):
        pytest.skip("it needs two")
    if strategy.codec is not None:
        pytest.skip("its codec rounds")
    changes = ("prefetch", "_every", "reset")
    if strategy.name in NOT_PLAIN or any(word in row.strategy for word in changes):
        pytest.skip("it is another algorithm")
    if "clip" in row.strategy:
        pytest.skip("it clips")


def takes(row: Row, script: Script) -> None:
    """Skips a row whose strategy needs another optimizer than the script has."""
    if pr.parse(row.strategy).optimizers == "SGD" and script.optimizer is ADAM:
        with pytest.raises(UsageError, match=r"needs torch\.optim\.SGD, and this script has Adam"):
            go(row, script, 2)
        pytest.skip("it needs SGD, and says so")


@pytest.fixture(scope="session")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uneven script by each row in each world, run once for all tests: its summary and what it read."""

    @cache
    def once(row: Row, world: str) -> tuple[dict[str, Any], Counter[int]]:
        folder = tmp_path_factory.mktemp("trip")
        script = Script(**{**UNEVEN.__dict__, "seen": folder / "seen"})
        summary = go(row, script, 3, world, folder)
        return summary, Counter(int(line) for line in (folder / "seen").read_text().split())

    return once


@every_row
@both_worlds
def test_it_trains(trip: Any, row: Row, world: str) -> None:
    """The loss falls, and the summary has every promised key."""
    summary, _ = trip(row, world)
    # Who does not wait may do nearly all of it while others have hardly begun, and then meets them half-way.
    chance = world == "real" and not pr.parse(row.strategy).lockstep
    assert summary["metrics"]["after"] < (0.95 if chance else 0.8) * summary["metrics"]["before"]
    assert summary.keys() >= KEYS and summary["staleness"].keys() == {"mean", "p95", "max"}
    assert summary["strategy"] == str(pr.parse(row.strategy)) and summary["lost"] == {}
    assert summary["bytes_sent"] > 0 and summary["wall_s"] > 0


@every_row
@both_worlds
def test_every_example_counts_once_per_epoch(trip: Any, row: Row, world: str) -> None:
    """Whatever the sizes, no example is dropped; what idle workers borrow at the end is not counted."""
    summary, read = trip(row, world)
    assert summary["samples"] == UNEVEN.size * UNEVEN.epochs
    assert set(read) == set(range(UNEVEN.size)) and min(read.values()) == UNEVEN.epochs
    if not pr.parse(row.strategy).lockstep:
        assert set(read.values()) == {UNEVEN.epochs}


@every_row
@both_worlds
def test_the_event_log_adds_up(trip: Any, row: Row, world: str) -> None:
    """The steps in the event log are the steps of the summary; nobody's clock runs backwards."""
    summary, _ = trip(row, world)
    steps = events(summary, "step")
    assert len(steps) == summary["steps"]
    assert sum(line["samples"] for line in steps) == summary["samples"]
    for node in {line["node"] for line in steps}:
        mine = [line for line in steps if line["node"] == node]
        assert [line["step"] for line in mine] == list(range(1, len(mine) + 1))
        assert [line["t"] for line in mine] == sorted(line["t"] for line in mine)


@every_row
@both_worlds
def test_the_consensus_loads_into_a_plain_model(trip: Any, row: Row, world: str) -> None:
    """The run leaves an ordinary state_dict, and its digest is that of the parameters in it."""
    summary, _ = trip(row, world)
    model = mlp()
    model.load_state_dict(trained(summary), strict=True)
    flat = torch.cat([value.reshape(-1) for value in model.parameters()]).detach()
    assert hashlib.sha256(flat.numpy().tobytes()).hexdigest() == summary["digest"]


@lockstep
def test_the_last_consensus_is_the_result(trip: Any, row: Row) -> None:
    """What `session.consensus()` shows after the last step is what the run brings home."""
    summary, _ = trip(row, "simulated")
    model = mlp()
    model.load_state_dict(trained(summary))
    assert Script.loss(model, Examples(UNEVEN.size)) == pytest.approx(summary["metrics"]["after"], abs=1e-6)


@lockstep
def test_the_simulator_tells_the_truth(trip: Any, row: Row) -> None:
    """A lockstep strategy gives the same bits, steps and bytes on virtual workers as on real processes."""
    simulated, _ = trip(row, "simulated")
    real, _ = trip(row, "real")
    for key in ("digest", "steps", "samples", "bytes_sent", "metrics", "staleness"):
        assert simulated[key] == real[key], key


@every_row
@both_worlds
def test_one_worker_is_plain_pytorch(row: Row, world: str, tmp_path: Path) -> None:
    """With one worker every strategy is sequential training, bit for bit."""
    exact_alone(row)
    script = Script(
        optimizer=NESTEROV, size=22, groups=True, accumulate=2, clip=0.5, schedule=True, set_to_none=False
    )
    assert same(trained(go(row, script, 1, world, tmp_path)), alone(script))


@every_row
@pytest.mark.parametrize(
    "script",
    [
        Script(optimizer=ADAM, shuffle=False, size=19),
        Script(optimizer=MOMENTUM, closure=True, schedule=True),
        Script(optimizer=MOMENTUM, model=odd, groups=True),
        Script(optimizer=NESTEROV, model=normed, clip=1.0),
        Script(optimizer=MOMENTUM, model=Mixed),
    ],
    ids=["adam", "closure", "odd", "batchnorm", "mixed"],
)
def test_one_worker_is_plain_pytorch_whatever_the_model(row: Row, script: Script, tmp_path: Path) -> None:
    """Adam, closures, BatchNorm, unused, frozen and tied parameters, groups and dtypes: no difference."""
    exact_alone(row)
    takes(row, script)
    assert same(trained(go(row, script, 1, runs=tmp_path)), alone(script))


@every_row
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("size", [1, 2, 9, 41])
def test_no_size_hangs_or_drops(row: Row, workers: int, size: int) -> None:
    """Any number of examples, fewer than workers too, is trained on to the last one."""
    summary = go(row, Script(size=size), workers)
    assert summary["samples"] == 2 * size


@every_row
@pytest.mark.parametrize(
    "script",
    [
        Script(accumulate=3, clip=0.5, schedule=True, size=50, optimizer=MOMENTUM),
        Script(closure=True, schedule=True, size=50, optimizer=ADAM),
        Script(model=odd, groups=True, optimizer=MOMENTUM, epochs=4),
        Script(model=normed, optimizer=MOMENTUM),
        Script(model=Half, optimizer=MOMENTUM),
    ],
    ids=["accumulate", "closure", "odd", "batchnorm", "mixed"],
)
def test_the_loop_goes_on_working(row: Row, script: Script, tmp_path: Path) -> None:
    """Accumulation, clipping, schedulers, closures and unusual models train under every strategy."""
    takes(row, script)
    summary = go(row, script, 3, runs=tmp_path)
    assert summary["metrics"]["after"] < summary["metrics"]["before"]
    script.model().load_state_dict(trained(summary), strict=True)


@every_row
def test_unused_and_frozen_parameters_stay(row: Row, tmp_path: Path) -> None:
    """A parameter without a gradient does not move, though momentum and weight decay would move it."""
    script = Script(model=odd, optimizer=MOMENTUM, size=50)
    with_steps = trained(go(row, script, 3, runs=tmp_path))
    before = alone(Script(model=odd, epochs=0))
    for name in with_steps:
        if name != "calls":
            stays = torch.equal(with_steps[name], before[name])
            assert stays == name.startswith(("unused", "frozen")), name


@lockstep
def test_buffers_are_those_of_worker_0(row: Row, tmp_path: Path) -> None:
    """In lockstep the BatchNorm statistics that a run brings home are worker 0's, the same in both worlds."""
    script = Script(model=normed, optimizer=fitting(row), size=50)

    def main() -> None:
        model = script()
        if (rank := session.get().rank) < 2:
            torch.save(dict(model.named_buffers()), tmp_path / f"{rank}.pt")

    found = []
    for world in ("simulated", "real"):
        state = trained(go(row, main, 3, world, tmp_path))
        first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert same({name: state[name] for name in first}, first) and not same(first, second)
        found.append(state)
    assert same(*found)


@every_row
@both_worlds
def test_state_dicts_can_be_saved(row: Row, world: str, tmp_path: Path) -> None:
    """The files that torch.save makes in a worker, and deep copies, are as large as the model, no larger."""

    def main() -> None:
        here = pr.init()
        model = mlp()
        model, optimizer = here.prepare(model, fitting(row)(model.parameters()))
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        for state in (model.state_dict(), optimizer.state_dict(), here.consensus().state_dict()):
            for value in tensors(state):
                assert value.untyped_storage().nbytes() <= 8 * count
        torch.save(copy.deepcopy([model.state_dict(), optimizer.state_dict()]), tmp_path / f"{here.rank}.pt")

    def tensors(state: Any) -> list[torch.Tensor]:
        if isinstance(state, dict | list):
            return [
                value
                for each in (state.values() if isinstance(state, dict) else state)
                for value in tensors(each)
            ]
        return [state] if isinstance(state, torch.Tensor) else []

    count = sum(parameter.numel() for parameter in mlp().parameters())
    go(row, main, 2, world)
    for rank in range(2):
        assert (tmp_path / f"{rank}.pt").stat().st_size < 8 * 8 * count
        mlp().load_state_dict(torch.load(tmp_path / f"{rank}.pt")[0], strict=True)


@every_row
@both_worlds
def test_state_dicts_are_plain(row: Row, world: str) -> None:
    """In the script the model's and optimizer's state_dict have the names and shapes of plain PyTorch."""

    def main() -> None:
        session = pr.init()
        model, plain = mlp(), mlp()
        optimizer, reference = (fitting(row)(each.parameters()) for each in (model, plain))
        model, optimizer = session.prepare(model, optimizer)
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        plain.load_state_dict(model.state_dict(), strict=True)
        plain.load_state_dict(session.consensus().state_dict(), strict=True)
        mine, theirs = optimizer.state_dict(), reference.state_dict()
        reference.load_state_dict(mine)
        assert [group.keys() for group in mine["param_groups"]] == [
            group.keys() for group in theirs["param_groups"]
        ]
        session.log(keys=" ".join(sorted(mine)))

    assert go(row, main, 2, world)["metrics"] == {"keys": "param_groups state"}


@every_row
@pytest.mark.filterwarnings("error")
def test_a_scheduler_may_be_made_before(row: Row) -> None:
    """A scheduler made before `prepare` counts the steps as well, and has nothing to complain of."""

    def main() -> None:
        session = pr.init()
        model = mlp()
        optimizer = fitting(row)(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = session.prepare(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            scheduler.step()
        session.log(lr=optimizer.param_groups[0]["lr"])

    assert go(row, main, 2)["metrics"] == {"lr": 0.00625}


@every_row
def test_one_seed_one_result(row: Row) -> None:
    """In simulation a seed decides everything: the same one gives the same bits, another one others."""
    first, again, other = (go(row, UNEVEN, 3, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first["digest"] != other["digest"]


FAILURES = """
[[hosts]]
step_time = { uniform = ["8 ms", "12 ms"] }
[[failures]]
workers = [0]
at = "45 ms"
back = "82 ms"
[[failures]]
workers = [2]
at = "63 ms"
"""


def adds_up(summary: dict[str, Any]) -> None:
    """Each push that came was applied or dropped, once; on every server versions follow each other."""
    lines = events(summary, "apply", "drop", "deliver")
    for server in {line["node"] for line in lines if line["node"].startswith("server")}:
        mine = [line for line in lines if line["node"] == server]
        pushed = [
            (line["sender"], line["sequence"])
            for line in mine
            if line["event"] == "deliver" and line["kind"] == "push"
        ]
        done = [(f"worker {line['worker']}", line["sequence"]) for line in mine if line["event"] != "deliver"]
        assert sorted(pushed) == sorted(done) and len(set(done)) == len(done)
        versions = sorted({line["version"] for line in mine if line["event"] == "apply"})
        assert versions == list(range(1, len(versions) + 1))
        assert all(line["staleness"] >= 0 for line in mine if line["event"] == "apply")


@loose
def test_workers_die_and_join_in_simulation(row: Row, tmp_path: Path) -> None:
    """One dies for good, worker 0 dies and comes back: every example is trained on, nothing counts twice."""
    (tmp_path / "cluster.toml").write_text(FAILURES)
    first, again = (
        pr.simulate(
            UNEVEN, workers=3, strategy=row.strategy, servers=row.servers, runs=tmp_path, threads=1,
            cluster=tmp_path / "cluster.toml",
        )
        for _ in range(2)
    )  # fmt: skip
    assert first["digest"] == again["digest"]
    assert set(first["lost"]) == {"worker 0", "worker 2"} and first["joined"] == 1
    assert first["samples"] >= UNEVEN.size * UNEVEN.epochs and first["batches_undone"] == 0
    assert first["metrics"]["after"] < 0.85 * first["metrics"]["before"]
    adds_up(first)


@loose
def test_workers_die_and_join_on_real_processes(trip: Any, row: Row, tmp_path: Path) -> None:
    """A worker that is killed in the middle is replaced, and the run comes to its end."""
    script = Script(**{**UNEVEN.__dict__, "kill": tmp_path / "killed", "seen": tmp_path / "seen"})
    summary = pr.run(
        script, workers=3, strategy=row.strategy, servers=row.servers, runs=tmp_path, threads=1, restarts=1
    )
    assert summary["lost"] == {"worker 1": "was killed by SIGKILL"} and summary["joined"] == 1
    read = Counter((tmp_path / "seen").read_text().split())
    assert len(read) == UNEVEN.size and min(read.values()) >= UNEVEN.epochs
    undisturbed, _ = trip(row, "simulated")
    assert summary["metrics"]["after"] < 0.9 * undisturbed["metrics"]["before"]
    adds_up(summary)


@pytest.mark.timeout(600)  # all rows, twice
def test_one_seed_one_result_in_every_process(tmp_path: Path) -> None:
    """The simulated result depends on nothing that differs between Python processes, such as hash seeds."""
    code = (
        "import json, os, torch; torch.set_num_threads(1)\n"
        "from test_conformance import ROWS, UNEVEN, go\n"
        "print(json.dumps([go(row, UNEVEN, 3)['digest'] for row in ROWS]))"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as other:
        here_too = [go(row, UNEVEN, 3)["digest"] for row in ROWS]
        assert other.stdout is not None and json.loads(other.stdout.read()) == here_too


def test_every_strategy_and_codec_has_a_row() -> None:
    """The suite covers the whole registry."""
    chosen = [level for row in ROWS for level in pr.parse(row.strategy).levels]
    assert {each.name for each in chosen} == {row.name for row in describe()}
    assert {each.codec.name for each in chosen if each.codec} == {row.name for row in describe("codec")}
