"""Policies for BatchNorm's statistics when several workers train.

This module has the names and requirements, without torch: the command line and the coordinator check them
before anything starts. The policies are in `policies` and `sync`; `choose` makes one.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy

DEFAULT = "local"

POLICIES = {
    "local": "each worker keeps its own; the final model has those of the worker that sends it",
    "rank0": "consensus and final model have those of worker 0, or of the lowest rank that is alive",
    "mean": "consensus and final model have those of all workers, merged by the law of total variance",
    "sync": "every training forward pass uses the statistics of all workers' batches together",
    "recompute": "recomputed from training batches for consensus and final model",
}


def check_name(text: str) -> str:
    """Returns the name of a policy if it exists; otherwise raises UsageError with the nearest one.

    >>> check_name("mean")
    'mean'
    """
    if text in POLICIES:
        return text
    near = difflib.get_close_matches(str(text).lower(), POLICIES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"unknown batch_norm policy {text!r}{hint} Known: {', '.join(POLICIES)}")


def check(policy: str, strategy: Strategy) -> None:
    """Raises UsageError if a policy makes workers wait for each other under a strategy where they do not."""
    # Workers that hold the parameters among themselves can also request each other's statistics.
    traits = strategy.traits
    if policy in ("rank0", "mean") and not (traits.lockstep or traits.parameters_held_by_peers):
        raise UsageError(
            f"batch_norm={policy} needs a strategy in which all workers step together, such as allreduce, "
            "local:8 or sync, or one in which they exchange with each other, such as gossip or adpsgd; under "
            f"{strategy} each goes at its own pace: use batch_norm=recompute or local"
        )
    if policy == "sync" and not strategy.traits.lockstep:
        raise UsageError(
            "batch_norm=sync needs a strategy in which all workers step together, such as allreduce, local:8 "
            f"or sync; under {strategy} each goes at its own pace: use batch_norm=recompute or local"
        )
    # If a worker dies inside a pass, the others have computed with different unions of batches. And under
    # strategies that survive this, each worker normalizes the activations of its own parameters anyway.
    if policy == "sync" and strategy.traits.survives:
        raise UsageError(
            f"batch_norm=sync makes all workers wait for each other in every layer, but under {strategy} "
            "they continue without one that dies: use batch_norm=mean, rank0, recompute or local"
        )
