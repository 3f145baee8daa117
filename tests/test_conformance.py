"""Every strategy in both worlds. A new one joins by itself, as it is by default; rows add more."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import polyrhythm as pr
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe
from polyrhythm.session.context import session
from tests.support.programs import (
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
from tests.support.rows import CODED, DEFAULTS, ROWS, Row
from tests.support.runs import WORLDS, run_in
from tests.support.saving import Stopping

KEYS = {
    "strategy", "workers", "servers", "wall_s", "samples_per_s", "steps", "samples", "bytes_sent",
    "compute_s", "wait_s", "staleness", "metrics", "lost", "digest",
}  # fmt: skip
# With one worker these are another algorithm; the files of laws say which.
NOT_PLAIN = {
    "dana-slim", "dana-zero", "delayed-nesterov", "easgd", "ormo", "slowmo", "diloco", "streaming-diloco",
    "noloco", "broadcast", "bmuf",
}  # fmt: skip


def lockstep(row: Row) -> bool:
    return pr.parse(row.strategy).traits.lockstep


def takes_adam(row: Row) -> bool:
    return pr.parse(row.strategy).traits.optimizer != "SGD" and "+dgc" not in row.strategy


def is_plain_alone(row: Row) -> bool:
    """True if one worker can run this row, and then trains as plain PyTorch does."""
    strategy = pr.parse(row.strategy)
    if row.cluster or getattr(strategy, "wait_for", 1) > 1 or getattr(strategy, "spare", 0):
        return False  # it needs two workers
    changes = ("prefetch", "_every", "reset", "clip")
    return (
        strategy.codec is None
        and strategy.name not in NOT_PLAIN
        and not any(word in row.strategy for word in changes)
    )


FAMILIES = ("allreduce", "async", "local", "gossip", "hogwild")
# The rows that the quick suite runs in full; the others it runs in simulation, with a few of the tests.
# Sizes, buffers, killed processes and processes that hash differently are tested with the defaults only.
QUICK = {*DEFAULTS, *(row for row in ROWS if row.strategy.startswith("allreduce+") and not row.cluster)}


def rows(chosen: Iterable[Row], quick: Container[Row] = QUICK) -> pytest.MarkDecorator:
    """Parametrizes a test with rows, of which those that are not quick are marked slow."""
    return pytest.mark.parametrize("row", [_param(row, row in quick) for row in chosen])


def rows_in_both_worlds(chosen: Iterable[Row]) -> pytest.MarkDecorator:
    """The same in each world. In simulation all rows are quick, on real processes the defaults."""
    places = [(world, row) for row in chosen for world in WORLDS]
    return pytest.mark.parametrize(
        ("world", "row"),
        [_param(row, world == "simulated" or row in DEFAULTS, world) for world, row in places],
    )


def _param(row: Row, quick: bool, *world: str) -> Any:
    return pytest.param(*world, row, id="-".join([*world, str(row)]), marks=() if quick else pytest.mark.slow)


# 3 workers, batches of 4: the last round of an epoch has 2 examples, fewer than there are workers.
UNEVEN = Script(optimizer=MOMENTUM, size=50, epochs=4, shuffle=True, schedule=True, set_to_none=False)


def optimizer_for(row: Row) -> Any:
    """An optimizer that this row takes: DGC keeps the momentum itself."""
    return partial(torch.optim.SGD, lr=0.05) if "+dgc" in row.strategy else MOMENTUM


def train(
    row: Row, script: Any, workers: int, world: str = "simulated", runs: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    if isinstance(script, Script) and "+dgc" in row.strategy:
        script = replace(script, optimizer=SGD)
    return run_in(
        world, script, strategy=row.strategy, workers=workers, servers=row.servers, runs=runs, seed=seed,
        cluster=row.cluster,
    )  # fmt: skip


@pytest.fixture(scope="session")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The uneven script by each row in each world, run once for all tests: its summary and what it read."""

    @cache
    def once(row: Row, world: str) -> tuple[dict[str, Any], Counter[int]]:
        folder = tmp_path_factory.mktemp("trip")
        script = replace(UNEVEN, seen=folder / "seen")
        summary = train(row, script, 3, world, folder)
        return summary, Counter(int(line) for line in (folder / "seen").read_text().split())

    return once


@rows_in_both_worlds(ROWS)
def test_every_strategy_trains_and_fills_the_summary(trip: Any, row: Row, world: str) -> None:
    """The loss falls, and the summary has every promised key."""
    summary, _ = trip(row, world)
    # Who does not wait may do nearly all of it while others have hardly begun, and then meets them half-way.
    chance = world == "real" and not lockstep(row)
    assert summary["metrics"]["after"] < (0.95 if chance else 0.8) * summary["metrics"]["before"]
    assert summary.keys() >= KEYS and summary["staleness"].keys() == {"mean", "p95", "max"}
    assert summary["strategy"] == str(pr.parse(row.strategy)) and summary["lost"] == {}
    assert summary["bytes_sent"] > 0 and summary["wall_s"] > 0


@rows_in_both_worlds(ROWS)
def test_every_example_counts_once_per_epoch(trip: Any, row: Row, world: str) -> None:
    """Whatever the sizes, no example is dropped; what idle workers borrow at the end is not counted."""
    summary, read = trip(row, world)
    assert summary["samples"] == UNEVEN.size * UNEVEN.epochs
    assert set(read) == set(range(UNEVEN.size)) and min(read.values()) == UNEVEN.epochs
    if not lockstep(row):
        assert set(read.values()) == {UNEVEN.epochs}


@rows_in_both_worlds(ROWS)
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


@rows_in_both_worlds(ROWS)
def test_the_consensus_loads_into_a_plain_model(trip: Any, row: Row, world: str) -> None:
    """The run leaves an ordinary state_dict, and its digest is that of the parameters in it."""
    summary, _ = trip(row, world)
    model = mlp()
    model.load_state_dict(trained(summary), strict=True)
    flat = torch.cat([value.reshape(-1) for value in model.parameters()]).detach()
    assert hashlib.sha256(flat.numpy().tobytes()).hexdigest() == summary["digest"]


@rows((each for each in ROWS if lockstep(each) or not pr.parse(each.strategy).traits.uses_servers), ROWS)
def test_the_last_consensus_is_the_result(trip: Any, row: Row) -> None:
    """What `session.consensus()` shows after the last step is what the run brings home."""
    summary, _ = trip(row, "simulated")
    model = mlp()
    model.load_state_dict(trained(summary))
    assert Script.loss(model, Examples(UNEVEN.size)) == pytest.approx(summary["metrics"]["after"], abs=1e-6)


@rows(filter(lockstep, ROWS))
def test_lockstep_strategies_give_the_same_bits_simulated_and_real(trip: Any, row: Row) -> None:
    """A lockstep strategy gives the same bits, steps and bytes on virtual workers as on real processes."""
    simulated, _ = trip(row, "simulated")
    real, _ = trip(row, "real")
    for key in ("digest", "steps", "samples", "bytes_sent", "metrics", "staleness"):
        assert simulated[key] == real[key], key


@rows_in_both_worlds(filter(is_plain_alone, ROWS))
def test_one_worker_is_plain_pytorch(row: Row, world: str, tmp_path: Path) -> None:
    """With one worker every strategy is sequential training, bit for bit."""
    script = Script(
        optimizer=NESTEROV, size=22, groups=True, accumulate=2, clip=0.5, schedule=True, set_to_none=False
    )
    assert same(trained(train(row, script, 1, world, tmp_path)), alone(script))


ALONE = {
    "adam": Script(optimizer=ADAM, shuffle=False, size=19),
    "closure": Script(optimizer=MOMENTUM, closure=True, schedule=True),
    "odd": Script(optimizer=MOMENTUM, model=odd, groups=True),
    "batchnorm": Script(optimizer=NESTEROV, model=normed, clip=1.0),
    "mixed": Script(optimizer=MOMENTUM, model=Mixed),
}


@rows(filter(is_plain_alone, ROWS))
def test_one_worker_is_plain_pytorch_whatever_the_model(row: Row, tmp_path: Path) -> None:
    """Adam, closures, BatchNorm, unused, frozen and tied parameters, groups and dtypes: no difference."""
    for name, script in ALONE.items():
        if name != "adam" or takes_adam(row):
            assert same(trained(train(row, script, 1, runs=tmp_path)), alone(script)), name


@rows(row for row in ROWS if pr.parse(row.strategy).traits.optimizer == "SGD")
def test_a_strategy_that_needs_sgd_refuses_adam(row: Row) -> None:
    with pytest.raises(UsageError, match=r"needs torch\.optim\.SGD, but this script uses Adam"):
        train(row, Script(optimizer=ADAM), 2)


@rows(DEFAULTS)
def test_every_strategy_trains_on_any_number_of_examples(row: Row) -> None:
    """Any number of examples, fewer than workers too, is trained on to the last one."""
    for workers, size in ((2, 1), (5, 2), (2, 9), (5, 41)):
        summary = train(row, Script(size=size), max(workers, row.least))
        assert summary["samples"] == 2 * size, (workers, size)


LOOPS = {
    "accumulate": Script(accumulate=3, clip=0.5, schedule=True, size=50, optimizer=MOMENTUM),
    "closure": Script(closure=True, schedule=True, size=50, optimizer=ADAM),
    "odd": Script(model=odd, groups=True, optimizer=MOMENTUM, epochs=4),
    "batchnorm": Script(model=normed, optimizer=MOMENTUM),
    "mixed": Script(model=Half, optimizer=MOMENTUM),
}


def rows_and_loops() -> Iterator[Any]:
    """Each default row with all loops, two of them quick, and each other row with one, in turn."""
    for turn, row in enumerate(ROWS):
        for place, loop in enumerate(LOOPS):
            distance = (place - 2 * turn) % len(LOOPS)
            if row in DEFAULTS or distance == 0:
                quick = row in DEFAULTS and distance < 2
                yield pytest.param(row, loop, id=f"{loop}-{row}", marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("row", "loop"), [*rows_and_loops()])
def test_every_strategy_trains_with_unusual_loops_and_models(row: Row, loop: str, tmp_path: Path) -> None:
    """Accumulation, clipping, schedulers, closures and unusual models train under every strategy."""
    script = LOOPS[loop]
    if script.optimizer is ADAM and not takes_adam(row):
        script = replace(script, optimizer=MOMENTUM)
    summary = train(row, script, 3, runs=tmp_path)
    assert summary["metrics"]["after"] < summary["metrics"]["before"]
    script.model().load_state_dict(trained(summary), strict=True)


@rows((*DEFAULTS, *CODED), DEFAULTS)
def test_parameters_without_a_gradient_do_not_move(row: Row, tmp_path: Path) -> None:
    """Though momentum and weight decay would move them."""
    script = Script(model=odd, optimizer=MOMENTUM, size=50)
    after, before = trained(train(row, script, 3, runs=tmp_path)), alone(replace(script, epochs=0))
    stayed = {name for name in after if torch.equal(after[name], before[name])}
    assert stayed - {"calls"} == {name for name in after if name.startswith(("unused", "frozen"))}


@rows(
    filter(lockstep, DEFAULTS),
    [row for row in DEFAULTS if row.strategy in ("allreduce", "local", "sync", "gossip")],
)
def test_buffers_are_those_of_worker_0(row: Row, tmp_path: Path) -> None:
    """In lockstep the BatchNorm statistics that a run brings home are worker 0's, the same in both worlds."""
    script = Script(model=normed, optimizer=optimizer_for(row), size=50)

    def main() -> None:
        model = script()
        if (rank := session.get().rank) < 2:
            torch.save(dict(model.named_buffers()), tmp_path / f"{rank}.pt")

    found = []
    for world in ("simulated", "real"):
        state = trained(train(row, main, 3, world, tmp_path))
        first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert same({name: state[name] for name in first}, first) and not same(first, second)
        found.append(state)
    assert same(*found)


@pytest.mark.parametrize(
    ("world", "row"),
    [
        *(_param(row, True, "simulated") for row in ROWS),
        *(_param(row, row.strategy in FAMILIES, "real") for row in DEFAULTS),
    ],
)
def test_state_dicts_are_plain_and_small(row: Row, world: str, tmp_path: Path) -> None:
    """In a script the states have the names and shapes of plain PyTorch, and load into a plain model.

    What torch.save writes of them, and of deep copies, is as large as the model, no larger.
    """
    count = sum(parameter.numel() for parameter in mlp().parameters())

    def main() -> None:
        here = pr.init()
        model, plain = mlp(), mlp()
        optimizer, reference = (optimizer_for(row)(each.parameters()) for each in (model, plain))
        model, optimizer = here.prepare(model, optimizer)
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        states = model.state_dict(), optimizer.state_dict(), here.consensus().state_dict()
        for value in tensors(states):
            assert value.untyped_storage().nbytes() <= 8 * count
        torch.save(copy.deepcopy(states), tmp_path / f"{here.rank}.pt")
        plain.load_state_dict(states[0], strict=True)
        plain.load_state_dict(states[2], strict=True)
        theirs = reference.state_dict()
        reference.load_state_dict(states[1])
        assert [group.keys() for group in states[1]["param_groups"]] == [
            group.keys() for group in theirs["param_groups"]
        ]
        here.log(keys=" ".join(sorted(states[1])))

    def tensors(state: Any) -> Iterator[torch.Tensor]:
        if isinstance(state, torch.Tensor):
            yield state
        elif isinstance(state, dict | list | tuple):
            for each in state.values() if isinstance(state, dict) else state:
                yield from tensors(each)

    workers = max(2, row.least)
    assert train(row, main, workers, world)["metrics"] == {"keys": "param_groups state"}
    for rank in range(workers):
        assert (tmp_path / f"{rank}.pt").stat().st_size < 12 * 8 * count
        mlp().load_state_dict(torch.load(tmp_path / f"{rank}.pt")[0], strict=True)


@rows(ROWS, ROWS)
@pytest.mark.filterwarnings("error")
def test_a_scheduler_may_be_made_before_prepare(row: Row) -> None:
    """A scheduler made before `prepare` counts the steps as well, and does not warn."""

    def main() -> None:
        session = pr.init()
        model = mlp()
        optimizer = optimizer_for(row)(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = session.prepare(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            scheduler.step()
        session.log(lr=optimizer.param_groups[0]["lr"])

    assert train(row, main, max(2, row.least))["metrics"] == {"lr": 0.00625}


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[Callable[[Row], list[dict[str, Any]]]]:
    """Simulates the uneven script by a row, twice, in a Python process that hashes strings differently."""
    code = (
        "import json, sys\n"
        "import tests.conftest  # one thread, as here\n"
        "from tests.support.rows import Row\n"
        "from tests.test_conformance import UNEVEN, train\n"
        "for line in sys.stdin:\n"
        "    row = Row(*json.loads(line))\n"
        "    print(json.dumps([train(row, UNEVEN, 3).summary for _ in range(2)]), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as other:

        def request(row: Row) -> list[dict[str, Any]]:
            other.stdin.write(json.dumps(list(row)) + "\n")
            other.stdin.flush()
            return json.loads(other.stdout.readline())

        yield request
        other.stdin.close()


@rows(DEFAULTS, ())
def test_one_seed_one_result(trip: Any, elsewhere: Any, row: Row) -> None:
    """In simulation a seed decides everything: in every process, and however often the row was run there."""
    here = trip(row, "simulated")[0].summary
    for there in elsewhere(row):
        differs = {key for key in here | there if here.get(key) != there.get(key)}
        assert differs <= {"folder"}
    assert train(row, UNEVEN, 3, seed=6)["digest"] != here["digest"]


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


@rows((row for row in ROWS if not lockstep(row)), DEFAULTS)
def test_workers_die_and_join_in_simulation(row: Row, tmp_path: Path) -> None:
    """One dies for good, worker 0 dies and comes back: every example is trained on, nothing counts twice."""
    first, again = (
        run_in(
            "simulated",
            UNEVEN,
            strategy=row.strategy,
            workers=3,
            servers=row.servers,
            runs=tmp_path,
            cluster=FAILURES,
        )
        for _ in range(2)
    )
    assert first["digest"] == again["digest"]
    assert set(first["lost"]) == {"worker 0", "worker 2"} and first["joined"] == 1
    assert first["samples"] >= UNEVEN.size * UNEVEN.epochs and first["batches_undone"] == 0
    assert first["metrics"]["after"] < 0.85 * first["metrics"]["before"]
    adds_up(first)


@rows(row for row in DEFAULTS if not lockstep(row))
def test_workers_die_and_join_on_real_processes(trip: Any, row: Row, tmp_path: Path) -> None:
    """A worker that is killed in the middle is replaced, and the run comes to its end."""
    script = replace(UNEVEN, kills={1: 3}, pause=0.01, seen=tmp_path / "seen")
    summary = run_in(
        "real", script, strategy=row.strategy, workers=3, servers=row.servers, runs=tmp_path, restarts=1
    )
    assert summary["lost"] == {"worker 1": "was killed by SIGKILL"} and summary["joined"] == 1
    read = Counter((tmp_path / "seen").read_text().split())
    assert len(read) == UNEVEN.size and min(read.values()) >= UNEVEN.epochs
    undisturbed, _ = trip(row, "simulated")
    assert summary["metrics"]["after"] < 0.9 * undisturbed["metrics"]["before"]
    adds_up(summary)


def test_every_strategy_and_codec_has_a_row() -> None:
    """The suite covers the whole registry."""
    chosen = [level for row in ROWS for level in pr.parse(row.strategy).parts]
    assert {each.name for each in chosen} == {row.name for row in describe()} | {"bmuf"}
    codecs = {each.codec.name for each in chosen if each.codec}
    assert codecs == {row.name for row in describe("codec")} | {"turns"}


# --- stop and resume --------------------------------------------------------------------------------

STEPS = 13  # no multiple of any period above


def arbitrary_step(row: Row) -> int:
    """A step to stop at, another for every row, but the same in every run of the tests."""
    return 1 + int.from_bytes(hashlib.sha256(str(row).encode()).digest()[:4], "little") % (STEPS - 1)


@rows(ROWS)
def test_every_strategy_resumes_from_its_saved_state(row: Row, tmp_path: Path) -> None:
    """Saved at an arbitrary step, also in the middle of a round, a run resumes to the same bits."""
    stop = arbitrary_step(row)

    def digest(begin: int) -> Any:
        script = Stopping(tmp_path, begin, stop, STEPS, optimizer_for(row))
        return train(row, script, max(3, row.least))["digest"]

    assert digest(0) == digest(stop), f"stopped after step {stop}"


SPLIT = [row._replace(strategy=f"{row.strategy}@pipeline:2") for row in (*DEFAULTS, *CODED)]
QUICK_SPLIT = [row for row in SPLIT if row.strategy in ("local:8@pipeline:2", "ssp:1+qsgd@pipeline:2")]


@rows((row for row in SPLIT if not row.cluster), QUICK_SPLIT)
def test_every_strategy_resumes_on_divided_models(row: Row, tmp_path: Path) -> None:
    """Each worker saves the whole model and its own session, which has what its stage needs."""
    stop = arbitrary_step(row)

    def digest(begin: int) -> Any:
        script = Stopping(tmp_path, begin, stop, STEPS, optimizer_for(row))
        return train(row, script, 2 * max(2, row.least))["digest"]

    assert digest(0) == digest(stop), f"stopped after step {stop}"
