"""What becomes of BatchNorm's statistics when several workers train: one policy, whatever the strategy.

The names and what they need are here, without torch: the command line and the coordinator check them before
anything starts. What they do is in `policies` and `sync`; `choice` makes one.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from polyrhythm.errors import UsageError

if TYPE_CHECKING:
    from polyrhythm.strategy import Strategy

DEFAULT = "local"

POLICIES = {
    "local": "each worker keeps its own; the final model has those of the worker that brings it",
    "rank0": "consensus and final model have worker 0's",
    "mean": "consensus and final model have those of all workers, merged by the law of total variance",
    "sync": "batch statistics are those of all workers' batches together, in every training forward",
    "recompute": "computed anew for consensus and final model, from training batches",
}

_TOGETHER = ("rank0", "mean", "sync")  # where workers wait for each other


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
    """Raises UsageError if workers would have to wait for each other under a strategy where they do not."""
    if policy in _TOGETHER and not strategy.lockstep:
        raise UsageError(
            f"batch_norm={policy} needs a strategy in which all workers step together, such as allreduce, "
            f"local:8 or sync; under {strategy} each goes at its own pace: use batch_norm=recompute or local"
        )
