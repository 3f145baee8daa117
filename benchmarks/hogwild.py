"""HogWild!: time to a training loss for 1 process, 2 processes, and 2 with a lock; what density costs.

Logistic regression by a user's loop: `nn.EmbeddingBag` with sparse=True, plain SGD, batches of 8. Synthetic
rows have 50 of 1,000,000 features; the text is lines of files on this machine, Python's own sources against
Debian's copyright notices, as hashed words and pairs of words. A round takes all systems one after the other,
and ratios are within rounds. Then density: what two real processes lose on one table, which is known exactly
where every update adds one, beside what is counted; and in simulation, exactly, how often a row was changed
between reading and writing, and how many updates more than one worker eight need.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import statistics
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.processes import _fork, apart
from benchmarks.report import Row, ratio

if TYPE_CHECKING:
    from torch import Tensor

FEATURES, TOUCHED, BATCH = 1_000_000, 50, 8
HASHED = 1 << 20
ONE, TWO, LOCK, PLAIN = "1 process", "2 processes", "2 with a lock", "plain PyTorch"
SYSTEMS = {ONE: (1, "hogwild"), TWO: (2, "hogwild"), LOCK: (2, "hogwild:lock=yes")}
FASTER, FASTER_THAN_LOCKED = 1.5, 3.0
LOOK, LONGEST = 0.1, 120.0  # seconds between two looks at the loss, and until it is given up

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """Rows of features, end to end, with where each begins; labels; and how it is trained to which loss."""

    name: str
    features: int
    words: Array
    starts: Array
    labels: Array
    lr: float
    target: float
    dense: bool = False  # then `words` are the numbers of a matrix

    def __len__(self) -> int:
        return len(self.labels)


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rounds, size = (1, 6_000) if quick else (3, 20_000)
    rows, notes = [], []
    for problem in (synthetic(size), text(size), dense(size)):
        seconds, steps = _rounds(problem, rounds)
        one, two, locked = (seconds[name] for name in (ONE, TWO, LOCK))
        more = {name: _spread(seconds[name]) for name in seconds}
        bars = (None, None) if problem.dense else (FASTER, FASTER_THAN_LOCKED)
        for beside, theirs, bar in ((ONE, one, bars[0]), (LOCK, locked, bars[1])):
            rows.append(
                Row(
                    f"{problem.name}: to loss {problem.target:g} by {TWO}, beside {beside}",
                    statistics.median(two), "s", statistics.median(theirs),
                    ratio=ratio(theirs, two), bar=bar, more=more,
                )
            )  # fmt: skip
        rows.append(
            Row(
                f"{problem.name}: updates of {TWO}, beside {ONE}", statistics.median(steps[TWO]), "",
                statistics.median(steps[ONE]), ratio=ratio(steps[TWO], steps[ONE]),
            )
        )  # fmt: skip
        cost = statistics.median(a / b for a, b in zip(seconds[ONE], steps[ONE], strict=True))
        turn = statistics.median(a / b for a, b in zip(seconds[LOCK], steps[LOCK], strict=True))
        notes.append(
            f"{problem.name}: a step of {ONE} takes {cost * 1e6:.0f} us, and under the lock, which one of "
            f"two has at a time, one is done every {turn * 1e6:.0f} us: without it two could be "
            f"{2 * turn / cost:.2f} times as fast, if they had a core each and shared nothing"
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


# --- what is trained --------------------------------------------------------------------------------


def synthetic(rows: int) -> Problem:
    """50 features of a million in each row, some more often than others; the label depends on all of them."""
    random = np.random.default_rng(0)
    words = (FEATURES * random.random((rows, TOUCHED)) ** 2).astype(np.int64)
    truth = random.normal(size=FEATURES)
    chance = 1 / (1 + np.exp(-4 * truth[words].sum(1) / math.sqrt(TOUCHED)))
    labels = (random.random(rows) < chance).astype(np.float32)
    return Problem(
        "synthetic", FEATURES, words.reshape(-1), np.arange(0, rows * TOUCHED + 1, TOUCHED), labels, 0.3, 0.15
    )


def dense(rows: int, features: int = 2000) -> Problem:
    """Every feature in every row: where HogWild! is not at home."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, features)).astype(np.float32) / np.float32(math.sqrt(features))
    labels = (x @ random.normal(size=features).astype(np.float32) > 0).astype(np.float32)
    return Problem("dense", features, x, np.arange(0), labels, 4.0, 0.25, dense=True)


def text(rows: int) -> Problem:
    """Lines of two kinds of file: is it Python, or a copyright notice?"""
    kinds = {
        "Python's own sources": sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")),
        "/usr/share/doc/*/copyright": sorted(Path("/usr/share/doc").glob("*/copyright")),
    }
    lines: list[tuple[list[int], int]] = []
    for label, (what, files) in enumerate(kinds.items()):
        some = list(itertools.islice(_lines(files), 50 * rows))
        if len(some) < rows // 2:
            raise RuntimeError(
                f"the text is made of files on this machine, and {what} has {len(some)} lines of 3 words; "
                f"{rows // 2} are needed (on Debian and its relatives they are there)"
            )
        lines += [(line, label) for line in some[:: len(some) // (rows // 2)][: rows // 2]]
    lengths = [len(words) for words, _ in lines]
    words = np.array([word for words, _ in lines for word in words], np.int64)
    labels = np.array([label for _, label in lines], np.float32)
    return Problem("text", HASHED, words, np.concatenate([[0], np.cumsum(lengths)]), labels, 0.3, 0.06)


def _lines(files: list[Path]) -> Iterator[list[int]]:
    """Each line with three words or more, as the hashes of its words and of pairs of them."""
    for file in files:
        for line in file.read_text(errors="replace").splitlines():
            words = line.lower().split()[:40]
            if len(words) >= 3:
                pairs = (f"{one} {other}" for one, other in itertools.pairwise(words))
                yield [zlib.crc32(word.encode()) % HASHED for word in (*words, *pairs)]


# --- real processes ---------------------------------------------------------------------------------


class Meeting:
    """What the workers of one measurement share. It is made before they are forked."""

    def __init__(self, workers: int) -> None:
        self.barrier = _fork.Barrier(workers)
        self.over = _fork.RawValue("b", 0)


def _rounds(problem: Problem, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and steps to the target, by system and round."""
    seconds: dict[str, list[float]] = {name: [] for name in (*SYSTEMS, PLAIN)}
    steps: dict[str, list[float]] = {name: [] for name in (*SYSTEMS, PLAIN)}
    for number in range(rounds):
        names = list(seconds)
        for name in names if number % 2 == 0 else reversed(names):
            workers, strategy = SYSTEMS.get(name, (1, ""))
            with tempfile.TemporaryDirectory() as folder:
                meeting = Meeting(workers)
                apart(_launch, problem, workers, strategy, meeting, Path(folder))
                found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
            seconds[name].append(min(each["seconds"] for each in found))
            steps[name].append(sum(each["steps"] for each in found))
    return seconds, steps


def _launch(problem: Problem, workers: int, strategy: str, meeting: Meeting, folder: Path) -> None:
    program = functools.partial(_train, problem, meeting, folder)
    if not strategy:
        program()
        return
    from polyrhythm.launch import run

    run(program, workers=workers, strategy=strategy, threads=1, runs=None)


def _train(problem: Problem, meeting: Meeting, folder: Path) -> None:
    """A user's script, but for the first worker's looks at the loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import polyrhythm as pr

    torch.set_num_threads(1)
    session = pr.init()
    model: nn.Module
    if problem.dense:
        model = nn.Linear(problem.features, 1)
    else:
        model = nn.EmbeddingBag(problem.features, 1, mode="sum", sparse=True)
        nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr)
    loader = DataLoader(Rows(problem), batch_size=BATCH, shuffle=True, collate_fn=lambda batch: batch)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    *some, labels = Rows(problem).__getitems__(list(range(0, len(problem), 10)))
    meeting.barrier.wait()
    began = looked = time.perf_counter()
    steps = 0
    while not meeting.over.value:
        for *x, y in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(*x)[:, 0], y).backward()
            optimizer.step()
            steps += 1
            now = time.perf_counter()
            if session.rank == 0 and now - looked > LOOK:
                with torch.no_grad():
                    loss = F.binary_cross_entropy_with_logits(model(*some)[:, 0], labels).item()
                if now - began > LONGEST:
                    raise RuntimeError(f"{problem.name}: the loss is {loss:.3f} after {LONGEST} s")
                meeting.over.value = loss < problem.target
                looked = time.perf_counter()
            if meeting.over.value:
                break
    ended = time.perf_counter() - began
    told = {"seconds": ended, "steps": steps}
    (folder / f"{session.rank}.json").write_text(json.dumps(told))


class Rows:
    """The rows of a problem, by whole batches."""

    def __init__(self, problem: Problem) -> None:
        import torch

        self.words, self.labels = torch.from_numpy(problem.words), torch.from_numpy(problem.labels)
        self.starts, self.dense = problem.starts.tolist(), problem.dense
        self.fixed = None if problem.dense else _same(problem)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indexes: list[int]) -> tuple[Tensor, ...]:
        """What the model takes, and the labels."""
        import torch

        if self.dense:
            return self.words[indexes], self.labels[indexes]
        if self.fixed:
            return self.words.view(-1, self.fixed)[indexes], self.labels[indexes]
        parts = [self.words[self.starts[index] : self.starts[index + 1]] for index in indexes]
        offsets = [0, *itertools.accumulate(len(part) for part in parts[:-1])]
        return torch.cat(parts), torch.tensor(offsets), self.labels[indexes]


def _same(problem: Problem) -> int | None:
    """How long all rows are, if all are equally long."""
    lengths = set(np.diff(problem.starts).tolist())
    return lengths.pop() if len(lengths) == 1 else None


# --- density ----------------------------------------------------------------------------------------

TABLE = 1 << 16
DENSITIES = (1 / 4096, 1 / 256, 1 / 16, 1.0)


def _density(quick: bool) -> list[Row]:
    """What two processes lose on one table of which each touches a part at a time."""
    rows = []
    for density in DENSITIES:
        true, counted = apart(_lose, density, 2.0 if quick else 6.0)
        rows.append(
            Row(f"lost of a million updates, density {_share(density)}", 1e6 * true, "", 1e6 * counted)
        )
    return rows


def _share(density: float) -> str:
    return "1" if density == 1 else f"1/{round(1 / density)}"


def _lose(density: float, seconds: float) -> tuple[float, float]:
    """The share of updates that is lost, truly and as it is counted."""
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
    """Each step adds one to every row that it touches, which is exact: what is missing was lost."""
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

        def updates(script: _Logistic, workers: int, seed: int) -> _Logistic:
            simulate(script, workers=workers, strategy="hogwild", threads=1, seed=seed, cluster=cluster)
            return script

        for features, touched, lr in ((1000, 5, 2.0), (200, 5, 2.0), (40, 5, 1.0), (40, 20, 0.5)):
            many = [updates(_Logistic(seed, features, touched, lr), MANY, seed) for seed in seeds]
            one = [updates(_Logistic(seed, features, touched, lr), 1, seed) for seed in seeds]
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


@dataclass
class _Logistic:
    """Logistic regression to a loss of 0.3, on 400 rows. Workers are in one process: they can be watched."""

    seed: int
    features: int
    touched: int
    lr: float
    steps: int = 0
    reached: int = 0
    conflicts: int = 0
    touches: int = 0

    def __post_init__(self) -> None:
        self.versions = np.zeros(self.features, np.int64)

    def __call__(self) -> None:
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        import polyrhythm as pr

        session = pr.init()
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.rand(400, self.features, generator=generator).argsort(1)[:, : self.touched]
        y = (torch.randn(self.features, generator=generator)[x].sum(1) > 0).float()
        model = nn.EmbeddingBag(self.features, 1, mode="sum", sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        while True:
            for batch, label in loader:
                if self.reached:
                    return
                optimizer.zero_grad()
                touched = batch[0].numpy()
                read = self.versions[touched]
                F.binary_cross_entropy_with_logits(model(batch)[:, 0], label).backward()
                optimizer.step()  # before it, in `backward()`, time passes and others step
                self.conflicts += int((self.versions[touched] != read).sum())
                self.versions[touched] += 1
                self.touches += self.touched
                self.steps += 1
                if self.steps % 10 == 0 and not self.reached:
                    with torch.no_grad():
                        loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
                    if loss < 0.3 or self.steps >= 4000:
                        self.reached = self.steps
