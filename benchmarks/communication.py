"""Bytes and time to a given accuracy: strategies that send less, on networks of 10 Gbit/s to 100 Mbit/s.

Four simulated workers train a small network on a part of Fashion-MNIST, with real gradients; a step takes
the same time in all lines. First each strategy trains where the network costs nothing, and looks at the
consensus now and then, until it has the accuracy. Then it takes as many steps on every network, without
looking: what that took and sent is what is shown. Both are the same on every machine.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fashion import accuracy, missing, network
from benchmarks.processes import Together, apart, together
from benchmarks.report import Row

if TYPE_CHECKING:
    from torch import nn

WORKERS, BATCH = 4, 16
TRAINING, TESTING = 12_000, 2_000  # the first of each
TARGET = 0.83
EVERY, MOST = 10, 1200  # how often is looked, and after how many steps it is given up
STEP = "2.5 ms"  # what forward and backward of one batch take on one core here
NETWORKS = ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s")
LATENCY = "0.05 ms"  # of a link; a message crosses two
SEEDS = (3, 4, 5)  # others than those on which the rates were chosen


@dataclass(frozen=True)
class Case:
    """One line: a strategy, and the optimizer that the script has."""

    strategy: str
    optimizer: str = "SGD"
    rate: float = 0.05

    def __str__(self) -> str:
        return f"{self.strategy}, {self.optimizer} {self.rate:g}"

    def optimize(self, model: nn.Module) -> Any:
        import torch

        if self.optimizer == "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=self.rate)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9)


USUAL = "allreduce"
CASES = (
    Case(USUAL), Case("local:8"), Case("local:64"),
    Case(USUAL, "AdamW", 0.003), Case("diloco:50", "AdamW", 0.003),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One strategy with one seed: the steps it took, and what they cost on each network."""

    steps: int
    accuracy: float
    megabytes: float  # that a worker sent
    seconds: dict[str, float]

    @property
    def reached(self) -> bool:
        return self.accuracy >= TARGET


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    if reason := apart(missing):
        return [], [f"not measured: {reason}"]
    seeds = SEEDS[:1] if quick else SEEDS
    networks = NETWORKS[1:2] if quick else NETWORKS
    jobs = [(case, seed) for case in CASES for seed in seeds]
    parts = together(min(os.cpu_count() or 1, len(jobs)), _share, jobs, networks)
    outcomes: dict[Case, list[Outcome]] = {case: [] for case in CASES}
    for case, outcome in (pair for part in parts for pair in part):
        outcomes[case].append(outcome)
    rows = [row for network in networks for row in _rows(network, outcomes)]
    notes = [
        f"virtual seconds until {TARGET:.0%} of {TESTING:,} test images are right, beside allreduce with the "
        f"same optimizer on the same network; mean over seeds {', '.join(map(str, seeds))}",
        f"{WORKERS} workers, batch {BATCH} each, {TRAINING:,} images, steps of {STEP}, {LATENCY} per link; "
        "every strategy was run on every network, and trained the same model on all, bit for bit",
        *_markdown(networks, outcomes),
    ]
    return rows, notes


def _rows(network: str, outcomes: dict[Case, list[Outcome]]) -> list[Row]:
    def seconds(case: Case) -> float:
        return statistics.mean(outcome.seconds[network] for outcome in outcomes[case])

    rows = []
    for case, found in outcomes.items():
        usual = next(each for each in CASES if (each.strategy, each.optimizer) == (USUAL, case.optimizer))
        rows.append(
            Row(
                f"{network}: {case}", seconds(case), "s", None if case is usual else seconds(usual),
                ratio=None if case is usual else seconds(usual) / seconds(case),
                more={
                    "MB sent per worker": f"{statistics.mean(each.megabytes for each in found):,.1f}",
                    "steps": _spread([each.steps for each in found]),
                    "accuracy": _reached(found),
                },
            )
        )  # fmt: skip
    return rows


def _markdown(networks: Sequence[str], outcomes: dict[Case, list[Outcome]]) -> list[str]:
    """The table as docs/results.md has it: one line for each strategy."""
    head = ["strategy", "optimizer", "steps", "accuracy", "MB sent per worker", *networks]
    lines = [head, ["---"] * len(head)]
    for case, found in outcomes.items():
        times = [statistics.mean(each.seconds[network] for each in found) for network in networks]
        sent = statistics.mean(each.megabytes for each in found)
        lines.append(
            [
                f"`{case.strategy}`", f"{case.optimizer}, rate {case.rate:g}",
                _spread([each.steps for each in found]), _reached(found), f"{sent:,.1f}",
                *(f"{time:.2f} s" for time in times),
            ]
        )  # fmt: skip
    return ["| " + " | ".join(line) + " |" for line in lines]


def _spread(steps: Sequence[int]) -> str:
    middle = f"{statistics.mean(steps):.0f}"
    return middle if len(steps) == 1 else f"{middle} ({min(steps)} – {max(steps)})"


def _reached(found: Sequence[Outcome]) -> str:
    text = f"{statistics.mean(each.accuracy for each in found):.1%}"
    short = sum(not each.reached for each in found)
    return f"{text}, {short} of {len(found)} not reached" if short else text


# --- in a process of its own ------------------------------------------------------------------------


def _share(
    here: Together, jobs: list[tuple[Case, int]], networks: Sequence[str]
) -> list[tuple[Case, Outcome]]:
    """This process's share of the runs."""
    return [(case, outcome(case, seed, networks)) for case, seed in jobs[here.rank :: here.count]]


def outcome(case: Case, seed: int, networks: Sequence[str]) -> Outcome:
    """Finds how many steps it takes, and takes them on every network."""
    steps = needed(case, seed)
    runs = [
        _simulate(_script(case, lambda step, model: step == steps), case, seed, each) for each in networks
    ]
    found = {(summary["digest"], summary["bytes_sent"], accuracy) for summary, accuracy in runs}
    if len(found) > 1:
        raise RuntimeError(f"{case}: not the same on all networks: {found}")
    _, nbytes, accuracy = found.pop()
    seconds = {network: summary["wall_s"] for network, (summary, _) in zip(networks, runs, strict=True)}
    return Outcome(steps, accuracy, nbytes / WORKERS / 1e6, seconds)


def needed(case: Case, seed: int) -> int:
    """After how many steps the consensus is good enough; on a free network, where looking costs nothing."""
    seen: dict[int, float] = {}

    def over(step: int, consensus: Callable[[], nn.Module]) -> bool:
        if step % EVERY:
            return False
        model = consensus()
        if step not in seen:  # it is the same for all
            seen[step] = accuracy(model, TESTING)
        return seen[step] >= TARGET or step >= MOST

    _simulate(_script(case, over), case, seed)
    return max(seen)


def _script(case: Case, over: Callable[[int, Callable[[], nn.Module]], bool]) -> Callable[[], None]:
    """The training script; `over(step, consensus)` tells after every step whether that was the last."""
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import polyrhythm as pr
    from polyrhythm.data.mnist import mnist

    images, labels = mnist()[0].tensors
    data = TensorDataset(images[:TRAINING], labels[:TRAINING])

    def main() -> None:
        session = pr.init()
        model = network()
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        model, optimizer, loader = session.prepare(model, case.optimize(model), loader)
        step = itertools.count(1)
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if over(next(step), session.consensus):
                    return

    return main


def _simulate(
    main: Callable[[], None], case: Case, seed: int, bandwidth: str | None = None
) -> tuple[Any, float]:
    """The summary of a run, and the accuracy of the model that it brings home."""
    import safetensors.torch

    import polyrhythm as pr

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        link = f'bandwidth = "{bandwidth}"\nlatency = "{LATENCY}"\n' if bandwidth else ""
        cluster.write_text(f'[[hosts]]\nstep_time = "{STEP}"\n{link}')
        summary = pr.simulate(
            main, workers=WORKERS, strategy=case.strategy, cluster=cluster, seed=seed, threads=1, runs=folder
        )
        model = network()
        model.load_state_dict(safetensors.torch.load_file(Path(summary["folder"]) / "consensus.safetensors"))
    return summary, accuracy(model, TESTING)
