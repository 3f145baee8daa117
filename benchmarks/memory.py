"""The memory that a worker needs, in multiples of its model: 2 workers, to the end of the run.

Each run trains, calls `session.consensus()` and drops the copy, trains on, and ends: one worker hands over
the final parameters, which are written to the run folder. A process of its own reads every millisecond

- by how much the anonymous memory (RssAnon) of each process of the run has grown, the launcher included, and
- the pages of each node's shared memory, which the kernel counts by file, whoever maps them.

So every page counts once, at the node that allocated it. (The resident set of a process would count pages of
others that it has touched, and a sum of PSS would move parts of a worker's pages to the server that reads
them.) A figure is the highest sum over the workers and the launcher at one moment, divided by the number of
workers. Memory of servers is a figure of its own, for all servers of the run together. All are differences
between a run with a large model and the same run with a tiny one, divided by the bytes of the large model's
parameters: what torch and the package take by themselves cancels out.

"Peak RSS" is the highest resident set that the kernel noted for any process of the run but servers (VmHWM, of
one worker), with pages of others that it has touched.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import apart
from benchmarks.report import Row

PLAIN = "plain PyTorch"
# The bars, in multiples of the model: with plain SGD, and with momentum.
BARS = {
    "allreduce": (3.0, 4.0), "async": (3.0, 4.0), "local:8": (5.0, 5.0), "gossip": (5.0, 5.0),
    "adpsgd": (5.0, 5.0), "choco+topk:0.01": (5.0, 5.0), "broadcast": (5.0, 5.0),
    "allreduce / diloco:4": (5.0, 5.0),
}  # fmt: skip
STRATEGIES = tuple(BARS)
QUICK = ("allreduce", "async")
ROUNDING = 0.05  # of a model: what activations and Python objects may add to whole copies
WORKERS, LAYERS, STEPS = 2, 4, 4
TINY = 8  # the width of a layer; its model has 1 KiB
PHASES = ("training", "consensus", "after", "end")
SITES = """
[[hosts]]
count = 1
site = "here"
[[hosts]]
count = 1
site = "there"
"""


class Run(NamedTuple):
    strategy: str
    momentum: float
    width: int


class Peak(NamedTuple):
    """Bytes of one run, or multiples of its model."""

    training: float  # before the call of `consensus()`
    consensus: float  # during it
    end: float  # from then on
    servers: float
    resident: float

    @property
    def most(self) -> float:
        return max(self.training, self.consensus, self.end)


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    width = 3072 if quick else 4330  # smaller layers would stay in the heap of malloc
    rows: list[Row] = []
    for momentum in (0.0, 0.9):
        names = QUICK if quick else STRATEGIES
        multiples = peaks((PLAIN, *names), width, momentum)
        plain = multiples.pop(PLAIN).most
        optimizer = "SGD with momentum" if momentum else "SGD"
        for strategy, ours in multiples.items():
            phases = {"training": ours.training, "consensus()": ours.consensus, "then, to the end": ours.end}
            more = {**phases, "servers": ours.servers, "peak RSS": ours.resident}
            bar = BARS[strategy][momentum > 0] + ROUNDING
            rows.append(
                Row(
                    f"{strategy}, {optimizer}", ours.most, "×", plain, bar=bar, wanted="below",
                    more={name: f"{value:.2f} ×" for name, value in more.items()},
                )
            )  # fmt: skip
    return rows, [
        f"multiples of {megabytes(width)} of parameters in {LAYERS} layers; {WORKERS} workers, every page "
        "counted once; theirs is plain PyTorch in one process, with the same copy for evaluation"
    ]


def peaks(strategies: Sequence[str], width: int, momentum: float = 0.9) -> dict[str, Peak]:
    """The peaks of each strategy with layers of this width, in multiples of the model's size."""
    multiples: dict[str, Peak] = apart(_multiples, strategies, width, momentum)
    return multiples


def megabytes(width: int) -> str:
    return f"{_nbytes(width) / 1e6:.0f} MB"


def _nbytes(width: int) -> int:
    return 4 * LAYERS * width * width


def _multiples(strategies: Sequence[str], width: int, momentum: float) -> dict[str, Peak]:
    """Imports torch once; every run is a fork of this process."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not survive the fork
    import torch._dynamo  # the first step of an optimizer would import it

    import polyrhythm  # noqa: F401

    torch.set_num_threads(1)
    found = {}
    for strategy in strategies:
        apart(_run, Run(strategy, momentum, TINY))  # may compile and cache what only this strategy needs
        tiny, large = (apart(_run, Run(strategy, momentum, each)) for each in (TINY, width))
        found[strategy] = Peak(*((a - b) / _nbytes(width) for a, b in zip(large, tiny, strict=True)))
    return found


def _run(run: Run) -> Peak:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        end, there = multiprocessing.Pipe(duplex=False)
        sampler = multiprocessing.get_context("fork").Process(
            target=_sample, args=(folder, os.getpid(), there)
        )
        sampler.start()
        if run.strategy == PLAIN:
            _train(folder, run, None)
        else:
            import polyrhythm as pr

            (folder / "sites.toml").write_text(SITES)
            pr.run(
                functools.partial(_worker, folder, run), workers=WORKERS, strategy=run.strategy, threads=1,
                runs=folder / "runs", cluster=folder / "sites.toml" if "/" in run.strategy else None,
            )  # fmt: skip
        (folder / "over").touch()
        peak: Peak = end.recv()
        sampler.join()
    return peak


# --- the script of all nodes ------------------------------------------------------------------------


def _worker(folder: Path, run: Run) -> None:
    from polyrhythm.session.context import world_context
    from polyrhythm.worlds.processes.node import ProcessNode

    here = world_context.get()
    assert here is not None and isinstance(here.node, ProcessNode) and here.node.arenas is not None
    arena = here.node.arenas.file(here.node.arena)
    started = folder / f"starting-{os.getpid()}"
    started.write_text(json.dumps({"role": here.me.role, "arena": arena}))
    started.rename(folder / f"node-{os.getpid()}")

    import polyrhythm as pr

    _train(folder, run, pr.init())


def _train(folder: Path, run: Run, session: Any) -> None:
    import torch

    layers = [torch.nn.Linear(run.width, run.width, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    del layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=run.momentum)
    if session is not None:
        model, optimizer = session.prepare(model, optimizer)

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, run.width)).square().mean().backward()
            optimizer.step()

    def evaluate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(2, run.width))

    rank = 0 if session is None else session.rank
    count = 1 if session is None else WORKERS
    train()
    _meet(folder, "consensus", rank, count)
    evaluate(_copied(model) if session is None else session.consensus())
    _meet(folder, "after", rank, count)
    train()
    _meet(folder, "end", rank, count)


def _copied(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def _meet(folder: Path, place: str, rank: int, count: int) -> None:
    """Waits until all workers are here, by files, so that it is the same under every strategy."""
    (folder / f"{place}-{rank}").touch()
    deadline = time.monotonic() + 60
    while not all((folder / f"{place}-{other}").exists() for other in range(count)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"worker {rank} waited 60 s for the others to come to {place}")
        time.sleep(0.001)


# --- the sampler ------------------------------------------------------------------------------------


class _Process:
    """A process of the run: its arena, and how much its anonymous memory has grown since it started."""

    def __init__(self, pid: int, role: str = "worker", arena: int | None = None) -> None:
        self.role = role
        self._status = Path(f"/proc/{pid}/status")
        # Opened here: the pages of an arena stay when its process has ended, as long as the launcher runs.
        self._arena = None if arena is None else os.open(f"/proc/{pid}/fd/{arena}", os.O_RDONLY)
        self._start = self._resident()[0]

    def nbytes(self) -> tuple[int, int]:
        """Memory that counts for this process, and its highest resident set."""
        anonymous, highest = self._resident()
        shared = 0 if self._arena is None else os.fstat(self._arena).st_blocks * 512
        return max(0, anonymous - self._start) + shared, highest

    def close(self) -> None:
        if self._arena is not None:
            os.close(self._arena)

    def _resident(self) -> tuple[int, int]:
        try:
            words = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            words = {}
        return _bytes(words.get("RssAnon", "0 kB")), _bytes(words.get("VmHWM", "0 kB"))


def _bytes(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024


def _sample(folder: Path, launcher: int, answer: Any) -> None:
    highest = dict.fromkeys((*PHASES, "servers", "resident"), 0)
    for phase, workers, servers, resident in _samples(folder, launcher):
        for name, value in ((phase, workers), ("servers", servers), ("resident", resident)):
            highest[name] = max(highest[name], value)
    workers = max(1, len({*folder.glob("end-*")}))
    end = max(highest["after"], highest["end"])
    sums = [value / workers for value in (highest["training"], highest["consensus"], end)]
    answer.send(Peak(*sums, highest["servers"], highest["resident"]))


def _samples(folder: Path, launcher: int) -> Iterator[tuple[str, int, int, int]]:
    """The phase, the memory of workers and launcher, that of servers, and the largest resident set."""
    known = {f"node-{launcher}": _Process(launcher)}
    while True:
        names = set(os.listdir(folder))
        for name in names - known.keys():
            if name.startswith("node-"):
                known[name] = _Process(
                    int(name.removeprefix("node-")), **json.loads((folder / name).read_text())
                )
        # A phase has begun when the first worker comes to it.
        phase = [
            each for each in PHASES if each == "training" or f"{each}-0" in names or f"{each}-1" in names
        ]
        totals = {"worker": 0, "server": 0}
        highest = 0
        for process in known.values():
            size, resident = process.nbytes()
            totals[process.role] += size
            highest = max(highest, resident if process.role == "worker" else 0)
        yield phase[-1], totals["worker"], totals["server"], highest
        if "over" in names:
            return
        time.sleep(0.001)
