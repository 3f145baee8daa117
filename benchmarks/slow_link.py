"""Eight workers, one of them slow or on a slow link: time to accuracy without a server, in simulation.

A small network (105,194 parameters) learns 12,000 images of Fashion-MNIST on eight simulated workers with
links of 100 Mbit/s and steps of 50 ms. Three clusters: all are alike; the link of one has a tenth of the
bandwidth; the steps of one take four times as long. What counts is the virtual time until the mean of all
replicas names 80 % of the test images correctly. That is looked at from outside, after every 40 steps of all
together, and costs nothing. All take the same learning rate.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fashion import missing, trained_on
from benchmarks.processes import Together, apart, together
from benchmarks.report import Row

WORKERS, BATCH, RATE = 8, 25, 0.3
TRAINING, TESTED, EPOCHS = 12_000, 2_000, 12
TARGET, EVERY = 0.80, 40
SEEDS = (1, 2, 3)
STRATEGIES = (
    "allreduce", "local:8", "gossip", "gossip:exponential", "push", "adpsgd", "broadcast:0.001,reduce=mean",
)  # fmt: skip
HOST = 'step_time = "50 ms"\nlatency = "0.5 ms"\n'
REST = f'[[hosts]]\ncount = 7\nbandwidth = "100 Mbit/s"\n{HOST}'
CLUSTERS = {
    "alike": f'[[hosts]]\nbandwidth = "100 Mbit/s"\n{HOST}',
    "a link at a tenth": f'{REST}[[hosts]]\ncount = 1\nbandwidth = "10 Mbit/s"\n{HOST}',
    "a worker at a quarter": f'{REST}[[hosts]]\ncount = 1\nspeed = 0.25\nbandwidth = "100 Mbit/s"\n{HOST}',
}


@dataclass
class Watch:
    """What is seen of one run from outside."""

    replicas: dict[int, Any] = field(default_factory=dict)
    steps: int = 0
    reached: float | None = None  # when
    accuracy: float = 0.0
    last: int = sys.maxsize  # step of each worker: all end after the same one
    megabytes: float = 0.0  # that a worker sent until then, in the mean


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    if reason := missing():
        return [], [reason]
    seeds = SEEDS[:1] if quick else SEEDS
    jobs = [(name, strategy, seed) for name in CLUSTERS for strategy in STRATEGIES for seed in seeds]
    found = dict(pair for share in apart(together, 2, _share, jobs) for pair in share)
    rows = []
    for name in CLUSTERS:
        base = [found[name, STRATEGIES[0], seed] for seed in seeds]
        for strategy in STRATEGIES:
            mine = [found[name, strategy, seed] for seed in seeds]
            more = {
                "seconds by seeds": ", ".join(_time(each) for each in mine),
                "MB sent per worker": f"{statistics.median(each.megabytes for each in mine):.0f}",
                "steps of all": f"{statistics.median(each.steps for each in mine):.0f}",
            }
            if any(each.reached is None for each in mine):
                best = max(each.accuracy for each in mine)
                rows.append(
                    Row(f"{name}: {strategy}", float("nan"), "s", more={**more, "best": f"{best:.3f}"})
                )
                continue
            theirs = statistics.median(_seconds(each) for each in base)
            ours = statistics.median(_seconds(each) for each in mine)
            rows.append(Row(f"{name}: {strategy}", ours, "s", theirs, ratio=theirs / ours, more=more))
    notes = [
        f"theirs: allreduce on the same cluster; the ratio says how much sooner {TARGET:.0%} are reached; "
        f"medians over {len(seeds)} seeds, in virtual seconds",
    ]
    return rows, notes


def _seconds(watch: Watch) -> float:
    return float("nan") if watch.reached is None else watch.reached


def _time(watch: Watch) -> str:
    return "never" if watch.reached is None else f"{watch.reached:.1f}"


def _share(here: Together, jobs: list[tuple[str, str, int]]) -> list[tuple[tuple[str, str, int], Watch]]:
    """This process's share of the runs."""
    done = []
    for job in jobs[here.rank :: here.count]:
        done.append((job, run(*job)))
        print(
            "  ".join([f"{job[0]}: {job[1]}, seed {job[2]}", _time(done[-1][1])]), file=sys.stderr, flush=True
        )
    return done


def run(cluster: str, strategy: str, seed: int) -> Watch:
    """Trains until the target is reached."""
    import polyrhythm as pr

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(CLUSTERS[cluster])
        pr.simulate(
            lambda: _main(watch), workers=WORKERS, strategy=strategy, cluster=path, seed=seed, threads=1
        )
    watch.replicas = {}
    return watch


def _main(watch: Watch) -> None:
    from torch.nn.functional import cross_entropy

    import polyrhythm as pr

    session: Any = pr.init()
    model, optimizer, loader = session.prepare(*trained_on(TRAINING, BATCH, RATE))
    watch.replicas[session.rank] = session._replica
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            watch.steps += watch.reached is None
            if watch.reached is None and watch.steps % EVERY == 0:
                _look(watch, session)
            if session._replica.steps >= watch.last:
                return


def _look(watch: Watch, session: Any) -> None:
    """The accuracy of the mean of all replicas, as they are now."""
    import torch

    from polyrhythm.data.mnist import mnist

    strategy = session.strategy
    own = getattr(strategy, "own", lambda replica: replica.parameters)
    with torch.no_grad():
        parts = zip(*(own(replica) for replica in watch.replicas.values()), strict=True)
        mean = [torch.stack([*each]).mean(0) for each in parts]
        images, labels = (each[:TESTED] for each in mnist()[1].tensors)
        model = session._copies.copy(mean)[0]
        watch.accuracy = max(watch.accuracy, (model(images).argmax(1) == labels).float().mean().item())
    if watch.accuracy >= TARGET:
        nodes = session._node.world.nodes.values()
        watch.reached = session._node.now()
        watch.megabytes = sum(node.bytes_sent for node in nodes) / WORKERS / 1e6
        # In lockstep all must take the same steps; otherwise each may end when it hears of it.
        furthest = max(replica.steps for replica in watch.replicas.values())
        watch.last = furthest + 1 if strategy.traits.lockstep else 0
