"""Whether a run can go on when a node has died."""

from __future__ import annotations

from polyrhythm.core.peer import Peer
from polyrhythm.core.resolve import ResolvedStrategy


def fatal(peer: Peer, reason: str, running: bool, strategy: ResolvedStrategy | None, trained_by: str) -> str:
    """Why the death of a node ends the run; "" if the others can continue."""
    if not running:
        return f"{peer} {reason} before training began"
    if peer.role == "server":
        return f"{peer} {reason}; its part of the parameters is lost (is there enough memory?)"
    if trained_by:
        return f"{peer} {reason}; no worker can continue without it under {trained_by}"
    if strategy is not None and strategy.traits.survives:
        return ""
    if strategy is not None and strategy.traits.model_size > 1:
        return f"{peer} {reason}; it held a part of a model, and under {strategy} nobody else has it"
    return f"{peer} {reason}; under {strategy} no worker can continue without it (under async they can)"
