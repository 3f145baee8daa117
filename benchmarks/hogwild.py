"""HogWild!: time to a training loss for 1 process, 2 processes, and 2 with a lock; and the cost of density.

Logistic regression is trained in two ways. *Rows*: `SparseSGD`, with compiled steps of one row each. *PyTorch
steps*: a user's loop with `nn.EmbeddingBag(..., sparse=True)`, plain SGD and batches of 8. Synthetic rows
have 50 of 1,000,000 features. The text is lines of files on this machine, Python's own sources against
Debian's copyright notices, as hashed words and pairs of words. Dense rows have all of 2,000 features. A round
measures all systems in turn, and ratios are taken within rounds. The clock starts when all workers have
compiled, loaded and taken a step.

The cost of density: the updates that two real processes lose on one table, which are known exactly because
every update adds one, beside the counted ones; and, in simulation, how often a row changed between reading
and writing, and how many more updates eight workers need than one.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import _fork, apart
from benchmarks.report import Row, ratio
from benchmarks.sparse import Blocks, Logistic, Problem, Rows, dense, synthetic, text

ONE, TWO, LOCK, PLAIN = "1 process", "2 processes", "2 with a lock", "plain PyTorch"
SYSTEMS = {ONE: (1, "hogwild"), TWO: (2, "hogwild"), LOCK: (2, "hogwild:lock=yes")}
FASTER, FASTER_THAN_LOCKED = 1.5, 3.0
LOOK, LONGEST = 0.25, 120.0  # seconds between two evaluations of the loss, and until giving up
LOOKED_AT = 2000  # rows


@dataclass(frozen=True)
class Case:
    """A problem, and how it is trained: by compiled rows, or by steps of PyTorch."""

    way: str
    problem: Callable[[], Problem]
    barred: bool = False


def cases(quick: bool) -> list[Case]:
    """By rows one process takes about 5 seconds to the target; about one if `quick`."""
    rows, steps = functools.partial(Case, "rows"), functools.partial(Case, "PyTorch steps")
    if quick:
        return [
            rows(lambda: synthetic(200_000, 0.02, 0.15, 25_000), barred=True),
            rows(lambda: text(60_000, 0.02, 0.012, 20_000), barred=True),
            rows(lambda: dense(5_000, 0.1, 0.3, 512)),
            steps(lambda: synthetic(6_000, 0.3, 0.3, 8)),
        ]
    return [
        rows(lambda: synthetic(400_000, 0.02, 0.04, 50_000), barred=True),
        rows(lambda: text(60_000, 0.02, 0.004, 20_000), barred=True),
        rows(lambda: dense(10_000, 0.1, 0.12, 512)),
        steps(lambda: synthetic(20_000, 0.3, 0.15, 8)),
        steps(lambda: text(20_000, 0.3, 0.06, 8)),
        steps(lambda: dense(20_000, 4.0, 0.25, 8)),
    ]


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds = 1 if quick else 3
    rows, notes = [], []
    for case in cases(quick):
        problem = case.problem()
        what = f"{problem.name}, {case.way}"
        seconds, steps = _rounds(problem, case.way, rounds)
        one, two, locked = (seconds[name] for name in (ONE, TWO, LOCK))
        more = {name: _spread(seconds[name]) for name in seconds}
        bars = (FASTER, FASTER_THAN_LOCKED) if case.barred else (None, None)
        for beside, theirs, bar in ((ONE, one, bars[0]), (LOCK, locked, bars[1])):
            rows.append(
                Row(
                    f"{what}: to loss {problem.target:g} by {TWO}, beside {beside}",
                    statistics.median(two), "s", statistics.median(theirs),
                    ratio=ratio(theirs, two), bar=bar, more=more,
                )
            )  # fmt: skip
        rows.append(
            Row(
                f"{what}: updates of {TWO}, beside {ONE}", statistics.median(steps[TWO]), "",
                statistics.median(steps[ONE]), ratio=ratio(steps[TWO], steps[ONE]),
            )
        )  # fmt: skip
        each = {
            name: statistics.median(a / b for a, b in zip(seconds[name], steps[name], strict=True))
            for name in SYSTEMS
        }
        notes.append(
            f"{what}: an update every {each[ONE] * 1e6:.2f} us by {ONE}, {each[TWO] * 1e6:.2f} us by {TWO}, "
            f"{each[LOCK] * 1e6:.2f} us by {LOCK}, which one of them has at a time: two that had a core each "
            f"and shared nothing would be {2 * each[LOCK] / each[ONE]:.2f} times as fast as with it"
        )
    rows += _density(quick)
    rows += apart(_simulated, quick)
    notes += [
        f"{rounds} rounds on {os.cpu_count()} cores; theirs, in the first rows, is what stands beside",
        "lost: of every million updates of a row by two processes, as the sums tell (ours) and as they are "
        "counted beside the updates (theirs)",
        "simulated: 8 workers with exponential times of a step; conflicts: rows changed by another between "
        f"reading and writing (theirs: {MANY - 1} d / (1 + {MANY - 1} d), for d the density)",
    ]
    return rows, notes


def _spread(values: list[float]) -> str:
    return f"{min(values):.1f} – {max(values):.1f} s"


# --- real processes ---------------------------------------------------------------------------------


class Meeting:
    """Shared by the workers of one measurement. It is made before they are forked."""

    def __init__(self, workers: int) -> None:
        self.barrier = _fork.Barrier(workers)
        self.over = _fork.RawValue("b", 0)


def _rounds(problem: Problem, way: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and updates to the target, by system and round."""
    names = [*SYSTEMS] if way == "rows" or rounds == 1 else [*SYSTEMS, PLAIN]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            workers, strategy = SYSTEMS.get(name, (1, ""))
            with tempfile.TemporaryDirectory() as folder:
                meeting = Meeting(workers)
                apart(_launch, problem, way, workers, strategy, meeting, Path(folder))
                found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
            seconds[name].append(min(each["seconds"] for each in found))
            steps[name].append(sum(each["steps"] for each in found))
    return seconds, steps


def _launch(problem: Problem, way: str, workers: int, strategy: str, meeting: Meeting, folder: Path) -> None:
    program = functools.partial(_train, problem, way, meeting, folder)
    if not strategy:
        program()
        return
    from polyrhythm.launch import run

    run(program, workers=workers, strategy=strategy, threads=1, runs=None)


def _train(problem: Problem, way: str, meeting: Meeting, folder: Path) -> None:
    """A user's script, in which the first worker also evaluates the loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr

    torch.set_num_threads(1)
    session = pr.init()
    by_rows = way == "rows"
    data = Rows(problem, long=not by_rows)
    model: nn.Module
    if problem.values is not None and not by_rows:
        model = nn.Linear(problem.features, 1)
    else:
        model = nn.EmbeddingBag(problem.features, 1, mode="sum", sparse=True)
        nn.init.zeros_(model.weight)
    optimizer: Any
    loader: Any
    if by_rows:
        optimizer = pr.SparseSGD(model.parameters(), lr=0.0)
        batches = Blocks(len(problem), problem.batch)
        loader = DataLoader(data, batch_sampler=batches, collate_fn=lambda batch: batch)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(data, batch_size=problem.batch, shuffle=True, collate_fn=lambda batch: batch)
    model, optimizer, loader = session.prepare(model, optimizer, loader)

    def forward(words: Any, offsets: Any, values: Any) -> Any:
        if isinstance(model, nn.Linear):
            return model(values)[:, 0]
        return model(words, offsets)[:, 0] if values is None else values @ model.weight[:, 0]

    def step(words: Any, offsets: Any, labels: Any, values: Any) -> None:
        if by_rows:
            optimizer.learn(words, offsets, labels, values)
            return
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(forward(words, offsets, values), labels).backward()
        optimizer.step()

    def look() -> float:
        losses = []
        with torch.no_grad():
            for some in looked_at:
                words, offsets, labels, values = data.__getitems__(some)
                losses.append(F.binary_cross_entropy_with_logits(forward(words, offsets, values), labels))
        return torch.stack(losses).mean().item()

    # In pieces of as many rows as a batch has: there are no more dense words.
    size = min(problem.batch, LOOKED_AT)
    looked_at = [range(start, start + size) for start in range(0, LOOKED_AT - size + 1, size)]
    step(*data.__getitems__(range(min(len(problem), problem.batch))))  # compiles the loop, at rate 0
    optimizer.param_groups[0]["lr"] = problem.lr
    look()
    meeting.barrier.wait()
    began = looked = time.perf_counter()
    steps = 0
    while not meeting.over.value:
        for batch in loader:
            step(*batch)
            steps += len(batch[2]) if by_rows else 1
            now = time.perf_counter()
            if session.rank == 0 and now - looked > LOOK:
                loss = look()
                if now - began > LONGEST:
                    raise RuntimeError(f"{problem.name}: the loss is {loss:.3f} after {LONGEST} s")
                meeting.over.value = loss < problem.target
                looked = time.perf_counter()
            if meeting.over.value:
                break
    ended = time.perf_counter() - began
    (folder / f"{session.rank}.json").write_text(json.dumps({"seconds": ended, "steps": steps}))


# --- density ----------------------------------------------------------------------------------------

TABLE = 1 << 16
DENSITIES = (1 / 4096, 1 / 256, 1 / 16, 1.0)


def _density(quick: bool) -> list[Row]:
    """The updates that two processes lose on one table, of which each touches a part at a time."""
    rows = []
    for density in DENSITIES[1::2] if quick else DENSITIES:
        true, counted = apart(_lose, density, 1.0 if quick else 6.0)
        rows.append(
            Row(f"lost of a million updates, density {_share(density)}", 1e6 * true, "", 1e6 * counted)
        )
    return rows


def _share(density: float) -> str:
    return "1" if density == 1 else f"1/{round(1 / density)}"


def _lose(density: float, seconds: float) -> tuple[float, float]:
    """The share of lost updates: the true one, and the counted one."""
    import safetensors.torch

    from polyrhythm.launch import run

    with tempfile.TemporaryDirectory() as folder:
        meeting = Meeting(2)
        program = functools.partial(_add_ones, density, seconds, meeting, Path(folder))
        summary = run(program, workers=2, strategy="hogwild", threads=1, runs=folder)
        table = safetensors.torch.load_file(Path(summary["folder"]) / "consensus.safetensors")["weight"]
        made = sum(int((Path(folder) / f"{rank}.made").read_text()) for rank in range(2))
    return 1 - table.double().sum().item() / made, summary["lost_updates"]["share"]


def _add_ones(density: float, seconds: float, meeting: Meeting, folder: Path) -> None:
    """Each step adds one to every row that it touches, exactly: a lower sum means lost updates."""
    import torch
    from torch import nn

    import polyrhythm as pr

    session = pr.init()
    touched = round(TABLE * density)
    model = nn.Embedding(TABLE, 1, sparse=density < 1)
    nn.init.zeros_(model.weight)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    ones = -torch.ones(TABLE, 1)
    meeting.barrier.wait()
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        optimizer.zero_grad()
        if density < 1:
            (-model(torch.randint(TABLE, (touched,)))).sum().backward()
        else:
            model.weight.grad = ones
        optimizer.step()
        steps += 1
    (folder / f"{session.rank}.made").write_text(str(steps * touched))


# --- simulated --------------------------------------------------------------------------------------

MANY = 8
CLUSTER = '[[hosts]]\nstep_time = { exponential = "10 ms" }\n'


def _simulated(quick: bool) -> list[Row]:
    import torch

    from polyrhythm.launch import simulate

    torch.set_num_threads(1)
    rows, seeds = [], range(2 if quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(CLUSTER)

        def updates(script: Logistic, workers: int, seed: int) -> Logistic:
            simulate(script, workers=workers, strategy="hogwild", threads=1, seed=seed, cluster=cluster)
            return script

        shapes = ((1000, 5, 2.0), (200, 5, 2.0), (40, 5, 1.0), (40, 20, 0.5))
        for features, touched, lr in shapes[::3] if quick else shapes:
            many = [updates(Logistic(seed, features, touched, lr), MANY, seed) for seed in seeds]
            one = [updates(Logistic(seed, features, touched, lr), 1, seed) for seed in seeds]
            density = touched / features
            conflicts = sum(each.conflicts for each in many) / sum(each.touches for each in many)
            what = f"simulated, density {_share(density)}"
            formula = (MANY - 1) * density / (1 + (MANY - 1) * density)
            rows.append(Row(f"{what}: conflicts", 100 * conflicts, "%", 100 * formula))
            ours, theirs = (statistics.mean(each.reached for each in runs) for runs in (many, one))
            rows.append(
                Row(f"{what}: updates of {MANY} workers, beside 1", ours, "", theirs, ratio=ours / theirs)
            )
    return rows
