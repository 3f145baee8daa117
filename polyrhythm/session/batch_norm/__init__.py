"""Policies for BatchNorm's statistics when several workers train.

This module has the names and requirements, without torch: the command line and the coordinator check them
before anything starts. The policies are in `policies` and `sync`; `choose` makes one.
"""

from __future__ import annotations

import contextlib
import difflib
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy

DEFAULT = "rank0"

POLICIES = {
    "local": "each worker keeps and shows its own; the final model has those of the worker that sends it",
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
    if policy == "mean" and not (traits.lockstep or traits.parameters_held_by_peers):
        raise UsageError(
            f"batch_norm={policy} needs a strategy in which all workers step together, such as allreduce, "
            "local:8 or sync, or one in which they exchange with each other, such as gossip or adpsgd; under "
            f"{strategy} each goes at its own pace: use batch_norm=recompute, rank0 or local"
        )
    if policy == "sync" and not strategy.traits.lockstep:
        raise UsageError(
            "batch_norm=sync needs a strategy in which all workers step together, such as allreduce, local:8 "
            f"or sync; under {strategy} each goes at its own pace: use batch_norm=recompute, rank0 or local"
        )
    # If a worker dies inside a pass, the others have computed with different unions of batches. And under
    # strategies that survive this, each worker normalizes the activations of its own parameters anyway.
    if policy == "sync" and strategy.traits.survives:
        raise UsageError(
            f"batch_norm=sync makes all workers wait for each other in every layer, but under {strategy} "
            "they continue without one that dies: use batch_norm=mean, rank0, recompute or local"
        )


def unchosen_note(strategy: Strategy) -> str:
    """What to tell the user of a model with BatchNorm who has not chosen a policy."""
    fitting = []
    for policy in ("mean", "sync", "recompute"):
        with contextlib.suppress(UsageError):
            check(policy, strategy)
            fitting.append(policy)
    return (
        "the model has BatchNorm and no policy was chosen: consensus() and the final model have the running "
        f"statistics of worker 0; --batch-norm {' or '.join(fitting)} uses the data of all workers"
    )
