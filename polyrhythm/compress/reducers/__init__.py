"""Reducers: means over a group of vectors sent through a codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.core.codec import HasReducer

if TYPE_CHECKING:
    from polyrhythm.compress.reducers.base import Reducer
    from polyrhythm.core.codec import Codec


def reducer_for(codec: Codec) -> Reducer:
    """The reducer that a codec has, or else the one given by its `reduction`."""
    from polyrhythm.compress.reducers.codes import GatheredCodes, SummedCodes

    own = codec.reducer() if isinstance(codec, HasReducer) else None
    return own or (SummedCodes() if codec.reduction.summed else GatheredCodes())
