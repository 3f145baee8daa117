"""Numbers cut to 16 bits: those beyond the range become the largest, and what is infinite stays so."""

from __future__ import annotations

import math

import pytest
import torch

from polyrhythm.memory import Memory
from polyrhythm.strategy import parse_codec


@pytest.mark.parametrize(("text", "most"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_finite_stays_so(text: str, most: float, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([3.4e38, -3.4e38, largest, -largest, most, 1.0, math.inf, -math.inf], dtype=dtype)
    code = parse_codec(text).encode(values, Memory.alone(8, feedback=False))
    assert code.tolist() == [most, -most, most, -most, most, 1.0, math.inf, -math.inf]
    assert math.isnan(parse_codec(text).encode(torch.tensor([math.nan]), Memory.alone(1, feedback=False)))
