"""Workers are killed at random for a minute, on real processes: the accuracy beside an undisturbed run's.

Four workers learn 12,000 images of Fashion-MNIST under strategies without a server, a step every 10 ms or so.
Every three seconds one of them, chosen at random, gets SIGKILL; another takes its place. The same is
trained without kills: how far seeds are apart there is the noise, and that far below the worst of them is the
bar.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.fashion import accuracy, missing, network, trained_on
from benchmarks.processes import _fork, apart
from benchmarks.report import Row

WORKERS, BATCH, RATE, PAUSE = 4, 25, 0.1, 0.010
TRAINING = 12_000
EPOCHS, EVERY = 36, 3.0  # seconds between two kills
STRATEGIES = ("adpsgd", "broadcast:0.001,reduce=mean", "gossip")
SEEDS = (1, 2, 3)


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    if reason := apart(missing):  # which computes: whoever is forked after that would wait for its threads
        return [], [reason]
    epochs, seeds = (6, SEEDS[:1]) if quick else (EPOCHS, SEEDS)
    rows = []
    for strategy in STRATEGIES:
        calm = [apart(run, strategy, seed, epochs, False) for seed in seeds]
        wild = [apart(run, strategy, seed, epochs, True) for seed in seeds]
        reached, kept = (sorted(100 * each["accuracy"] for each in runs) for runs in (calm, wild))
        rows.append(
            Row(
                f"{strategy}: accuracy, killed at random", statistics.mean(kept), "%",
                theirs=statistics.mean(reached), bar=reached[0] - (reached[-1] - reached[0]),
                more={
                    "by seeds": ", ".join(f"{each:.2f}" for each in kept),
                    "undisturbed": ", ".join(f"{each:.2f}" for each in reached),
                    "killed": ", ".join(str(each["killed"]) for each in wild),
                    "joined": ", ".join(str(each["joined"]) for each in wild),
                    "seconds": ", ".join(f"{each['seconds']:.0f}" for each in wild),
                },
            )
        )  # fmt: skip
    return rows, [f"theirs: undisturbed; means over {len(seeds)} seeds; {epochs} epochs"]


def run(strategy: str, seed: int, epochs: int, killing: bool) -> dict[str, Any]:
    """One run, and what became of it."""
    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        killer = _fork.Process(target=_kill, args=(folder, random.Random(seed)))
        if killing:
            killer.start()
        began = time.monotonic()
        try:
            summary: Any = pr.run(
                functools.partial(_main, folder, epochs), workers=WORKERS, strategy=strategy, seed=seed,
                threads=1, restarts=1000, runs=folder / "runs", name="run", timeout=120.0,
            )  # fmt: skip
        finally:
            if killing:
                killer.terminate()
                killer.join()
        killed = folder / "killed"
        return {
            "accuracy": _accuracy(folder / "runs" / "run"),
            "killed": len(killed.read_text().split()) if killed.exists() else 0,
            "joined": summary["joined"], "seconds": time.monotonic() - began,
        }  # fmt: skip


def _kill(folder: Path, chance: random.Random) -> None:
    while True:
        time.sleep(EVERY)
        ready = [path for path in sorted(folder.glob("worker *")) if path.read_text()]
        if len(ready) < 2:  # one must live on, or nobody is left to bring anything home
            continue
        victim = chance.choice(ready)
        with contextlib.suppress(FileNotFoundError):
            pid = victim.read_text()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
                with (folder / "killed").open("a") as file:
                    print(pid, file=file)
            victim.unlink()  # now that it cannot write it again; who comes in its place will


def _main(folder: Path, epochs: int) -> None:
    from torch.nn.functional import cross_entropy

    import polyrhythm as pr

    session: Any = pr.init()
    model, optimizer, loader = session.prepare(*trained_on(TRAINING, BATCH, RATE))
    mine = folder / f"worker {session.rank}"
    for _ in session.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(PAUSE)
            if not mine.exists():
                mine.write_text(str(os.getpid()))
    mine.unlink(missing_ok=True)  # who has finished is left alone


def _accuracy(run: Path) -> float:
    from safetensors.torch import load_file

    model = network()
    model.load_state_dict(load_file(run / "consensus.safetensors"))
    return accuracy(model)
