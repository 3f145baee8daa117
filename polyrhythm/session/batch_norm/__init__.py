"""What becomes of BatchNorm's statistics when several workers train: one policy, whatever the strategy.

The names and what they need are here, without torch: the command line and the coordinator check them before
anything starts. What they do is in `policies` and `sync`; `choice` makes one.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from polyrhythm.core.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy

DEFAULT = "local"

POLICIES = {
    "local": "each worker keeps its own; the final model has those of the worker that brings it",
    "rank0": "consensus and final model have worker 0's; if it dies, those of the next one that has trained",
    "mean": "consensus and final model have those of all workers, merged by the law of total variance",
    "sync": "batch statistics are those of all workers' batches together, in every training forward",
    "recompute": "computed anew for consensus and final model, from training batches",
}


def named(text: str) -> str:
    """The policy of this name; UsageError says what would be one.

    >>> named("mean")
    'mean'
    """
    if text in POLICIES:
        return text
    near = difflib.get_close_matches(str(text).lower(), POLICIES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise UsageError(f"unknown batch_norm policy {text!r}{hint} Known: {', '.join(POLICIES)}")


def check(policy: str, strategy: Strategy) -> None:
    """Raises UsageError if a policy has workers wait for each other under a strategy where they do not."""
    # Workers that hold the parameters among themselves can ask each other for the rest too.
    traits = strategy.traits
    if policy in ("rank0", "mean") and not (traits.lockstep or traits.parameters_held_by_peers):
        raise UsageError(
            f"batch_norm={policy} needs a strategy in which all workers step together, such as allreduce, "
            "local:8 or sync, or one in which they ask each other, such as gossip or adpsgd; under "
            f"{strategy} each goes at its own pace: use batch_norm=recompute or local"
        )
    if policy == "sync" and not strategy.traits.lockstep:
        raise UsageError(
            "batch_norm=sync needs a strategy in which all workers step together, such as allreduce, local:8 "
            f"or sync; under {strategy} each goes at its own pace: use batch_norm=recompute or local"
        )
    # In the middle of a pass nobody can go on without another: what each has got by then is of different
    # unions. Nor would they be one machine: each normalises what comes of parameters of its own.
    if policy == "sync" and strategy.traits.survives:
        raise UsageError(
            f"batch_norm=sync has all workers wait for all in every layer, and under {strategy} they go on "
            "without one that dies: use batch_norm=mean, rank0, recompute or local"
        )
