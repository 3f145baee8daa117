"""`pr.replicate` on one CPU: what two replicas in threads gain or lose against the plain model.

One process trains the Fashion-MNIST network (1,111,946 parameters), then a perceptron of 24,697,866, batch
100, by turns as a plain model and as two replicas that share the parameters, with one or two threads of
PyTorch. Replicas run forward passes side by side. Backward passes of all CPU replicas run in one thread of
autograd, whatever the number of replicas.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.allreduce import NETWORK, network, perceptron
from benchmarks.processes import apart
from benchmarks.report import Row, ratio

BATCH, REPLICAS = 100, 2


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    for name, steps in ((NETWORK, 5), ("MLP of 25M", 2)):
        speeds: dict[tuple[int, int], list[float]] = apart(_speeds, name, 3 if quick else 15, steps)
        for threads in (1, 2):
            ours, theirs = speeds[REPLICAS, threads], speeds[0, threads]
            rows.append(
                Row(
                    f"{name}: samples/s, {REPLICAS} replicas against the plain model, {_text(threads)}",
                    statistics.median(ours), "/s", statistics.median(theirs), ratio=ratio(ours, theirs),
                )
            )  # fmt: skip
        best = speeds[0, 2]
        rows.append(
            Row(
                f"{name}: samples/s, {REPLICAS} replicas, {_text(1)}, against plain, {_text(2)}",
                statistics.median(speeds[REPLICAS, 1]), "/s", statistics.median(best),
                ratio=ratio(speeds[REPLICAS, 1], best),
            )
        )  # fmt: skip
    return rows, [f"batch {BATCH}, forward, backward and a step of SGD with momentum"]


def _text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)} of PyTorch"


def _speeds(name: str, rounds: int, steps: int) -> dict[tuple[int, int], list[float]]:
    """Samples per second by (replicas, threads of PyTorch), in alternating blocks."""
    import torch
    from torch import nn

    import polyrhythm as pr

    data = [(torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))) for _ in range(4)]

    def trainer(replicas: int, threads: int) -> Callable[[], float]:
        torch.manual_seed(0)
        model = network() if name == NETWORK else perceptron()
        if replicas:
            model = pr.replicate(model, ["cpu"] * replicas)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def block() -> float:
            torch.set_num_threads(threads)
            began = time.perf_counter()
            for number in range(steps):
                x, y = data[number % len(data)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            return steps * BATCH / (time.perf_counter() - began)

        return block

    blocks = {
        (replicas, threads): trainer(replicas, threads) for replicas in (0, REPLICAS) for threads in (1, 2)
    }
    for block in blocks.values():
        block()
    found: dict[tuple[int, int], list[float]] = {which: [] for which in blocks}
    for number in range(rounds):
        for which in blocks if number % 2 else reversed(blocks):
            found[which].append(blocks[which]())
    return found
