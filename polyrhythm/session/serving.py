"""The script on a server: it serves inside `prepare`, and ends there."""

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


def serve_script(
    context: WorldContext, strategy: Strategy, given: Arguments, runner: OptimizerRunner, seed: int
) -> NoReturn:
    """Serves until all workers have left, then ends the script by ServerDone."""
    node, count, model = context.node, len(context.node.members.servers), joined(given.models)
    shards = [
        Shard(model, each, context.me.rank, count, node.memory.empty, runner) for each in given.optimizers
    ]
    agree(context, [shard.layout for shard in shards], given, seed)
    with torch.no_grad():
        serve(strategy, node, shards)
    steps = sum(shard.version for shard in shards)
    node.totals(steps=steps, samples=0, compute_s=0.0, wait_s=0.0)
    context.flush()
    context.request(LeaveRun())
    raise ServerDone
