"""A server: it holds its ranges of the parameters from `prepare` to the end of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from polyrhythm.core.node import Node
from polyrhythm.core.requests import LeaveRun
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import joined
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.shard import Shard
from polyrhythm.session.agreement import agree
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.context import ServerDone, WorldContext
from polyrhythm.session.part import scoped


def serve_run(
    context: WorldContext, strategy: Strategy, given: Arguments, runner: OptimizerRunner, seed: int
) -> NoReturn:
    """Serves until all workers have left, and ends the script."""
    node, model = context.node, joined(given.models)
    rank, count = context.me.rank, len(node.members.servers)
    shards = [Shard(model, each, rank, count, node.memory.empty, runner) for each in given.optimizers]
    agree(context, [shard.layout for shard in shards], given, seed)
    with torch.no_grad():
        serve(strategy, node, shards)
    steps = sum(shard.version for shard in shards)
    node.totals(steps=steps, samples=0, compute_s=0.0, wait_s=0.0)
    context.flush()
    context.request(LeaveRun())
    raise ServerDone


def serve(strategy: Strategy, node: Node, shards: Sequence[Shard]) -> None:
    """Serves the parameters of all parts until the run is over, several ones side by side."""
    servers = [
        strategy.server(each, shard) for each, shard in zip(scoped(node, len(shards)), shards, strict=True)
    ]
    if len(servers) == 1:
        servers[0].serve()
        return
    for task in [node.serve(server.serve) for server in servers]:
        task.join()
