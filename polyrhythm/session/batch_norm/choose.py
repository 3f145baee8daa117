"""Makes the BatchNorm policy of a worker from its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.replica import Replica
from polyrhythm.session.batch_norm.borrowed import protect_statistics
from polyrhythm.session.batch_norm.policies import Mean, Policy, Rank0, Recompute, tracking
from polyrhythm.session.batch_norm.pooling import SumOverWorkers
from polyrhythm.session.batch_norm.sync import Sync
from polyrhythm.session.data import SharedLoader


def choose(
    name: str, node: Node, replica: Replica, loaders: Sequence[SharedLoader], samples: Callable[[], int],
    seed: int, all_reduce: SumOverWorkers, strategy: Strategy,
) -> Policy | None:  # fmt: skip
    """The policy of this name; None if there is nothing to do. Called by all workers at the same point."""
    model = replica.model
    if name != "sync" and any(loader.borrows for loader in loaders):
        protect_statistics(replica)
    if name == "local":
        return None
    if name == "sync":
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            return None
        policy = Sync(model, node, replica, all_reduce)
        policy.start()
        return policy
    if not tracking(model):
        return None
    if name == "recompute":
        if not loaders:
            raise UsageError("batch_norm=recompute needs the training loader: pass it to session.prepare()")
        return Recompute(model, node, loaders[0], seed)
    merged = Rank0(model, node, samples) if name == "rank0" else Mean(model, node, samples)
    if strategy.traits.parameters_held_by_peers:
        merged.use_exchange(strategy.traits.lockstep)
    return merged
