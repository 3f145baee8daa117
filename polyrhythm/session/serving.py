"""What the script of a server does in `prepare`: it serves until the run is over."""

from __future__ import annotations

from typing import NoReturn

import torch

from polyrhythm.core.requests import LeaveRun
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import joined
from polyrhythm.model.optimizer_runner import OptimizerRunner
from polyrhythm.model.shard import Shard
from polyrhythm.session.agreement import agree
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.context import ServerDone, WorldContext
from polyrhythm.session.part import serve
from polyrhythm.session.placement import Placement


def serve_until_over(
    context: WorldContext,
    strategy: Strategy,
    given: Arguments,
    placement: Placement,
    runner: OptimizerRunner,
    seed: int,
) -> NoReturn:
    """Serves a range of the parameters of each part of the model."""
    node, model, count = context.node, joined(given.models), len(context.node.members.servers)
    nodes, optimizers = placement.on_server(node, given.optimizers)
    shards = [Shard(model, each, context.me.rank, count, node.memory.empty, runner) for each in optimizers]
    agree(context, [shard.layout for shard in shards], given, seed)
    with torch.no_grad():
        serve(strategy, node, nodes, shards)
    steps = sum(shard.version for shard in shards)
    node.totals(steps=steps, samples=0, compute_s=0.0, wait_s=0.0)
    context.flush()
    context.request(LeaveRun())
    raise ServerDone
