"""Whether the rows of a model's output depend on each other: then micro-batches change what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyrhythm.core.errors import UsageError
from polyrhythm.model.spilled import paging
from polyrhythm.parallel.partition import Partition
from polyrhythm.parallel.untouched import random_states_kept

_TOLERANCE = 1e-3  # relative to the largest number: other sizes round differently


def check_rows(parts: Partition, inputs: Mapping[str, Any], batched: Sequence[str]) -> None:
    """Raises UsageError if a batch in two pieces has another output than in one, in evaluation."""
    lengths = {len(inputs[name]) for name in batched}
    if len(lengths) > 1:
        rows = " and ".join(map(str, sorted(lengths)))
        raise UsageError(
            f"the inputs of the model have {rows} rows, so a batch cannot be "
            "cut into micro-batches: give them the batch as first dimension, or use micro_batches=1"
        )
    if not lengths or min(lengths) < 2:
        return
    half = lengths.pop() // 2
    pieces = (
        {name: inputs[name][:half] for name in batched},
        {name: inputs[name][half:] for name in batched},
    )
    with torch.no_grad(), random_states_kept(), paging():
        whole = pytree.tree_leaves(parts.run("eval", inputs))
        halves = [pytree.tree_leaves(parts.run("eval", {**inputs, **piece})) for piece in pieces]
    for one, first, second in zip(whole, *halves, strict=True):
        if isinstance(one, Tensor) and one.dim() and not _same(one, first, second):
            raise UsageError(
                "the output of the model for a row depends on other rows of its batch, so micro-batches "
                "would change it: use micro_batches=1, or give the model the batch as first dimension, as by "
                "batch_first=True"
            )


def _same(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    if first.shape[1:] != whole.shape[1:] or len(first) + len(second) != len(whole):
        return False
    joined = torch.cat([first, second])
    if not whole.is_floating_point():
        return torch.equal(whole, joined)
    finite = whole.isfinite()
    scale = float(whole[finite].abs().max()) if bool(finite.any()) else 0.0
    return torch.allclose(whole, joined, rtol=0, atol=_TOLERANCE * max(scale, 1e-6), equal_nan=True)
