"""From 4 to 1,024 workers: bytes that the busiest node sends in a step, and how long a step takes.

Only time is simulated: gradients are zeros, steps take 10 ms, links have 1 Gbit/s and 0.1 ms. Each worker
holds 16,384 numbers (64 KiB). By gossip a node sends to its neighbours however many workers there are; in an
all-reduce nearly twice the model; a server sends the model to every worker. Unless it is quick it also draws
docs/growth.svg. Virtual time and counted bytes: the figures are the same on every machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import DRAWN, Row

WORKERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
STRATEGIES = ("gossip", "gossip:exponential", "push", "adpsgd", "allreduce", "sync", "async")
COUNT, SETTLE, STEPS = 1 << 14, 4, 20  # steps that are counted follow those in which all settle
CLUSTER = '[[hosts]]\nstep_time = "10 ms"\nbandwidth = "1 Gbit/s"\nlatency = "0.1 ms"\n'
SERVER = '[servers]\nbandwidth = "1 Gbit/s"\nlatency = "0.1 ms"\n'
PLOT = Path(__file__).parents[1] / "docs" / "growth.svg"


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    sizes = WORKERS[:5:2] if quick else WORKERS
    found = {strategy: [grown(strategy, workers) for workers in sizes] for strategy in STRATEGIES}
    model = 4 * COUNT
    for strategy, values in found.items():
        for workers, (nbytes, seconds) in zip(sizes, values, strict=True):
            rows.append(
                Row(
                    f"{strategy}, {workers} workers: busiest node, per step", nbytes / model, "models",
                    theirs=values[0][0] / model, ratio=nbytes / values[0][0],
                    more={"step": f"{1e3 * seconds:.1f} ms"},
                )
            )  # fmt: skip
    notes = [
        f"theirs: the same with {sizes[0]} workers; {STEPS} steps of each worker after {SETTLE} to settle",
        "a server counts as a node; under async a step is a worker's own",
    ]
    if not quick:
        draw(found, PLOT)
        notes.append(f"drawn: {PLOT.relative_to(PLOT.parents[1])}")
    return rows, notes


def grown(strategy: str, workers: int) -> tuple[float, float]:
    """Bytes that the busiest node sends per step, and seconds per step."""
    import torch

    import polyrhythm as pr

    seen: dict[str, Any] = {}

    def main() -> None:
        session: Any = pr.init()
        model = torch.nn.Linear(COUNT, 1, bias=False)
        prepared: Any = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model, optimizer = prepared
        node = session._node
        for step in range(SETTLE + STEPS):
            if step == SETTLE and "before" not in seen:
                nodes = dict(node.world.nodes)
                seen["before"] = {peer: each.bytes_sent for peer, each in nodes.items()}, node.now()
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        seen["after"] = {peer: each.bytes_sent for peer, each in node.world.nodes.items()}, node.now()

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(CLUSTER + SERVER)
        pr.simulate(main, workers=workers, strategy=strategy, cluster=cluster, threads=1)
    (before, began), (after, ended) = seen["before"], seen["after"]
    return max(after[peer] - before.get(peer, 0) for peer in after) / STEPS, (ended - began) / STEPS


def draw(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """One line per strategy, in models per step; no date: the same bytes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colours = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0f172a", "#b91c1c", "#a16207")
    with matplotlib.rc_context(DRAWN):
        figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4.4))
        for (strategy, values), colour, mark in zip(found.items(), colours, "osv^Dx+", strict=True):
            for axes, part, unit in zip(panels, (0, 1), (4 * COUNT, 1e-3), strict=True):
                axes.plot(
                    WORKERS, [each[part] / unit for each in values], f"-{mark}", color=colour, linewidth=1.4,
                    markersize=5, label=strategy,
                )  # fmt: skip
        titles = (
            "sent by the busiest node in a step, in models",
            "time of a step, ms (10 of them computing)",
        )
        for axes, title in zip(panels, titles, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(WORKERS, [str(workers) for workers in WORKERS])
            axes.tick_params(axis="x", labelsize=9)
            axes.set_xlabel("workers")
            axes.set_title(title, loc="left", fontsize=11)
            axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
            axes.set_axisbelow(True)
        panels[0].legend(frameon=False, loc="upper left", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None, "Creator": None}, dpi=110)
        pyplot.close(figure)
