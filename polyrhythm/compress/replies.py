"""Codecs for differences: a server's replies, and what CHOCO's workers tell each other.

Sender and receiver know the same reference, and what a code leaves out of one difference is part of the next.
That converges only if a code does not lengthen a difference on average, which stochastic rounding does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.core.codec import ForReplies

if TYPE_CHECKING:
    from polyrhythm.core.codec import Codec


def reply_codec(codec: Codec) -> Codec:
    """The codec to use for differences in place of this one; most are used as they are."""
    return codec.for_replies() if isinstance(codec, ForReplies) else codec
