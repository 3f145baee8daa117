"""Makes the BatchNorm policy of a worker from its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import ModuleList
from torch.nn.modules.batchnorm import _BatchNorm

from polyrhythm.core.errors import UsageError
from polyrhythm.core.node import Node
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.replica import Replica
from polyrhythm.session.batch_norm.borrowed import protect_statistics
from polyrhythm.session.batch_norm.policies import (
    Mean,
    Merged,
    Policy,
    Rank0,
    Recompute,
    other_names,
    shared_buffers,
    statistics_names,
    tracking,
)
from polyrhythm.session.batch_norm.pooling import SumOverWorkers
from polyrhythm.session.batch_norm.sync import Sync
from polyrhythm.session.data import SharedLoader


def choose(
    name: str, node: Node, replica: Replica, loaders: Sequence[SharedLoader], samples: Callable[[], int],
    seed: int, all_reduce: SumOverWorkers, strategy: Strategy,
) -> Policy | None:  # fmt: skip
    """The policy of this name; None if there is nothing to do. Called by all workers at the same point."""
    model, traits = replica.model, strategy.traits
    if name != "sync" and any(loader.borrows for loader in loaders):
        protect_statistics(replica)
    normed = any(isinstance(module, _BatchNorm) for module in model.modules())
    if name == "local" or not (shared_buffers(model) or normed):
        return None
    policy: Merged
    if name == "sync" and normed:
        synced = policy = Sync(model, node, replica, all_reduce)
        synced.start()
    elif name == "recompute" and tracking(model):
        if not loaders:
            raise UsageError("batch_norm=recompute needs the training loader: pass it to session.prepare()")
        if isinstance(model, ModuleList):
            raise UsageError(
                "batch_norm=recompute has to call the model as the script does, which it knows for one model "
                "only: use batch_norm=mean, or local"
            )
        policy = Recompute(model, node, samples, loaders[0], seed)
    elif name == "mean" and tracking(model):
        policy = Mean(model, node, samples, other_names(model), statistics_names(model))
    else:
        policy = Rank0(model, node, samples, list(shared_buffers(model)))
    if (traits.parameters_held_by_peers or not traits.lockstep) and (policy.copied or policy.merged):
        policy.use_exchange(traits.lockstep, traits.parameters_held_by_peers)
    return policy
