"""Which strategies and codecs compose, and if two do not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.core.codec import Codec, HasReducer, HasTransform, Reduction

if TYPE_CHECKING:
    from polyrhythm.core.strategy import Strategy


def refusal(
    strategy: Strategy | type[Strategy], codec: Codec | type[Codec], collective: str | None = None
) -> str:
    """Why a strategy cannot send through a codec, in one line; empty if it can.

    A class stands for its default configuration. Pass the collective to check that too.

    >>> import polyrhythm as pr
    >>> refusal(pr.parse("diloco"), pr.parse("allreduce+dgc").codec)
    'dgc compresses gradients only; diloco sends parameter updates'
    """
    if not strategy.codecs:
        return f"{strategy.name} takes no codec"
    made = codec if isinstance(codec, Codec) else codec()
    if strategy.exchanges != "gradients" and gradients_only(made):
        return f"{made} compresses gradients only; {strategy.name} sends parameter updates"
    if collective is None or not made.reduction.gathered:
        return ""
    chosen = strategy() if isinstance(strategy, type) else strategy
    return "" if chosen.traits.uses_servers else _on_the_way(made, collective)


def gradients_only(codec: Codec) -> bool:
    """True if a codec is meaningless unless the vectors that it encodes are gradients."""
    if isinstance(codec, HasTransform) and codec.transform() is not None:
        return True
    reducer = codec.reducer() if isinstance(codec, HasReducer) else None
    return reducer is not None and reducer.gradients_only


def _on_the_way(codec: Codec, collective: str) -> str:
    """Why codes that are gathered cannot travel by a collective that sums on the way."""
    hops = collective == "ring" and codec.reduction is Reduction.HOPS
    if collective not in ("ring", "hierarchical", "shared") or hops:
        return ""
    where = "in shared memory" if collective == "shared" else "on its way round a ring"
    return (
        f"what {codec.name} sends cannot be added up {where}; leave out --collective {collective}, and "
        "every worker gathers what all send, or use a strategy with a server, such as "
        f"async+{codec} or sync+{codec}"
    )
