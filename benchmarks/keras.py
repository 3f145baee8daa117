"""Keras' `fit` under strategies: the F1 score and the samples per second beside those of Keras alone.

`examples/keras_mnist.py` (two convolutions, 3,274,634 parameters) learns the first images of Fashion-MNIST,
alone in a process and on two workers, all with one thread. The test F1 is the mean over the ten classes, and
over the seeds. The time is that of `fit`, with its first step and the exchange of metrics after each epoch.
On a busy machine processes wait for cores: *by CPU time* is what the worker that computes most would reach on
a core of its own, without waits for other workers, and *cores* is what the workers had on average.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fashion import missing
from benchmarks.processes import apart
from benchmarks.report import Row

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "keras_mnist.py"
DATA = "/usr/share/datasets/fashion-mnist"
STRATEGIES = ("allreduce", "async", "local:8", "gossip", "async+int8")
WORKERS, BATCH, NEAR = 2, 32, 0.02

# Runs the example with a clock around `fit`, and writes what `evaluate` says.
TIMED = """
import json, runpy, sys, time
import torch
from polyrhythm.integrations import keras as integration
from polyrhythm.session.context import session
torch.set_num_threads(1)
place, script, *rest = sys.argv[1:]
found = {}
distribute = integration.distribute
def watched(model):
    distribute(model)
    fit, evaluate = model.fit, model.evaluate
    def timed(*args, **kwargs):
        began, before = time.perf_counter(), time.process_time()
        history = fit(*args, **kwargs)
        found.update(seconds=time.perf_counter() - began, cpu=time.process_time() - before)
        return history
    def noted(*args, **kwargs):
        found.update(evaluate(*args, **{**kwargs, "return_dict": True, "verbose": 0}))
    model.__dict__.update(fit=timed, evaluate=noted)
integration.distribute = watched
sys.argv = [script, *rest]
runpy.run_path(script, run_name="__main__")
mine = session.get()
rank = 0 if mine is None else mine.rank
open(f"{place}-{rank}", "w").write(json.dumps(found))
"""


class Outcome(NamedTuple):
    f1: float
    accuracy: float
    speed: float  # samples per second
    by_cpu: float  # the same by the CPU time of the worker that computes most
    cores: float  # that the workers had


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    if why := missing():
        return [], [why]
    limit, epochs, seeds = (1000, 1, (0,)) if quick else (4000, 4, (0, 1))
    found: dict[str, list[Outcome]] = {}
    for seed in seeds:
        for strategy in ("", *STRATEGIES):
            found.setdefault(strategy, []).append(_outcome(strategy, limit, epochs, seed))
    alone = found.pop("")
    rows = [_row("Keras alone", alone, alone, bar=False)]
    rows += [_row(strategy, outcomes, alone, bar=not quick) for strategy, outcomes in found.items()]
    return rows, [
        f"{limit:,} images, {epochs} epochs, batch {BATCH} per worker, {WORKERS} workers, seeds {seeds}; F1 "
        f"may be {NEAR} lower than alone; one thread each, on {os.cpu_count()} cores"
    ]


def _row(name: str, outcomes: list[Outcome], alone: list[Outcome], bar: bool) -> Row:
    f1, base = (statistics.mean(each.f1 for each in group) for group in (outcomes, alone))
    by_cpu, theirs = (statistics.median(each.by_cpu for each in group) for group in (outcomes, alone))
    speed, cores = (statistics.median(each[place] for each in outcomes) for place in (2, 4))
    accuracy = statistics.mean(each.accuracy for each in outcomes)
    more = {
        "F1 alone": f"{base:.3f}", "accuracy": f"{accuracy:.3f}", "samples/s": f"{speed:,.0f}",
        "cores": f"{cores:.2f}", "by CPU time": f"{by_cpu:,.0f}", "of alone": f"{by_cpu / theirs:.2f}×",
    }  # fmt: skip
    return Row(f"{name}, test F1", f1, "", bar=base - NEAR if bar else None, more=more)


def _outcome(strategy: str, limit: int, epochs: int, seed: int) -> Outcome:
    options = ["--data", DATA, "--limit", str(limit), "--epochs", str(epochs), "--batch", str(BATCH)]
    options += ["--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        timed, result = Path(folder) / "timed.py", Path(folder) / "result"
        timed.write_text(TIMED)
        words = [str(result), str(SCRIPT), *options]
        if strategy:
            apart(_run, str(timed), strategy, words)
        else:
            paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
            command = [sys.executable, str(timed), *words]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = [
            json.loads(path.read_text()) for path in sorted(Path(folder).glob("result-*"))
        ]
    samples, busy = limit * epochs, [each["cpu"] for each in found]
    seconds = max(each["seconds"] for each in found)
    first = found[0]
    return Outcome(
        first["f1"], first["accuracy"], samples / seconds, samples / max(busy), sum(busy) / seconds
    )


def _run(script: str, strategy: str, words: list[str]) -> None:
    import polyrhythm as pr

    pr.run(Path(script), workers=WORKERS, strategy=strategy, arguments=words, threads=1, runs=None)
