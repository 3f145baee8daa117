"""A server: it holds its ranges of the parameters from `prepare` to the end of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from polyrhythm.core.node import Node
from polyrhythm.core.requests import LeaveRun
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.shard import Shard
from polyrhythm.session.agreement import agree
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.context import ServerDone, WorldContext
from polyrhythm.session.placement import Placement


def serve_run(
    context: WorldContext,
    strategy: Strategy,
    given: Arguments,
    placement: Placement,
    runner: OptimizerRunner,
    seed: int,
) -> NoReturn:
    """Serves until all workers have left, and ends the script."""
    node, count = context.node, len(context.node.members.servers)
    parts = placement.on_server(node, given)
    shards = [
        Shard(each.model, each.optimizer, context.me.rank, count, node.memory.empty, runner) for each in parts
    ]
    agree(context, [shard.layout for shard in shards], given, seed)
    with torch.no_grad():
        serve(strategy, node, [each.node for each in parts], shards)
    steps = sum(shard.version for shard in shards)
    node.totals(steps=steps, samples=0, compute_s=0.0, wait_s=0.0)
    context.flush()
    context.request(LeaveRun())
    raise ServerDone


def serve(strategy: Strategy, node: Node, nodes: Sequence[Node], shards: Sequence[Shard]) -> None:
    """Serves the parameters of all parts until the run is over, several ones side by side.

    `nodes`: the node as each part sees it.
    """
    servers = [strategy.server(each, shard) for each, shard in zip(nodes, shards, strict=True)]
    if len(servers) == 1:
        servers[0].serve()
        return
    for task in [node.serve(server.serve) for server in servers]:
        task.join()
