"""Recurrent layers in capture: their shapes after two steps, in place of all steps of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._decomp import decompositions

_NAME = "_rnn_helper"  # what torch decomposes LSTM, GRU and RNN by, step by step
_FEW = 2  # steps; one would be a size that torch.export takes for a constant


@contextmanager
def short_sequences() -> Iterator[None]:
    """Computes the shapes that LSTM, GRU and RNN return from the first steps of a sequence.

    torch.export records such a layer as one operation, but runs it on shapes step by step: 13 seconds for
    two sequences of 140, instead of half a second. A length that may vary is left to torch, which fixes it.
    """
    original = getattr(decompositions, _NAME, None)
    if original is None:  # another version of torch: capture takes longer
        yield
        return

    def shortened(data: Tensor, hidden: Any, params: Any, *settings: Any) -> tuple[Tensor, Any]:
        *_, batch_first, layer = settings
        time = 1 if batch_first else 0
        length, packed = data.shape[time], "batch_sizes" in getattr(layer, "keywords", ())
        if packed or not isinstance(length, int) or length <= _FEW:
            return original(data, hidden, params, *settings)  # type: ignore[no-any-return]
        output, final = original(data.narrow(time, 0, _FEW), hidden, params, *settings)
        steps = output.transpose(0, time)[:1]
        return steps.expand(length, *steps.shape[1:]).contiguous().transpose(0, time), final

    setattr(decompositions, _NAME, shortened)
    try:
        yield
    finally:
        setattr(decompositions, _NAME, original)
