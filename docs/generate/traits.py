"""What a strategy or codec does, in words, from its traits."""

from __future__ import annotations

from polyrhythm.core.codec import Codec, ForReplies, Reduction
from polyrhythm.core.compose import gradients_only
from polyrhythm.core.strategy import Strategy

REDUCTIONS = {
    Reduction.ELEMENTWISE: "Codes are one float per number and are summed on their way, so every collective "
    "works: shared memory, ring, hierarchical.",
    Reduction.SUM: "Codes are floats whose mean is the code of the mean, so they are summed on their way and "
    "every collective works.",
    Reduction.HOPS: "Every worker gathers the codes of all and averages them. With `--collective ring` a "
    "code is decoded, added to and encoded again at each hop.",
    Reduction.GATHER: "Every worker gathers the codes of all, decodes and averages them.",
    Reduction.JOINT: "There is no code to gather: all workers compute the mean together.",
}

MEAN = (
    "Each worker contributes its parameters (with a codec: how far it has come) to a mean over all workers."
)

# Traits do not say what is sent, only how; these are not what `_what` would guess.
SENT = {
    "local": MEAN,
    "slowmo": MEAN,
    "postlocal": "Each worker contributes its gradient, later its parameters, to a mean over all workers.",
    "easgd": "Each worker pushes its parameters to the servers, and gets what to subtract in reply.",
    "dana-slim": "Each worker pushes its Nesterov direction to the servers, and gets parameters in reply.",
    "gossip": "Each worker sends its parameters to its neighbors.",
    "choco": "Each worker sends its neighbors the difference to its public estimate, through the codec.",
    "adpsgd": "A worker sends its parameters to one neighbor, and gets what to subtract in reply.",
    "push": "Each worker sends a share of its parameters and weight to the next receivers.",
    "noloco": "Two workers of a pair send each other the parameters at the start and the end of the round.",
    "broadcast": "Each worker sends its pulses to all other workers.",
}
WHEN = {
    "postlocal": "In every step until the learning rate falls, from then on every `period` steps.",
    "broadcast": "In every step in which an update has grown to τ.",
}


def table(strategy: Strategy) -> str:
    """Answers to what one asks of a strategy first, for its default fields."""
    rows = {
        "What is sent": SENT.get(strategy.name) or _what(strategy),
        "When": WHEN.get(strategy.name) or _when(strategy),
        "Who waits": _waits(strategy),
        "When a worker is lost": _loss(strategy),
        "Servers": "At least one." if strategy.traits.uses_servers else "None.",
        **_special(strategy),
    }
    lines = [
        "| | with the default fields |",
        "|---|---|",
        *(f"| {key} | {text} |" for key, text in rows.items()),
    ]
    return "\n".join(lines)


def _what(strategy: Strategy) -> str:
    traits = strategy.traits
    update = "how far it has come since the last exchange"
    if traits.one_host:
        return "Nothing. All workers of one host work on one copy of the parameters in shared memory."
    if traits.uses_servers:
        sent = update if strategy.exchanges == "updates" else "its gradient"
        return f"Each worker pushes {sent} to the servers, and gets parameters in reply."
    if traits.parameters_held_by_peers:
        return "Workers exchange with each other directly."
    sent = update if strategy.exchanges == "updates" else "its gradient"
    return f"Each worker contributes {sent} to a mean over all workers."


def _when(strategy: Strategy) -> str:
    traits = strategy.traits
    if traits.one_host:
        return "There is no exchange."
    period = getattr(strategy, "period", traits.sync_period)
    if traits.sync_delay:
        late = f"{traits.sync_delay} step{'s' if traits.sync_delay > 1 else ''}"
        return f"Every {traits.sync_period} steps a part of the model; its result is used {late} later."
    return "In every step." if period == 1 else f"Every {period} steps (`period`)."


def _waits(strategy: Strategy) -> str:
    traits = strategy.traits
    if traits.lockstep and traits.parameters_held_by_peers:
        return "All workers take the same number of steps. A worker waits for those that it exchanges with."
    if traits.lockstep and traits.sync_delay:
        return (
            "All workers take the same number of steps. A worker waits only if the result of an exchange "
            "has not arrived when it is to be used."
        )
    if traits.lockstep:
        return "All workers take the same number of steps, and wait for each other at every exchange."
    bound = getattr(strategy, "max_staleness", float("inf"))
    if bound < float("inf"):
        return f"A worker waits once it is more than {bound:g} steps ahead of the slowest (`max_staleness`)."
    if getattr(strategy, "pull", "") == "next-version":
        return "A worker waits until the servers have applied its push or dropped it."
    return "No worker waits for another. Each takes batches at its own pace."


def _loss(strategy: Strategy) -> str:
    traits = strategy.traits
    if not traits.survives:
        return "The run ends with an error that names the worker; resume it from a checkpoint."
    if traits.lockstep:
        return "The others continue. With `--restarts` a replacement joins at the next epoch."
    return "The others continue with its batches. With `--restarts` a replacement joins at once."


def _special(strategy: Strategy) -> dict[str, str]:
    traits, rows = strategy.traits, {}
    if traits.optimizer != "any":
        rows["Optimizer"] = f"`torch.optim.{traits.optimizer}` only."
    if traits.one_host:
        rows["Where"] = "All workers must be on one host."
    if traits.weighted_by_examples:
        rows["Uneven data"] = "The mean weighs workers by their examples."
    if traits.sparse_gradients:
        rows["Sparse gradients"] = "They stay sparse."
    return rows


def of_codec(codec: Codec) -> str:
    """How the codes of several workers become a mean, and what travels between a server and a worker."""
    parts = [REDUCTIONS[codec.reduction]]
    if codec.feedback:
        parts.append("What is not sent is kept on the sender and sent later (error feedback).")
    if gradients_only(codec):
        parts.append("It is for gradients only: it transforms them before they are encoded.")
    if isinstance(codec, ForReplies) and type(reply := codec.for_replies()) is not type(codec):
        parts.append(
            f"Servers reply by [`{reply.name}`]({reply.name}.md), because their replies are differences."
        )
    return " ".join(parts)
