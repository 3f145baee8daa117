"""What strategies that are not ported yet send through a codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.compress.transforms.base import check_optimizer
from polyrhythm.model.vectors import cut

if TYPE_CHECKING:
    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.core.codec import Codec
    from polyrhythm.core.node import Node
    from polyrhythm.model.replica import Replica


def check_way(
    node: Node, replica: Replica, codec: Codec | None, *, start: int = 0, stop: int | None = None
) -> None:
    """Raises `NotFinite` if this worker's parameters are not, before a codec is given how far it has come."""
    if codec is not None:
        own = replica.parameters if stop is None else cut(replica.parameters, start, stop)
        replica.layout.check_finite(own, f"{node.me} at step {replica.steps}", start, stop)


def sender_of(
    node: Node,
    replica: Replica,
    codec: Codec,
    *,
    start: int = 0,
    stop: int | None = None,
    feedback: bool | None = None,
) -> Compressor:
    """What this worker sends a range of the layout with."""
    from polyrhythm.compress.compressor import Compressor
    from polyrhythm.compress.legacy_state import ReplicaState

    if (start, stop) not in replica.senders:
        if not isinstance(state := replica.notes.get("codecs"), ReplicaState):
            check_optimizer(codec, replica.optimizer.param_groups)
            saved, state = state or {}, ReplicaState(node, replica)
            state.load_segments(saved)
            replica.notes["codecs"] = state
        replica.senders[start, stop] = Compressor(codec, state, start=start, stop=stop, feedback=feedback)
    return replica.senders[start, stop]


def rescale(replica: Replica, codec: Codec) -> None:
    """Gradients that were not sent yet are worth what they were when they were computed.

    They are kept without the learning rate, so if SGD's has changed they change with it: the step that they
    are part of later is as long as it would have been.
    """
    import torch

    if not isinstance(replica.optimizer, torch.optim.SGD) or not codec.feedback:
        return
    rates = [float(group["lr"]) for group in replica.optimizer.param_groups]
    before, replica.notes["rates of residuals"] = replica.notes.get("rates of residuals", rates), rates
    if rates == before:
        return
    residual = replica.residual
    for span in replica.spans(whole=True):
        now, then = rates[span.group], before[span.group]
        if now > 0:
            span.of(residual).mul_(then / now)
        else:
            rates[span.group] = then  # a rate of 0 is a pause


def rates_of_residuals(replica: Replica) -> list[float]:
    """The learning rate of each parameter group by which what was not sent yet counts."""
    groups = replica.optimizer.param_groups
    known: list[float] = replica.notes.get("rates of residuals", [])
    return known or [float(group.get("lr", 0.0)) for group in groups]
