"""Cutting a model into stages: the slowest stage by measured cuts, by the best of all, by equal counts."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks.report import Row
from polyrhythm.parallel.best_cuts import best_cuts
from polyrhythm.parallel.costs import clock
from polyrhythm.parallel.costs import measure as measure_costs
from polyrhythm.parallel.graph import ModelGraph, capture
from polyrhythm.parallel.partition import split
from polyrhythm.parallel.untouched import random_states_kept

WIDTHS = (768, 768, 768, 768, 256, 256, 256, 256, 256)
ROWS = 256
PER_BYTE = 5e-10  # 2 GB/s


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with random_states_kept():
            torch.manual_seed(0)
            return _measure(3 if quick else 9)
    finally:
        torch.set_num_threads(threads)


def _measure(repeats: int) -> tuple[list[Row], list[str]]:
    pairs = itertools.pairwise(WIDTHS)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs])
    x = torch.randn(ROWS, WIDTHS[0])
    graph = capture(model, (x,), {})
    costs = measure_costs(graph, (x,), {}, repeats)
    times = _all_stages(graph, x, repeats)
    count = len(graph.train.operations)

    def slowest(cuts: tuple[int, ...]) -> float:
        edges = itertools.pairwise((0, *cuts, count))
        return max(times[a, b] + PER_BYTE * (costs.crossing[a] + costs.crossing[b]) for a, b in edges)

    rows = []
    for stages in (2, 3, 4):
        ours = tuple(best_cuts(costs, stages, PER_BYTE) or ())
        every = list(itertools.combinations(range(1, count), stages - 1))
        best = min(every, key=slowest)
        layers = len(WIDTHS) - 1
        equal = tuple(2 * round(layers * stage / stages) for stage in range(1, stages))
        for what, cuts, bar in (
            (f"{stages} stages against the best of {len(every)} cuts", ours, 1.05),
            (f"{stages} stages by equal counts of layers", equal, None),
        ):
            found, least = 1e3 * slowest(cuts), 1e3 * slowest(best)
            more = {"cuts": " ".join(map(str, cuts)), "best": " ".join(map(str, best))}
            rows.append(Row(what, found, "ms", least, found / least, bar, "below", more))
    notes = [
        f"Layers of widths {'-'.join(map(str, WIDTHS))}, {ROWS} rows, one thread, 2 GB/s between stages."
    ]
    return rows, notes


def _all_stages(graph: ModelGraph, x: torch.Tensor, repeats: int) -> dict[tuple[int, int], float]:
    """The time of every possible stage, forward and backward, each measured as a whole."""
    count = len(graph.train.operations)
    modules, inputs = {}, {0: x}
    for a, b in itertools.combinations(range(count + 1), 2):
        cuts = [cut for cut in (a, b) if 0 < cut < count]
        modules[a, b] = split(graph, cuts).train[1 if a else 0].module
    for position in range(1, count):
        inputs[position] = modules[0, position](x)[0].detach()
    best = dict.fromkeys(modules, float("inf"))
    for _ in range(repeats):  # in turn, so that a disturbance does not hit all runs of one stage
        for (a, b), module in modules.items():
            source = inputs[a].detach().requires_grad_(a > 0)
            held = [p for p in module.parameters() if p.requires_grad]  # type: ignore[attr-defined]
            began = clock()
            output = module(source)[0]
            wanted = [*held, *([source] if a else [])]
            if wanted:
                torch.autograd.grad(output, wanted, torch.ones_like(output))
            best[a, b] = min(best[a, b], clock() - began)
    return best
