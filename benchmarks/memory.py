"""Peak memory of a worker in multiples of its model, beside plain PyTorch: 2 workers, SGD with momentum.

Every figure is the difference between a run with a large model and the same run with a tiny one, divided by
the bytes of the large model's parameters; what torch and the package take by themselves cancels out.

- While training: the peak resident set that the kernel noted (VmHWM) when a worker has taken its last step,
  of the worker with the highest one. A page of shared memory counts in each process that has touched it.
- To its end: the highest peak of all processes of the run, servers included, over their whole lives
  (`ru_maxrss` of the children). One worker hands over the final parameters, which takes more than a step.
- Held by the run: the proportional set size (PSS) of all nodes between two steps, divided by the number of
  workers. Here every page counts once. It is not a peak.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import apart
from benchmarks.report import Row

PLAIN = "plain PyTorch"
STRATEGIES = ("allreduce", "async", "adpsgd", "broadcast")
WORKERS, LAYERS, STEPS = 2, 4, 4
TINY = 8  # the width of a layer; its model has 1 KiB
HELD = "held by the run, per worker"


class Peak(NamedTuple):
    """Bytes of one run."""

    training: float
    end: float
    held: float


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    width = 1024 if quick else 2048
    multiples = peaks((PLAIN, *STRATEGIES), width)
    plain = multiples.pop(PLAIN)
    rows: list[Row] = []
    for strategy, ours in multiples.items():
        held = {HELD: f"{ours.held:.2f} ×"}
        rows += [
            Row(
                f"{strategy}: while training", ours.training, "×", plain.training,
                ratio=ours.training / plain.training, more=held,
            ),
            Row(f"{strategy}: to its end", ours.end, "×", plain.end, ratio=ours.end / plain.end),
        ]  # fmt: skip
    return rows, [
        f"multiples of {megabytes(width)} of parameters; {WORKERS} workers, {STEPS} steps; theirs is plain "
        "PyTorch in one process"
    ]


def peaks(strategies: tuple[str, ...], width: int) -> dict[str, Peak]:
    """The peaks of each strategy with layers of this width, in multiples of the model's size."""
    multiples: dict[str, Peak] = apart(_multiples, strategies, width)
    return multiples


def megabytes(width: int) -> str:
    return f"{_nbytes(width) / 1e6:.0f} MB"


def _nbytes(width: int) -> int:
    return 4 * LAYERS * width * width


def _multiples(strategies: tuple[str, ...], width: int) -> dict[str, Peak]:
    """Imports torch once; every run is a fork of this process."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not survive the fork
    import torch._dynamo  # the first step of an optimizer would import it

    import polyrhythm  # noqa: F401

    torch.set_num_threads(1)
    found = {}
    for strategy in strategies:
        apart(_run, strategy, TINY)  # may compile and cache what only this strategy needs
        tiny, large = apart(_run, strategy, TINY), apart(_run, strategy, width)
        found[strategy] = Peak(*((a - b) / _nbytes(width) for a, b in zip(large, tiny, strict=True)))
    return found


def _run(strategy: str, width: int) -> Peak:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if strategy == PLAIN:
            apart(_plain, folder, width)
        else:
            import polyrhythm as pr

            program = functools.partial(_worker, folder, width)
            pr.run(program, workers=WORKERS, strategy=strategy, threads=1, runs=None)
        seen = [json.loads(file.read_text()) for file in folder.glob("seen-*")]
    # This process is new, so these children are those of this run; the kernel hands the maximum upwards.
    end = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Peak(max(one["peak"] for one in seen), end, sum(one["held"] for one in seen) / len(seen))


def _plain(folder: Path, width: int) -> None:
    _train(width)
    (folder / "seen-0").write_text(json.dumps({"peak": _peak(), "held": _held(os.getpid())}))


def _worker(folder: Path, width: int) -> None:
    """The program of all nodes; a server does not return from `prepare`."""
    (folder / f"node-{os.getpid()}").touch()
    import polyrhythm as pr

    session = pr.init()
    _train(width, session)
    peak = _peak()
    _meet(folder, "trained", session.rank)  # nobody leaves before all are counted
    held = 0
    if session.rank == 0:
        held = sum(_held(int(file.name.removeprefix("node-"))) for file in folder.glob("node-*"))
    _meet(folder, "counted", session.rank)
    (folder / f"seen-{session.rank}").write_text(json.dumps({"peak": peak, "held": held}))


def _train(width: int, session: Any = None) -> None:
    import torch

    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if session is not None:
        model, optimizer = session.prepare(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()


def _meet(folder: Path, place: str, rank: int) -> None:
    """Waits until all workers are here, by files, so that it is the same under every strategy."""
    (folder / f"{place}-{rank}").touch()
    deadline = time.monotonic() + 60
    while not all((folder / f"{place}-{other}").exists() for other in range(WORKERS)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"worker {rank} waited 60 s for the others to have {place}")
        time.sleep(0.001)


def _peak() -> int:
    return _bytes(Path("/proc/self/status"), "VmHWM")


def _held(pid: int) -> int:
    return _bytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def _bytes(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(f"{file} has no {name}")
